"""Whole tensors and their shards: what this rank holds of a tensor, and the whole of what all hold.

FSDP2 keeps a sharded parameter as a DTensor: dim 0 (rarely another) cut into as many parts as there are ranks, part i
on rank i, the last ones shorter or empty. Bytes are moved, never computed with.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from frugal.distributed import group as ranks


def local(tensor: Tensor) -> Tensor:
    """What this rank holds: the shard of a sharded tensor (maybe without elements), else the tensor. No copy."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor, device: torch.device) -> Tensor:
    """The whole of a sharded tensor on ``device``, on every rank (a collective); another tensor as it is."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    part = tensor.to_local().detach()
    if part.device != device:  # a shard that rests on the host travels over the device's network
        tensor = like(tensor, part.to(device))
    full: Tensor = tensor.full_tensor()
    return full.detach()


def cut(sharded: Tensor, full: Tensor) -> Tensor:
    """This rank's part of ``full`` [sharded's shape], as `local` of ``sharded``: a view where possible."""
    if not isinstance(sharded, DTensor):
        return full
    if full.shape != sharded.shape:
        raise ValueError(f"a tensor of shape {tuple(full.shape)} cannot be cut like one of {tuple(sharded.shape)}")
    dim, start, length = span(sharded)
    return full.narrow(dim, start, length)


def span(sharded: DTensor) -> tuple[int, int, int]:
    """(dim, start, length): which part of the whole this rank holds."""
    (placement,) = sharded.placements
    if not isinstance(placement, Shard):
        raise ValueError(f"expected a tensor cut along one dim, got placements {sharded.placements}")
    dim, size = placement.dim, sharded.shape[placement.dim]
    step = -(size // -sharded.device_mesh.size())  # as torch.chunk cuts
    start = min(size, step * sharded.device_mesh.get_local_rank())
    return dim, start, min(size, start + step) - start


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that this rank holds of them."""
    return sum(local(tensor).numel() * tensor.element_size() for tensor in tensors)


def total_norm(gradients: Iterable[Tensor], device: torch.device) -> Tensor:
    """L2 norm of all gradients, each counted once: shards over all ranks, whole ones as they are. fp32 scalar."""
    squares = torch.zeros(2, dtype=torch.float32, device=device)  # of shards here, of whole tensors
    for gradient in gradients:
        part = local(gradient)
        if part.numel():
            norm = torch.linalg.vector_norm(part, dtype=torch.float32)
            squares[0 if isinstance(gradient, DTensor) else 1] += norm.to(device).square()
    if ranks.world_size() > 1:
        dist.all_reduce(squares[:1])
    return squares.sum().sqrt()


def gather_parts(part: Tensor, device: torch.device) -> list[Tensor]:
    """Every rank's ``part`` (one dim, any lengths, one dtype), in order of rank, on ``device``. A collective."""
    if ranks.world_size() == 1:
        return [part.to(device)]
    mine = part.detach().to(device).contiguous()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(ranks.world_size())]
    dist.all_gather(lengths, torch.tensor([mine.numel()], dtype=torch.int64, device=device))
    counts = [int(length) for length in lengths]
    padded = mine.new_zeros(max(counts))
    padded[: mine.numel()] = mine
    found = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(found, padded)
    return [each[:count] for each, count in zip(found, counts, strict=True)]


def fill(sharded: Tensor, full: Tensor) -> None:
    """Write this rank's part of ``full`` into ``sharded``, in place."""
    with torch.no_grad():
        local(sharded).copy_(cut(sharded, full))


def like(sharded: DTensor, part: Tensor) -> DTensor:
    """``part``, this rank's shard of a tensor of ``sharded``'s shape and cut, as a DTensor."""
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )
