"""Cases of test_ranks_lost.py: waiting for a slow rank, and not for a dead one."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch

from frugal.checkpoints import write
from frugal.distributed import group as ranks
from frugal.errors import ConfigError, FrugalError
from frugal.run.train import train
from tests.distributed.ranks.worker import Rank


def _message(action: Any) -> dict[str, Any]:
    begun = time.monotonic()
    try:
        with ranks.guarded():
            action()
    except FrugalError as error:
        return {"error": type(error).__name__, "text": str(error), "seconds": time.monotonic() - begun}
    return {"error": None, "seconds": time.monotonic() - begun}


def case_slow_first(rank: Rank) -> dict[str, Any]:
    """Rank 0 takes long, then rank 1 does, and is stopped by the kernel meanwhile, threads and all."""

    def prepare() -> int:
        time.sleep(5)
        return 41

    found = ranks.on_first(prepare)
    if rank.rank == 1:
        waker = os.fork()
        if not waker:
            time.sleep(4)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(waker, 0)
    ranks.meet()
    return {"found": found, "gathered": ranks.gather(rank.rank), "any": ranks.any_rank(rank.rank or None)}


def case_names(rank: Rank) -> dict[str, Any]:
    host = ranks._on_host()
    return {"pid": os.getpid(), "name": host.name(1), "backend": torch.distributed.get_backend(host.group)}


def case_lost_first(rank: Rank) -> dict[str, Any]:
    """Rank 0 is killed while it prepares data."""

    def prepare() -> None:
        time.sleep(1)
        os.kill(os.getpid(), signal.SIGKILL)

    return _message(lambda: ranks.on_first(prepare))


def case_lost_error(rank: Rank) -> dict[str, Any]:
    """Rank 1 leaves with an error of its own while rank 0 waits for it."""
    ranks.meet()
    if rank.rank == 1:

        def fail() -> None:
            raise MemoryError("the loader took it all")

        try:
            _message(fail)
        except MemoryError:
            time.sleep(8)  # it is known before the process has ended
            os._exit(1)
    return _message(lambda: ranks.gather(0))


def case_lost_step(rank: Rank) -> dict[str, Any]:
    """Rank 1 is killed before an operation of the group that carries gradients."""
    ranks.meet()
    if rank.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def step() -> None:
        for _ in range(100):
            torch.distributed.all_reduce(torch.ones(1 << 16))

    return _message(step)


def case_lost_remote(rank: Rank) -> dict[str, Any]:
    """Rank 0 is killed on what looks like another machine: only its connection tells of its end."""
    ranks.GRACE_SECONDS = 2.0
    host = ranks._on_host()
    host.processes[0] = dataclasses.replace(host.processes[0], host="elsewhere")
    return case_lost_first(rank)


def case_lost_silent(rank: Rank) -> dict[str, Any]:
    """Rank 1 lives, but does not take part in an operation of the group that carries gradients."""
    ranks.GRACE_SECONDS = 2.0
    group = torch.distributed.new_group(backend="gloo", timeout=datetime.timedelta(seconds=3))
    ranks.meet()
    if rank.rank == 1:
        time.sleep(15)
        os._exit(1)
    return _message(lambda: torch.distributed.all_reduce(torch.ones(4), group=group))


def case_lost_one_of_three(rank: Rank) -> dict[str, Any]:
    """Rank 2 is killed; the others do not name one another."""
    ranks.meet()
    if rank.rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return _message(lambda: ranks.gather(0))


def case_again(rank: Rank) -> dict[str, Any]:
    """What failed on all ranks is no reason against a second try in the same processes."""

    def fail() -> None:
        raise ConfigError("not this way")

    first = _message(lambda: ranks.on_first(fail))
    return {"first": first["error"], "gathered": ranks.gather(rank.rank)}


def case_lost_save(rank: Rank) -> dict[str, Any]:
    """Rank 0 is killed in the middle of writing its second checkpoint of a whole run."""
    config = json.loads(os.environ["RUN_CONFIG"])
    if rank.rank == 0:
        complete = write.save_adapter

        def then_die(*args: Any, **kwargs: Any) -> None:
            complete(*args, **kwargs)
            if (Path(config["output"]["dir"]) / "checkpoint-2").exists():
                os.kill(os.getpid(), signal.SIGKILL)

        write.save_adapter = then_die
    return _message(lambda: train(config))
