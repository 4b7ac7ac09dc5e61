"""Frozen dense weights kept in the checkpoint's 16 bits while the arithmetic runs in another dtype.

An embedding of 128256 x 4096 costs 1002 MiB more in float32 than in bfloat16. Where compute is float32 (a CPU, or a GPU
without bfloat16 by choice) only the rows in use are widened: the rows looked up, or a block of rows of the head.
Widening is exact, so results are those of a float32 copy of the same weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from frugal.codecs.base import EncodedModule, chunk, refuse_absent

BLOCK_BYTES = 16 << 20  # of one widened block of head rows


@dataclass(frozen=True, slots=True)
class DenseTensor:
    """A parameter stored as it is."""

    weight: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns) or (experts, rows, columns)."""
        return tuple(self.weight.shape)

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.weight.nbytes

    @property
    def codec(self) -> str:
        """Key in `frugal.codecs.CODECS`."""
        return DenseCodec.name

    def tensors(self) -> dict[str, torch.Tensor]:
        """The one stored tensor."""
        return {"weight": self.weight}

    def dequantize_rows(
        self, start: int, stop: int, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Rows of a matrix in ``dtype``: a view when nothing has to be converted, ``out`` if given."""
        if self.weight.ndim != 2:
            raise ValueError(f"rows of a parameter of shape {self.shape}: take an expert first")
        rows = self.weight[start:stop]
        return rows.to(dtype) if out is None else out.copy_(rows)

    def expert(self, index: int) -> DenseTensor:
        """The matrix of one expert, as a view."""
        if self.weight.ndim != 3:
            raise ValueError(f"a parameter of shape {self.shape} has no experts")
        return DenseTensor(self.weight[index])

    def shard(self, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """The rows, or experts, of ``rank``."""
        return {"weight": chunk(self.weight, rank, world_size)}


@dataclass(frozen=True)
class DenseCodec:
    """Matrices of 16 bits keep their dtype under float32 compute (and are widened while used); else ``compute``."""

    compute: torch.dtype
    name: ClassVar[str] = "none"

    def resident(self, stored: torch.dtype) -> torch.dtype:
        """Dtype in memory of a matrix that a checkpoint holds in ``stored``."""
        keeps = not stored.is_floating_point or (stored.itemsize == 2 and self.compute == torch.float32)
        return stored if keeps else self.compute

    def nbytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """Bytes in the resident dtype."""
        return torch.Size(shape).numel() * self.resident(stored).itemsize

    def scratch_bytes(self, shape: tuple[int, ...], stored: torch.dtype) -> int:
        """None beside the stored tensor and the resident one."""
        return 0

    def encode(self, weight: torch.Tensor) -> DenseTensor:
        """``weight`` in its resident dtype."""
        return DenseTensor(weight.detach().to(self.resident(weight.dtype)))

    def gather(self, shards: list[dict[str, torch.Tensor]], shape: tuple[int, ...]) -> DenseTensor:
        """Join the shards of all ranks."""
        return DenseTensor(torch.cat([shard["weight"] for shard in shards]))

    def merge_source(self, weight: torch.Tensor) -> DenseTensor:
        """The weight itself."""
        return DenseTensor(weight)


class UpcastEmbedding(nn.Embedding):
    """`nn.Embedding` whose frozen weight keeps its dtype and whose output has ``compute_dtype``."""

    compute_dtype: torch.dtype
    embed_scale: torch.Tensor
    """Factor on the rows where a family has one in its embedding (Gemma), under the name that PEFT looks for."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Look up ids [...] and return [..., embedding_dim] in ``compute_dtype``."""
        refuse_absent({"weight": self.weight}, input.device)
        rows = super().forward(input).to(self.compute_dtype)
        scale = getattr(self, "embed_scale", None)
        return rows if scale is None else rows * scale.to(self.compute_dtype)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> UpcastEmbedding:
        """``to``, ``half`` and the like: what is computed in follows, as it does in every other module."""
        self.compute_dtype = dtype_after(fn, self.compute_dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self


class UpcastLinear(nn.Linear):
    """`nn.Linear` whose frozen weight keeps its dtype; blocks of rows are widened to the input's dtype while used."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features] in the input's dtype."""
        refuse_absent({"weight": self.weight}, input.device)
        if self.weight.dtype == input.dtype:
            return super().forward(input)
        if self.weight.requires_grad:
            return F.linear(input, self.weight.to(input.dtype), _like(self.bias, input))
        out: torch.Tensor = _BlockLinear.apply(input, self.weight)
        return out if self.bias is None else out + self.bias.to(input.dtype)


def dtype_after(change: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> torch.dtype:
    """What ``change``, the function that `nn.Module._apply` is given, makes of tensors of ``dtype``."""
    return change(torch.empty(1, dtype=dtype)).dtype


def compute_dtype(model: nn.Module) -> torch.dtype | None:
    """What ``model`` computes in where its tables are kept in another dtype; None where they are not."""
    kept = (vars(module).get("compute_dtype") for module in model.modules() if isinstance(module, nn.Embedding))
    return next((dtype for dtype in kept if dtype is not None), None)


def _like(tensor: torch.Tensor | None, other: torch.Tensor) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(other.dtype)


def _block_rows(weight: torch.Tensor, dtype: torch.dtype) -> int:
    return max(1, BLOCK_BYTES // max(1, weight.shape[1] * dtype.itemsize))


class _BlockLinear(torch.autograd.Function):
    """y = x W^T for a frozen W of another dtype. Saves no activation: dX = dY W needs the weight alone."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[no-untyped-def]
        ctx.save_for_backward(weight)
        out = x.new_empty(*x.shape[:-1], weight.shape[0])
        rows = _block_rows(weight, x.dtype)
        for start in range(0, weight.shape[0], rows):
            out[..., start : start + rows] = F.linear(x, weight[start : start + rows].to(x.dtype))
        return out

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[no-untyped-def]
        (weight,) = ctx.saved_tensors
        grad_x = grad.new_zeros(*grad.shape[:-1], weight.shape[1])
        flat_x, flat_g = grad_x.view(-1, weight.shape[1]), grad.reshape(-1, weight.shape[0])
        rows = _block_rows(weight, grad.dtype)
        for start in range(0, weight.shape[0], rows):
            flat_x.addmm_(flat_g[:, start : start + rows], weight[start : start + rows].to(grad.dtype))
        return grad_x, None


def upcast_on_use(model: nn.Module, compute_dtype: torch.dtype) -> list[str]:
    """Replace the input embedding and the head by their stored forms where their dtype is not ``compute_dtype``.

    Names, parameters and ties stay as they are. Returns the names of the replaced modules.
    """
    replaced: list[str] = []
    new: UpcastEmbedding | UpcastLinear | None
    for name, module in list(model.named_modules()):
        plain = isinstance(module, nn.Embedding | nn.Linear) and not isinstance(module, EncodedModule)
        if not plain or module.weight.dtype == compute_dtype or isinstance(module, UpcastEmbedding | UpcastLinear):
            continue
        if isinstance(module, nn.Embedding):
            new = upcast_embedding(module, compute_dtype)
        else:
            new = _upcast_linear(module) if type(module) is nn.Linear else None
        if new is None:  # does more than we know (a router that is a linear layer): its few numbers are widened now
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.to(compute_dtype)
            continue
        model.set_submodule(name, new)
        replaced.append(name)
    return replaced


def _upcast_linear(old: Any) -> UpcastLinear:
    with torch.device("meta"):
        new = UpcastLinear(old.in_features, old.out_features, bias=old.bias is not None)
    new.weight, new.bias = old.weight, old.bias  # the same Parameter object: a tied head stays tied
    return new.train(old.training)


def upcast_embedding(old: nn.Embedding, compute_dtype: torch.dtype) -> UpcastEmbedding | None:
    """The stored form of an embedding, with the same Parameter; None for one that does more than look up and scale."""
    with torch.device("meta"):
        new = UpcastEmbedding(old.num_embeddings, old.embedding_dim, old.padding_idx)
    new.compute_dtype, new.weight = compute_dtype, old.weight
    scale = getattr(old, "scalar_embed_scale", getattr(old, "embed_scale", None))  # the buffer may have been rounded
    if scale is not None:
        value = torch.as_tensor(scale, dtype=torch.float32, device=old.weight.device)
        new.register_buffer("embed_scale", value, persistent="embed_scale" in old.state_dict())
    new.train(old.training)
    return new if type(old) is nn.Embedding or _same_rows(old, new) else None


@torch.no_grad()
def _same_rows(old: nn.Embedding, new: UpcastEmbedding) -> bool:
    """Whether the first rows of both come out alike, with the table in the dtype that is computed in."""
    if old.weight.is_meta or isinstance(old.weight.data, FakeTensor):  # no numbers: by structure
        return hasattr(new, "embed_scale")
    ids = torch.arange(min(8, old.num_embeddings), device=old.weight.device)
    few = nn.Parameter(old.weight[: len(ids)].to(new.compute_dtype), requires_grad=False)
    wide = copy.copy(old)
    wide._parameters = {**old._parameters, "weight": few}
    wide._buffers = {**old._buffers, **new._buffers}
    return bool(torch.equal(wide(ids), new(ids)))
