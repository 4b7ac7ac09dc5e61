"""Several processes as one: what one rank meets, all of them raise; nobody waits for a rank that has left."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from frugal.errors import FrugalError, UnsupportedError


def world_size() -> int:
    """Processes of this run; 1 without a process group."""
    return torch.distributed.get_world_size() if _together() else 1


def rank() -> int:
    """Number of this process, 0 for the one that writes."""
    return torch.distributed.get_rank() if _together() else 0


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, in order of rank."""
    if not _together():
        return [value]
    values: list[Any] = [None] * world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def on_first(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give its result to all; an error there is raised on every rank."""
    if not _together():
        return action()
    outcome: list[Any] = [None, None]
    if rank() == 0:
        try:
            outcome = [action(), None]
        except Exception as error:
            outcome = [None, error]
    shared = [outcome if outcome[1] is None else [None, _plain(outcome[1])]]
    torch.distributed.broadcast_object_list(shared, src=0)
    result, failure = shared[0]
    if failure is not None:
        raise outcome[1] if rank() == 0 else failure
    return result


def _plain(error: Exception) -> Exception:
    """An error that can be sent: ours as they are, others by their text."""
    return error if isinstance(error, FrugalError) else RuntimeError(f"rank 0: {type(error).__name__}: {error}")


def any_rank(value: int | None) -> int | None:
    """The highest value of all ranks, None when all are None. Every rank calls this at the same time."""
    if not _together():
        return value
    found = [item for item in gather(value) if item is not None]
    return max(found) if found else None


def check_same(parameters: dict[str, nn.Parameter]) -> None:
    """Raise when a trained tensor differs between ranks: each would train, and save, an adapter of its own."""
    if not _together():
        return
    digests = {name: _digest(parameter) for name, parameter in parameters.items()}
    first = gather(digests)[0]
    bad = [name for name in first.keys() | digests.keys() if first.get(name) != digests.get(name)]
    for found in gather(sorted(bad)):
        if found:
            raise UnsupportedError(
                f"{len(found)} trained tensors differ between the processes, the first is {found[0]}. "
                "All processes must start from the same seed, versions and base model."
            )


def _digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()
