"""Which processes belong to a run, and whether they live: kept in the process group's store, with no time limit.

A collective operation has one time limit for all reasons: too short for a process that prepares data, too long for one
that was killed. Here a process waits for another as long as that one lives, and knows within seconds that it does not:

- on the same machine its process number is looked up;
- on another one its sign of life in the store gets older than `SILENT_SECONDS` (launchers of torch notice sooner, and
  stop the rest themselves);
- a process that leaves with an error says so before.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from torch.distributed.distributed_c10d import PrefixStore, Store

from frugal.errors import ProcessLost

BEAT_SECONDS = 5.0
SILENT_SECONDS = 300.0
"""A process on another machine without a sign of life for so long is lost. A thread gives it, which a long operation
that holds Python's interpreter lock can delay."""
GRACE_SECONDS = 5.0
"""After a failed operation: how long is waited for the other processes to say what they met."""
_LONGEST_POLL = 0.5


@dataclass(frozen=True)
class Member:
    """One process of the run."""

    rank: int
    host: str
    place: str
    """Machine and process namespace, in which `pid` means something."""
    pid: int
    started: float


class Roster:
    """The run's processes, seen from one of them. All of them build one at the same time."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = PrefixStore("frugal", store)
        self.rank, self.world_size = rank, world_size
        self._meetings = 0
        self._beats: dict[int, tuple[bytes, float]] = {}  # rank -> last sign of life, and when it was first seen
        self._ended = threading.Event()
        me = {
            "rank": rank,
            "host": socket.gethostname(),
            "place": _place(),
            "pid": os.getpid(),
            "started": psutil.Process().create_time(),
        }
        self._store.set(f"beat/{rank}", "0")
        self._store.set(f"member/{rank}", json.dumps(me))
        self.members = [Member(**json.loads(self._store.get(f"member/{other}"))) for other in range(world_size)]
        self._beating = threading.Thread(target=self._beat, name="frugal sign of life", daemon=True)
        self._beating.start()

    def close(self) -> None:
        """End the thread that gives signs of life."""
        self._ended.set()
        self._beating.join()

    def meet(self) -> None:
        """Return when every process has called this, however long one takes.

        Rank 0, in whose process the store may live, returns last: nobody still asks the store when it does.
        Raises ProcessLost when a process ends, or leaves with an error, before it came.
        """
        self._meetings += 1
        number = self._meetings
        try:
            if number > 2:  # everyone has left that one
                for kind in ("meet", "seen"):
                    self._store.delete_key(f"{kind}/{number - 2}/{self.rank}")
            self._store.set(f"meet/{number}/{self.rank}", "")
            self._await(f"meet/{number}", range(self.world_size))
            if self.rank == 0:
                self._await(f"seen/{number}", range(1, self.world_size))
            else:
                self._store.set(f"seen/{number}/{self.rank}", "")
        except torch.distributed.DistError as error:
            raise ProcessLost(self._without_store(error)) from error

    def _await(self, key: str, ranks: Iterable[int]) -> None:
        """Return when all these ranks have set ``key``/<rank>."""
        seconds = 0.002
        missing = list(ranks)
        while missing:
            # looked for before the key: what a rank set before it ended counts
            lost = self.lost(missing) if seconds > 0.05 else None
            missing = [other for other in missing if not self._store.check([f"{key}/{other}"])]
            if lost is not None and lost[0] in missing:
                raise ProcessLost(lost[1])
            if missing:
                time.sleep(seconds)
                seconds = min(seconds * 1.5, _LONGEST_POLL)

    def leaving(self, error: BaseException) -> None:
        """Tell the others why this process leaves."""
        text = str(error).strip().split("\n", 1)[0][:500]
        try:
            self._store.set(f"left/{self.rank}", f"{type(error).__name__}: {text}")
        except torch.distributed.DistError:
            return  # the store ended with its process: nobody is left to read it

    def lost(self, among: list[int] | None = None) -> tuple[int, str] | None:
        """The first process that has ended, or said that it leaves, and what to say of it; None when all live."""
        for other in range(self.world_size) if among is None else among:
            if other == self.rank:
                continue
            if self._store.check([f"left/{other}"]):
                reason = self._store.get(f"left/{other}").decode()
                return other, f"{self.name(other)} has stopped: {reason}. {_WAY_ON}"
            if self._dead(self.members[other]):
                return other, f"{self.name(other)} has ended without a word (killed, or out of host memory). {_WAY_ON}"
        return None

    def explain(self, error: BaseException) -> str:
        """Whose fault a failed collective operation is: who ended, who left, or who does not take part."""
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            self._store.set(f"failed/{self.rank}", "")
            while True:
                lost = self.lost()
                if lost is not None:
                    return lost[1]
                absent = [other for other in range(self.world_size) if not self._store.check([f"failed/{other}"])]
                if not absent or time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        except torch.distributed.DistError as second:
            return self._without_store(second)
        what = str(error).strip().split("\n", 1)[0][:300]
        if absent:
            names = ", ".join(self.name(other) for other in absent)
            return (
                f"an operation that all processes share failed ({what}). These still run, but did not answer: {names}. "
                f"{_WAY_ON}"
            )
        return f"an operation that all processes share failed on all of them ({what}). {_WAY_ON}"

    def name(self, rank: int) -> str:
        """`process 1 of 2 (pid 4711 on gpu-b)`"""
        member = self.members[rank]
        return f"process {rank} of {self.world_size} (pid {member.pid} on {member.host})"

    def _without_store(self, error: BaseException) -> str:
        keeper = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else self.name(0)
        return f"the connection to {keeper} is lost ({str(error).strip().split(chr(10), 1)[0][:200]}). {_WAY_ON}"

    def _dead(self, member: Member) -> bool:
        if member.place == self.members[self.rank].place:
            try:
                process = psutil.Process(member.pid)
                return process.create_time() != member.started or process.status() == psutil.STATUS_ZOMBIE
            except psutil.NoSuchProcess:
                return True
            except psutil.AccessDenied:  # it is there, and another user's
                return False
        beat, now = self._store.get(f"beat/{member.rank}"), time.monotonic()
        last, since = self._beats.get(member.rank, (b"", now))
        if beat != last:
            self._beats[member.rank] = (beat, now)
            return False
        return now - since > SILENT_SECONDS

    def _beat(self) -> None:
        count = 0
        while not self._ended.wait(BEAT_SECONDS):
            count += 1
            try:
                self._store.set(f"beat/{self.rank}", str(count))
            except torch.distributed.DistError:
                return  # the main thread meets it, and says so


_WAY_ON = "This process stops too. The newest complete checkpoint stands: go on with --resume."


def _place() -> str:
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:  # not Linux
        namespace, boot = "", ""
    return f"{socket.gethostname()} {boot} {namespace}"
