"""Several processes as one: what one rank meets, all of them raise; nobody waits for a rank that has left.

Python objects go through a gloo group of their own on the host, never through the group that carries gradients: they
need no GPU memory, and NCCL's operations cannot be waited for with a message. `gather` and `on_first` wait as long as
all processes live (roster.py); only then the operation itself begins, which is a matter of milliseconds.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from frugal.distributed.rendezvous import Roster
from frugal.errors import FrugalError, ProcessLost, UnsupportedError

HOST_TIMEOUT = datetime.timedelta(seconds=60)
"""Of one operation of the host group, which all processes have reached already."""

_BROKEN = re.compile(r"gloo|NCCL|ProcessGroup|[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out")


@dataclass
class _Host:
    world: ProcessGroup
    group: ProcessGroup
    roster: Roster


_host: list[_Host] = []  # at most one: that of the process group that is there now


def world_size() -> int:
    """Processes of this run; 1 without a process group."""
    return torch.distributed.get_world_size() if _together() else 1


def rank() -> int:
    """Number of this process, 0 for the one that writes."""
    return torch.distributed.get_rank() if _together() else 0


def _together() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _on_host() -> _Host:
    """The host group of the present process group. Every rank calls this at the same time."""
    world = torch.distributed.group.WORLD
    assert world is not None
    if _host and _host[0].world is not world:
        _forget()
    if not _host:
        group = torch.distributed.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        store = torch.distributed.distributed_c10d._get_default_store()
        _host.append(_Host(world, group, Roster(store, rank(), world_size())))
    return _host[0]


def _forget() -> None:
    for host in _host:
        host.roster.close()
    _host.clear()


def leave() -> None:
    """Take the process group down after a run that went well; nothing without one."""
    if _together():
        meet()
        _forget()
        torch.distributed.destroy_process_group()


def meet() -> None:
    """Return when every rank has called this, however long one takes; ProcessLost when one ends before."""
    if _together():
        _on_host().roster.meet()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Around a run: an operation that failed because of another process becomes ProcessLost, which names it.

    A rank that leaves with an error of its own tells the others, who then say so instead of waiting.
    """
    try:
        yield
    except ProcessLost:
        raise
    except BaseException as error:
        host = _host[0] if _together() and _host and _host[0].world is torch.distributed.group.WORLD else None
        if host is not None and isinstance(error, RuntimeError) and _collective(error):
            raise ProcessLost(host.roster.explain(error)) from error
        if host is not None:
            host.roster.leaving(error)
        raise


def _collective(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or bool(_BROKEN.search(str(error)))


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, in order of rank."""
    if not _together():
        return [value]
    meet()
    return _gather(value)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * world_size()
    host = _on_host()
    try:
        torch.distributed.all_gather_object(values, value, group=host.group)
    except RuntimeError as error:
        raise ProcessLost(host.roster.explain(error)) from error
    return values


def on_first(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give its result to all; an error there is raised on every rank.

    The others wait for it as long as rank 0 lives.
    """
    if not _together():
        return action()
    outcome: list[Any] = [None, None]
    host = _on_host()
    if rank() == 0:
        try:
            outcome = [action(), None]
        except Exception as error:
            outcome = [None, error]
    host.roster.meet()
    shared = [outcome if outcome[1] is None else [None, _plain(outcome[1])]]
    try:
        torch.distributed.broadcast_object_list(shared, src=0, group=host.group)
    except RuntimeError as error:
        raise ProcessLost(host.roster.explain(error)) from error
    result, failure = shared[0]
    if failure is not None:
        raise outcome[1] if rank() == 0 else failure
    return result


def _plain(error: Exception) -> Exception:
    """An error that can be sent: ours as they are, others by their text."""
    return error if isinstance(error, FrugalError) else RuntimeError(f"rank 0: {type(error).__name__}: {error}")


def any_rank(value: int | None) -> int | None:
    """The highest value of all ranks, None when all are None. Every rank calls this at the same time, once a step."""
    if not _together():
        return value
    found = [item for item in _gather(value) if item is not None]
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
