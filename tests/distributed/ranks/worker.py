"""Runs named cases in N gloo ranks. Started by harness.run_cases:

    python worker.py FOLDER WORLD MODULE CASE...

One process imports what is heavy, then forks the ranks. A case is a function `case_<name>(rank: Rank)` of MODULE. What
it returns (JSON) is written to FOLDER/<case>/<rank>.json, what it gives to `rank.save` to <rank>.safetensors beside it.
The first case that raises ends its ranks (those that wait for it meet a closed connection, or the 60 s of the process
group); new ones are forked for the cases that are left. A case `lost_<name>`, in which ranks are meant to die, has
ranks of its own. With TORCHELASTIC_USE_AGENT_STORE=True the store lives in the forking process, as under torchrun.
"""

from __future__ import annotations

import ctypes
import datetime
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path

import accelerate
import peft  # noqa: F401  heavy: imported once, before the ranks are forked
import torch
import transformers  # noqa: F401
from safetensors.torch import save_file

TIMEOUT = datetime.timedelta(seconds=60)


@dataclass
class Rank:
    """What a case is given."""

    rank: int
    world: int
    folder: Path
    """Shared by the ranks of this case."""

    def save(self, tensors: dict[str, torch.Tensor], name: str = "") -> None:
        """Write tensors (full ones, no DTensor) to `<rank>[.name].safetensors`."""
        path = self.folder / f"{self.rank}{'.' + name if name else ''}.safetensors"
        save_file({key: tensor.detach().cpu().clone().contiguous() for key, tensor in tensors.items()}, path)


def die_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def run_rank(rank: int, world: int, folder: Path, module: str, cases: list[str]) -> int:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    torch.distributed.init_process_group("gloo", timeout=TIMEOUT)
    functions = importlib.import_module(module)
    for case in cases:
        place = Rank(rank, world, folder / case)
        torch.manual_seed(0)
        try:
            found = getattr(functions, f"case_{case}")(place)
            text = json.dumps({} if found is None else found)
            if not case.startswith("lost_"):
                torch.distributed.barrier()
        except BaseException:
            (place.folder / f"{rank}.error").write_text(traceback.format_exc(), encoding="utf-8")
            return 1
        part = place.folder / f"{rank}.part"
        part.write_text(text, encoding="utf-8")
        part.rename(place.folder / f"{rank}.json")
        accelerate.state.AcceleratorState._reset_state()
        if case.startswith("lost_"):
            return 0
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
    return 0


def fork_ranks(world: int, folder: Path, module: str, cases: list[str]) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ["MASTER_PORT"] = str(port)
    store = None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = torch.distributed.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    children = []
    for rank in range(world):
        child = os.fork()
        if child:
            children.append(child)
            continue
        die_with_parent()
        with open(folder / cases[0] / f"{rank}.log", "w", encoding="utf-8") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
            code = 1
            try:
                code = run_rank(rank, world, folder, module, cases)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)  # no second run of the parent's exit handlers
    for child in children:
        os.waitpid(child, 0)
    del store


def main(folder: Path, world: int, module: str, cases: list[str]) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    for case in cases:
        (folder / case).mkdir(parents=True)
    for case in [case for case in cases if case.startswith("lost_")]:
        fork_ranks(world, folder, module, [case])
    left = [case for case in cases if not case.startswith("lost_")]
    while left:
        first = left[0]
        fork_ranks(world, folder, module, left)
        while left and all((folder / left[0] / f"{rank}.json").exists() for rank in range(world)):
            left.pop(0)
        if left:
            (folder / left[0] / "first").write_text(first, encoding="utf-8")
            left.pop(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
