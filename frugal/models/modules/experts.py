"""Experts in place of a transformers experts module: stacks dense or encoded, computed by `frugal.ops.experts`.

Found by structure: two stacks with transformers' names, its flags, its call (tokens, choices, weights). What differs
between families, the gate (activation, clamps, interleaving), is the old module's own function. Whether that is all
there is to it is proven on a miniature, the same class over small random stacks, which needs no weights of the model:
plans, loading and training decide alike.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from frugal.codecs import Codec, Cut, EncodedModule, EncodedWeight, NF4Codec, NF4Tensors, Piece, PiecedStack
from frugal.model_structure import stacked_experts
from frugal.models.equivalence import mismatch
from frugal.ops import ExpertStack, experts
from frugal.ops.experts import Gate
from frugal.ops.projection import Lora

GATE_UP, DOWN = "gate_up_proj", "down_proj"
STACKS = (GATE_UP, DOWN)
_STORED = ("absmax", "nested_absmax", "offset")  # beside the codes, which have the stack's own name
_MINI_EXPERTS, _MINI_HIDDEN, _MINI_SIZE, _MINI_CHOICES = 4, 32, 24, 2


class FrugalExperts(nn.Module):
    """Dense stacks under the names they had: [experts, out, in], or [experts, in, out] where ``is_transposed``."""

    def __init__(self, old: nn.Module) -> None:
        super().__init__()
        self.num_experts = int(stacked(old, GATE_UP).shape[0])
        self.is_transposed = bool(getattr(old, "is_transposed", False))  # PEFT asks for this name
        self.tile_tokens: int | None = None
        for name, parameter in old.named_parameters(recurse=False):
            self.register_parameter(name, parameter)
        shell: Any = copy.copy(old)  # knows its gate, and holds no stack
        shell._parameters = {}
        self._gate: Gate = shell._apply_gate
        self.train(old.training)

    def matrix_stack(self, part: str) -> Tensor | EncodedWeight:
        """The stored stack ``part`` as [experts, out, in]."""
        stack = stacked(self, part)
        return stack.transpose(1, 2) if self.is_transposed else stack

    def forward(
        self,
        hidden_states: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
        *,
        gate_up_lora: Lora | None = None,
        down_lora: Lora | None = None,
        dropout: float = 0.0,
    ) -> Tensor:
        """hidden_states [tokens, hidden], choices and their weights [tokens, k] -> [tokens, hidden]."""
        gate_up, down = (
            ExpertStack(self.matrix_stack(part), getattr(self, f"{part}_bias", None), lora)
            for part, lora in zip(STACKS, (gate_up_lora, down_lora), strict=True)
        )
        return experts(
            hidden_states, top_k_index, top_k_weights, gate_up, down, self._gate,
            dropout=dropout, tile_tokens=self.tile_tokens,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Shown in the model's printout."""
        return f"experts={self.num_experts}, gate_up and down {self.sizes(GATE_UP)}, {self.sizes(DOWN)}"

    def sizes(self, part: str) -> tuple[int, ...]:
        """[experts, out, in] of a stack."""
        return tuple(int(size) for size in self.matrix_stack(part).shape)


class NF4Experts(FrugalExperts, EncodedModule):
    """Frozen stacks in NF4: blocks never cross experts, nor from gate to up, whichever way a checkpoint cuts them.

    Rows are always outputs, also where the checkpoint's are inputs: one expert is transposed while it is encoded.
    """

    codec: NF4Codec
    encoded_parts: ClassVar[Mapping[str, tuple[str, ...]]] = {
        part: (part, *(f"{part}_{stored}" for stored in _STORED)) for part in STACKS
    }

    def __init__(self, old: nn.Module, codec: NF4Codec) -> None:
        """Uninitialised storage on the device of ``old``'s stacks, which may be none ("meta")."""
        super().__init__(old)
        self.codec = codec
        self.parts = {part: cut.parts for part, cut in cuts(old).items()}
        self._pieces: dict[str, tuple[int, int, int]] = {}
        for part in STACKS:
            stack = stacked(old, part)
            count, rows, columns = (stack.transpose(1, 2) if self.is_transposed else stack).shape
            self._pieces[part] = (count * self.parts[part], rows // self.parts[part], columns)
            self._store(part, stack.device)

    def _store(self, part: str, device: torch.device) -> None:
        tensors = self.codec.empty(self._pieces[part], device).tensors()
        for name in ("packed", *_STORED):
            tensor = tensors.get(name)
            stored = None if tensor is None else nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(part if name == "packed" else f"{part}_{name}", stored)

    def encode_(self, part: str, weight: Tensor) -> None:
        """Encode a whole stack, as the checkpoint has it, expert by expert."""
        self._store(part, weight.device)
        for expert, matrix in enumerate(weight):
            self.encode_piece_(part, Piece(expert), matrix)

    @torch.no_grad()
    def encode_piece_(self, part: str, piece: Piece, matrix: Tensor) -> None:
        """Encode one matrix, as the checkpoint has it: all rows of an expert or one of ``piece.parts`` shares."""
        if self.get_parameter(part).is_meta and not matrix.is_meta:
            self._store(part, matrix.device)
        if self.is_transposed:
            matrix = matrix.t()
        own, (_, rows, columns) = self.parts[part], self._pieces[part]
        shares = own // piece.parts  # of ours, in this one
        if tuple(matrix.shape) != (rows * shares, columns):
            raise ValueError(f"{part}: one of {piece.parts} matrices of an expert is {tuple(matrix.shape)}, "
                             f"an expert has {own} of {(rows, columns)}")  # fmt: skip
        stored = self.encoded(part).pieces
        for share in range(shares):
            into = stored.expert(piece.expert * own + piece.part * shares + share).tensors()
            for name, tensor in self.codec.encode(matrix[share * rows : (share + 1) * rows]).tensors().items():
                into[name].copy_(tensor)

    def encoded(self, part: str) -> PiecedStack:
        """The stored stack, [experts, out, in] (references, no copies)."""
        packed, absmax, nested, offset = (getattr(self, name) for name in self.encoded_parts[part])
        return PiecedStack(NF4Tensors(packed, absmax, nested, offset, self._pieces[part]), self.parts[part])

    def dense(self, part: str, dtype: torch.dtype) -> Tensor:
        """The stack ``part`` as a checkpoint has it."""
        stack = self.encoded(part).dense(dtype)
        return stack.transpose(1, 2).contiguous() if self.is_transposed else stack

    def dense_experts(self, dtype: torch.dtype) -> FrugalExperts:
        """The same experts with dense stacks; biases are copied."""
        new = FrugalExperts.__new__(FrugalExperts)
        vars(new).update({key: value for key, value in vars(self).items() if key not in ("codec", "parts", "_pieces")})
        stored = {name for names in self.encoded_parts.values() for name in names}
        tensors = {
            n: p.detach().to(dtype, copy=True) for n, p in self.named_parameters(recurse=False) if n not in stored
        }
        tensors.update({part: self.dense(part, dtype) for part in STACKS})
        new._parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
        return new

    def matrix_stack(self, part: str) -> Tensor | EncodedWeight:
        """The stored stack ``part``."""
        return self.encoded(part)


def cuts(module: nn.Module) -> dict[str, Cut]:
    """How each stack of an experts module is encoded. Interleaved rows of gate and up stay one matrix."""
    transposed = bool(getattr(module, "is_transposed", False))
    return {GATE_UP: Cut(2 if getattr(module, "is_concatenated", False) else 1, transposed), DOWN: Cut(1, transposed)}


def stacked(module: nn.Module, part: str) -> Tensor:
    """A stack's parameter."""
    return module.get_parameter(part)


def experts_candidate(module: nn.Module, codec: Codec | None = None) -> FrugalExperts | str | None:
    """What may take the place of ``module``, proven on a miniature; the reason why nothing may; None: no experts.

    With ``codec`` its stacks are empty and wait for their values; without, they are the module's own.
    """
    stacks = stacked_experts(module)
    if not stacks or isinstance(module, FrugalExperts):
        return None
    prefix = f"mixture of experts ({', '.join(stacks)} stacked): left to transformers: "
    if reason := _unknown(module, set(stacks)) or _differs(module):
        return prefix + reason
    if codec is None:
        return FrugalExperts(module)
    if not isinstance(codec, NF4Codec):
        return f"{prefix}codec {codec.name} holds no stacks"
    return NF4Experts(module, codec)


def _unknown(module: Any, stacks: set[str]) -> str | None:
    """What about the module's structure is not known."""
    if stacks != set(STACKS):
        return f"only {' and '.join(STACKS)} are known"
    if not hasattr(module, "_apply_gate") or not getattr(module, "has_gate", False):
        return f"{type(module).__name__} does not say what its gate is"
    if getattr(module, "has_post_expert_norm", False):
        return "a norm comes after each expert"
    names = {name for name, _ in module.named_parameters()} | {name for name, _ in module.named_buffers()}
    if extra := names - {*STACKS, *(f"{part}_bias" for part in STACKS)}:
        return f"it has further tensors: {', '.join(sorted(extra))}"
    arguments = list(inspect.signature(inspect.unwrap(type(module).forward)).parameters)[1:]
    if len(arguments) != 3:
        return f"it is called with {', '.join(arguments)}, not with tokens, choices and weights"
    return None


def _differs(module: nn.Module) -> str | None:
    """Why the operation is not what ``module`` computes: output and gradients of input, weights of choices, stacks."""
    with torch.device("cpu"):  # also where a model without memory is being built
        mini = miniature(module)
        return mismatch(mini, FrugalExperts(mini), _MINI_HIDDEN, torch.float32, call=_routed)


def miniature(module: nn.Module) -> nn.Module:
    """``module``'s class and settings over a few small random experts on the CPU, run by transformers' own loop."""
    mini: Any = copy.copy(module)
    sizes = {GATE_UP: (2 * _MINI_SIZE, _MINI_HIDDEN), DOWN: (_MINI_HIDDEN, _MINI_SIZE)}
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float) -> nn.Parameter:
        return nn.Parameter(scale * torch.randn(shape, generator=generator))

    mini._parameters = {}
    for part, (out, columns) in sizes.items():
        scale = 4 / columns**0.5 if part == GATE_UP else 1 / columns**0.5  # gates far enough out that clamps act
        matrix = (columns, out) if getattr(module, "is_transposed", False) else (out, columns)
        mini._parameters[part] = random(_MINI_EXPERTS, *matrix, scale=scale)
        if getattr(module, f"{part}_bias", None) is not None:
            mini._parameters[f"{part}_bias"] = random(_MINI_EXPERTS, out, scale=1.0)
    mini.num_experts = _MINI_EXPERTS
    if hasattr(module, "config"):
        mini.config = copy.copy(module.config)
        mini.config._experts_implementation = "eager"
    made: nn.Module = mini
    return made


def _routed(module: nn.Module, x: Tensor) -> Tensor:
    """Run experts on x [1, tokens, width]: choices fixed, their weights a function of x: it sees their gradient."""
    flat = x[0]
    tokens = torch.arange(flat.shape[0])
    index = torch.stack([(tokens + i) % (_MINI_EXPERTS - 1) for i in range(_MINI_CHOICES)], -1)  # the last is idle
    out: Tensor = module(flat, index, flat[:, :_MINI_CHOICES].softmax(-1))
    return out[None]
