"""Rank primitives: rank and world size, objects and errors between processes, and who was lost when one ends.

Python objects go through a gloo group on the host, never through the group that carries gradients: they need no GPU
memory, and its operations end at once when the connection to another process closes, which the kernel does when that
process ends, however it ends. A process that is slow is waited for (`HOST_TIMEOUT`); nothing counts heartbeats
(docs/decisions/0013).
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import PrefixStore, Store

from frugal.errors import FrugalError, ProcessLost, UnsupportedError

HOST_TIMEOUT = datetime.timedelta(days=1)
"""Of one operation of the host group, the wait for a slow process included. Ends the wait for a machine that lost its
power; within a step `distributed.ddp_timeout` of the gradients' group does so earlier."""
GRACE_SECONDS = 5.0
"""After a failed operation: how long the other processes have to tell what they met."""

_BROKEN = re.compile(r"gloo|NCCL|ProcessGroup|[Cc]onnection (closed|reset|refused)|Broken pipe|[Tt]imed? ?out")
_WAY_ON = "This process stops too. Go on from the newest complete checkpoint with --resume."
_NONE = torch.iinfo(torch.int64).min


@dataclass(frozen=True)
class _Process:
    host: str
    pid: int
    namespace: int
    """In which `pid` means something."""


@dataclass
class _Host:
    """The host group of one process group, and a store in which a process writes why it stops."""

    world: ProcessGroup
    group: ProcessGroup
    store: Store
    processes: list[_Process]

    def name(self, rank: int) -> str:
        """`process 1 of 2 (pid 4711 on gpu-b)`"""
        process = self.processes[rank]
        return f"process {rank} of {len(self.processes)} (pid {process.pid} on {process.host})"

    def stops(self, error: BaseException) -> None:
        """Tell the others why this process stops."""
        with contextlib.suppress(torch.distributed.DistError):  # the store ended with its process: nobody reads it
            self.store.set(f"stopped/{rank()}", f"{type(error).__name__}: {_first_line(error)}")

    def _others(self) -> list[int]:
        return [other for other in range(len(self.processes)) if other != rank()]

    def lost(self, asked: Sequence[int] | None = None) -> str | None:
        """Which other process has stopped with an error or has ended; None while none is known to.

        ``asked``: who may have ended (None: any of them). Raises DistError when the store itself is gone.
        """
        for other in self._others():
            if self.store.check([f"stopped/{other}"]):
                reason = self.store.get(f"stopped/{other}").decode()
                return f"{self.name(other)} has stopped: {reason}. {_WAY_ON}"
        for other in self._others() if asked is None else asked:
            if self._ended(other):
                return f"{self.name(other)} has ended (killed, or out of host memory). {_WAY_ON}"
        return None

    def explain(self, error: BaseException) -> str:
        """Whose fault a failed operation is: which process ended, stopped with an error, or did not take part."""
        others, deadline = self._others(), time.monotonic() + GRACE_SECONDS
        try:
            self.store.set(f"failed/{rank()}", "")
            while True:
                silent = [other for other in others if not self.store.check([f"failed/{other}"])]
                if (found := self.lost(silent)) is not None:
                    return found
                if not silent or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        except torch.distributed.DistError as second:
            # the store's keeper may have stopped because of the same one, and sooner than this process looked
            gone = [other for other in others if other != 0 and self._ended(other)]
            if gone:
                return f"{self.name(gone[0])} has ended (killed, or out of host memory). {_WAY_ON}"
            keeper = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else self.name(0)
            return f"the connection to {keeper} is lost ({_first_line(second)}). {_WAY_ON}"
        whose = f"did not answer: {', '.join(map(self.name, silent))}" if silent else "it failed on all of them"
        return f"an operation that all processes share failed ({_first_line(error)}); {whose}. {_WAY_ON}"

    def _ended(self, other: int) -> bool:
        """Whether another process of this machine is gone; False for one that cannot be looked up."""
        mine, process = self.processes[rank()], self.processes[other]
        if (process.host, process.namespace) != (mine.host, mine.namespace):
            return False
        try:
            return bool(psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True
        except psutil.AccessDenied:  # it is there, and another user's
            return False


_host: list[_Host] = []  # at most one: that of the process group that is there now
_made = 0  # host groups so far, the same number on every rank


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
    global _made
    world = torch.distributed.group.WORLD
    assert world is not None
    if _host and _host[0].world is not world:
        _host.clear()
    if not _host:
        _made += 1
        group = torch.distributed.new_group(backend="gloo", timeout=HOST_TIMEOUT)
        store = PrefixStore(f"frugal/{_made}", torch.distributed.distributed_c10d._get_default_store())
        try:
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:  # not Linux
            namespace = 0
        processes: list[Any] = [None] * world_size()
        torch.distributed.all_gather_object(
            processes, _Process(socket.gethostname(), os.getpid(), namespace), group=group
        )
        _host.append(_Host(world, group, store, processes))
    return _host[0]


def _close() -> None:
    """Close this process's connections of the host group: who waits for it learns so, while this process lives on."""
    for host in _host:
        if host.world is torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(host.group)
    _host.clear()


def leave() -> None:
    """Take the process group down after a run that went well; nothing without one."""
    if _together():
        meet()
        _host.clear()
        torch.distributed.destroy_process_group()


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Around a run: an operation that failed because of another process becomes ProcessLost, which names it.

    A process that leaves with an error of its own tells the others, who then quote it instead of waiting.
    """
    try:
        yield
    except BaseException as error:
        host = _host[0] if _together() and _host and _host[0].world is torch.distributed.group.WORLD else None
        lost = host is not None and isinstance(error, RuntimeError) and _collective(error)
        try:
            if host is not None and lost:
                raise ProcessLost(host.explain(error)) from error
            if host is not None and not isinstance(error, ProcessLost):
                host.stops(error)
            raise
        finally:
            _close()


def _collective(error: RuntimeError) -> bool:
    return isinstance(error, torch.distributed.DistError) or bool(_BROKEN.search(str(error)))


@contextlib.contextmanager
def _operation() -> Iterator[_Host]:
    """Around an operation of the host group: its failure becomes ProcessLost."""
    host = _on_host()
    try:
        yield host
    except RuntimeError as error:
        raise ProcessLost(host.explain(error)) from error


def lost() -> str | None:
    """Which other process has stopped or ended, as a message; None while none is known to. Waits for nobody."""
    host = _host[0] if _together() and _host else None
    if host is None:
        return None
    try:
        return host.lost()
    except torch.distributed.DistError as error:
        return host.explain(error)


def give_up() -> None:
    """End what this process has under way in the group that carries gradients: it waits for one that is lost."""
    if _host and torch.distributed.get_backend(_host[0].world) != "gloo":
        _host[0].world.abort()


def meet() -> None:
    """Return when every rank has called this. Raises ProcessLost when one ends, or stops with an error, before."""
    if _together():
        with _operation() as host:
            torch.distributed.barrier(group=host.group)


def gather(value: Any) -> list[Any]:
    """Every rank's ``value``, in order of rank."""
    if not _together():
        return [value]
    values: list[Any] = [None] * world_size()
    with _operation() as host:
        torch.distributed.all_gather_object(values, value, group=host.group)
    return values


def on_first(action: Callable[[], Any]) -> Any:
    """Run ``action`` on rank 0 and give its result to all; an error there is raised on every rank."""
    if not _together():
        return action()
    _on_host()  # before the action: the others wait in this group, whose connections tell of this process's end
    failure: Exception | None = None
    shared: list[Any] = [None, None]
    if rank() == 0:
        try:
            shared = [action(), None]
        except Exception as error:
            failure = error
            # ours can be sent as they are, others by their text
            plain = (
                error if isinstance(error, FrugalError) else RuntimeError(f"rank 0: {type(error).__name__}: {error}")
            )
            shared = [None, plain]
    with _operation() as host:
        torch.distributed.broadcast_object_list(shared, src=0, group=host.group)
    if shared[1] is not None:
        raise failure or shared[1]
    return shared[0]


def any_rank(value: int | None) -> int | None:
    """The highest value of all ranks, None when all are None. Every rank calls this at the same time, once a step."""
    if not _together():
        return value
    highest = torch.tensor([_NONE if value is None else value], dtype=torch.int64)
    with _operation() as host:
        torch.distributed.all_reduce(highest, torch.distributed.ReduceOp.MAX, group=host.group)
    return None if int(highest) == _NONE else int(highest)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's bytes."""
    flat = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()


def compare(digests: Mapping[str, str], when: str) -> None:
    """Raise UnsupportedError on every rank, naming the first, when a tensor's `digest` differs between ranks.

    Each would train, and save, an adapter of its own. Every rank calls this at the same time.
    """
    everyone = gather(dict(digests))
    first = everyone[0]
    for number, other in enumerate(everyone):
        unlike = sorted(name for name in first.keys() | other.keys() if first.get(name) != other.get(name))
        if unlike:
            raise UnsupportedError(
                f"{when}, {len(unlike)} trained tensors of process {number} differ from those of process 0, the first "
                f"is {unlike[0]}. All processes must start from the same seed, versions and base model, and compute "
                "alike."
            )


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0][:500]
