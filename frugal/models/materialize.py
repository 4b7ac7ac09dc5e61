"""Materialise a model's parameters from stored tensors, one at a time: quantised, or cast, as their module wants.

Decoder layers may be deferred (`DeferredLayers`): they stay on the meta device until each is filled by itself. For a
base that is sharded over processes: a layer is filled, handed over (which leaves a part of it here) and only then the
next is read, so that no process ever has the whole base in memory.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn
from transformers import PreTrainedModel

from frugal.codecs import DenseCodec, EncodedModule, Piece, encoded_parts
from frugal.model_structure import decoder_layers, inside, stacked_experts
from frugal.tensor_files import StoredTensor

NO_LAYERS = "it has no decoder layers of transformers' kind (GradientCheckpointingLayer)"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a checkpoint goes."""

    name: str
    """Of the parameter or buffer in the model."""
    entry: StoredTensor
    piece: Piece | None = None
    """Which part of a stack of experts it is; None: all of the parameter."""


@dataclass(frozen=True, slots=True)
class PendingTensor:
    """A tensor of a checkpoint and the parameter or buffer that it becomes, or becomes a part of."""

    entry: StoredTensor
    module: nn.Module
    part: str
    """Name of the parameter or buffer in ``module``."""
    piece: Piece | None = None
    float32: bool = False
    """The model's class wants it in float32 whatever is computed in (`keeps_float32`)."""

    @property
    def quantised(self) -> bool:
        """Whether the tensor is encoded by its module's codec."""
        return self.part in encoded_parts(self.module)

    def resident(self, compute: torch.dtype) -> torch.dtype:
        """Dtype in memory of a tensor that is not quantised."""
        if self.float32:
            return torch.float32
        return resident_dtype(self.entry.dtype, _table_ndim(self.module, len(self.entry.shape)), compute)

    def matrices(self, handle: IO[bytes]) -> Iterator[tuple[Piece, torch.Tensor]]:
        """The matrices of experts that it holds, one in memory at a time."""
        if self.piece is not None:
            yield self.piece, self.entry.read(handle=handle)
            return
        for expert in range(self.entry.shape[0]):
            yield Piece(expert), self.entry.read(expert, expert + 1, handle=handle)[0]


def pending(model: nn.Module, places: Iterable[Place]) -> list[PendingTensor]:
    """``places`` with the modules that they belong to."""
    found = []
    for place in places:
        owner, _, part = place.name.rpartition(".")
        module = model.get_submodule(owner)
        found.append(PendingTensor(place.entry, module, part, place.piece, keeps_float32(model, place.name)))
    return found


def keeps_float32(model: nn.Module, name: str) -> bool:
    """Whether the model's class demands float32 for this tensor: routers whose choices rounding would change."""
    names = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(re.search(rf"(^|\.){re.escape(one)}($|\.)", name) for one in names)


def _table_ndim(module: nn.Module, ndim: int) -> int:
    """``ndim`` in embeddings and linear layers, else 0: other matrices cannot be upcast on use, they must be ready."""
    return ndim if isinstance(module, nn.Linear | nn.Embedding) else 0


def resident_dtype(stored: torch.dtype, ndim: int, compute: torch.dtype) -> torch.dtype:
    """Dtype in memory of an unquantised tensor: matrices of 16 bits never become float32, everything else computes."""
    return DenseCodec(compute).resident(stored) if ndim >= 2 or not stored.is_floating_point else compute


def materialize(tensors: Iterable[PendingTensor], dtype: torch.dtype, device: torch.device) -> None:
    """Read each tensor, in the order of the files, quantise or cast it on ``device``, and drop it before the next.

    Holds what was materialised so far and one tensor. Raises ModelError when a file ends too early.
    """
    with contextlib.ExitStack() as stack:
        handles: dict[Path, IO[bytes]] = {}
        for each in sorted(tensors, key=lambda each: (each.entry.file, each.entry.begin)):
            entry = each.entry
            if entry.file not in handles:
                handles[entry.file] = stack.enter_context(open(entry.file, "rb", buffering=0))
            if each.piece is not None or (len(entry.shape) == 3 and stacked_experts(each.module)):
                _fill_stack(each, handles[entry.file], dtype, device)
                continue
            tensor = entry.read(handle=handles[entry.file]).to(device)
            if each.quantised:
                assert isinstance(each.module, EncodedModule)
                each.module.encode_(each.part, tensor)
            else:
                set_tensor(each.module, each.part, tensor.to(each.resident(dtype)))
            del tensor  # else it lives while the next one is read


def _fill_stack(each: PendingTensor, handle: IO[bytes], dtype: torch.dtype, device: torch.device) -> None:
    """Read a stack of experts, or what the tensor holds of one, matrix by matrix: never all of it as stored."""
    if each.quantised:
        assert isinstance(each.module, EncodedModule)
        for piece, matrix in each.matrices(handle):
            each.module.encode_piece_(each.part, piece, matrix.to(device))
            del matrix
        return
    stack = getattr(each.module, each.part)
    if stack.is_meta:
        stack = torch.empty(stack.shape, dtype=each.resident(dtype), device=device)
        set_tensor(each.module, each.part, stack)
    for piece, matrix in each.matrices(handle):
        rows = stack.shape[1] // piece.parts
        stack.data[piece.expert, piece.part * rows : (piece.part + 1) * rows] = matrix.to(device)
        del matrix


def set_tensor(module: nn.Module, part: str, tensor: torch.Tensor) -> None:
    """Set a parameter or buffer that was on the meta device."""
    if part in module._parameters:
        module._parameters[part] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[part] = tensor


def not_by_layer(reason: str) -> str:
    """The message for a base that cannot be loaded layer by layer."""
    return (
        f"distributed.shard_base: the base cannot be loaded layer by layer: {reason}. Write "
        "`distributed.shard_base: false`: each process then loads the whole base."
    )


class DeferredLayers:
    """The decoder layers of one model that have no weights yet, and where each finds its own.

    Modules are kept, not names: a wrapper (PEFT) may rename them and put itself around linear layers meanwhile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        places: Sequence[Place],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``places``: where every tensor goes that a parameter or buffer waits for."""
        self.layers = decoder_layers(model)
        """Name in the base model -> layer, in the model's order; filled ones too."""
        self.dtype, self.device = dtype, device
        self._config = model.config.get_text_config()
        self._outputs: int | None = None  # in the tuple that a layer returns; 0: no tuple; None: not known yet
        self._waiting: dict[str, list[PendingTensor]] = {name: [] for name in self.layers}
        for place, each in zip(places, pending(model, places), strict=True):
            self._waiting[next(layer for layer in self.layers if inside(place.name, [layer]))].append(each)

    @property
    def waiting(self) -> list[str]:
        """Names of the layers that are not filled yet."""
        return list(self._waiting)

    def fill(self, name: str) -> nn.Module:
        """Read the tensors of layer ``name``, and no others, as an ordinary load would.

        Holds the layer and one tensor as stored. A layer is filled once; raises KeyError the second time, and
        ModelError when a file ends too early.
        """
        materialize(self._waiting.pop(name), self.dtype, self.device)
        return self.layers[name]

    def kinds(self) -> list[str]:
        """Names of the first layer of each kind: shapes of parameters, and what the configuration says by layer."""
        lists = [v for v in vars(self._config).values() if isinstance(v, list | tuple) and len(v) == len(self.layers)]
        first: dict[Any, str] = {}
        for index, (name, layer) in enumerate(self.layers.items()):
            shapes = tuple((part, tuple(parameter.shape)) for part, parameter in layer.named_parameters())
            first.setdefault((type(layer), shapes, *(str(values[index]) for values in lists)), name)
        return list(first.values())

    @contextlib.contextmanager
    def only(self, name: str) -> Iterator[None]:
        """For a while the model runs with one decoder layer, ``name``, filled meanwhile; all others pass states on.

        For proofs that need a forward, before any layer is handed over. The first layer goes first: it shows what
        layers return.
        """
        layer = self.layers[name]
        before = [(module, dict(module._parameters), dict(module._buffers)) for module in layer.modules()]
        others = [other for other in self.layers.values() if other is not layer]
        note = layer.register_forward_hook(self._note_outputs)
        try:
            materialize(self._waiting[name], self.dtype, self.device)
            for other in others:
                vars(other)["forward"] = self._pass_on  # of this instance alone
            yield
        finally:
            note.remove()
            for other in others:
                vars(other).pop("forward", None)
            for module, parameters, buffers in before:
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _note_outputs(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._outputs = len(output) if isinstance(output, tuple) else 0

    def _pass_on(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self._outputs - 1)) if self._outputs else hidden_states


def defer(model: PreTrainedModel, places: Sequence[Place], dtype: torch.dtype) -> set[str]:
    """Give tensors of ``model`` that get their values later the dtype that they will have, on the meta device.

    Returns the names that ``places`` will fill, scales of encoded weights included.
    """
    filled = {place.name for place in places}
    for place, each in zip(places, pending(model, places), strict=True):
        if each.quantised:
            owner = place.name.rpartition(".")[0]
            filled.update(f"{owner}.{other}" for other in encoded_parts(each.module)[each.part])
        else:
            shape = getattr(each.module, each.part).shape
            value = torch.empty(shape, dtype=each.resident(dtype), device="meta")
            set_tensor(each.module, each.part, value)
    return filled


@dataclass(frozen=True)
class LoadedTensor:
    """What reading one tensor takes: bytes in the checkpoint's dtype meanwhile, and in memory afterwards."""

    name: str
    read_bytes: int
    scratch_bytes: int
    """Temporaries of quantising it."""
    kept_bytes: int


def set_resident_dtypes(
    model: nn.Module, dense_bytes: Mapping[str, int], stored: torch.dtype, compute: torch.dtype
) -> list[LoadedTensor]:
    """Give every tensor of a ``model`` without memory the dtype that loading a checkpoint in ``stored`` gives it.

    ``dense_bytes``: name of a parameter before quantisation -> bytes in the checkpoint. Returns what loading would
    handle, in the model's order.
    """
    tensors: list[LoadedTensor] = []
    done: set[int] = set()
    for owner, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            name = f"{owner}.{part}".removeprefix(".")
            if parameter.dtype.is_floating_point:
                resident = resident_dtype(stored, _table_ndim(module, parameter.ndim), compute)
                parameter.data = parameter.data.to(torch.float32 if keeps_float32(model, name) else resident)
            read = dense_bytes.get(name)
            if read is not None and isinstance(module, EncodedModule) and part in module.encoded_parts:
                encoded = module.encoded(part)  # scales come with their codes
                scratch = module.codec.scratch_bytes(encoded.shape, stored)
                at_once = read // encoded.shape[0] if len(encoded.shape) == 3 else read  # of experts, one matrix
                tensors.append(LoadedTensor(name, at_once, scratch, encoded.nbytes))
            elif read is not None:
                tensors.append(LoadedTensor(name, read, 0, parameter.nbytes))
    return tensors
