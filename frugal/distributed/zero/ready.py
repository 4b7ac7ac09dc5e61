"""Whether DeepSpeed can run here, asked before anything is loaded."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import time
from pathlib import Path

import torch
from packaging.version import Version

from frugal.errors import UnsupportedError

OLDEST = "0.19.8"
"""The DeepSpeed that frugal was tried with; 0.19.0 cannot reduce the gradients of a window together."""
PIP = "pip install 'frugal[deepspeed]'"
_BUILD_SECONDS = 600
_CHECK_SECONDS = 60


def require_deepspeed(device: torch.device) -> None:
    """Raise UnsupportedError, saying what to install or set, unless DeepSpeed can train on ``device``."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UnsupportedError(
            f"distributed.strategy: zero needs DeepSpeed, which is not installed: {PIP} (torch must be there first). "
            "distributed.strategy: fsdp2 shards the same without it."
        )
    version = importlib.metadata.version("deepspeed")
    if Version(version) < Version(OLDEST):
        raise UnsupportedError(f"DeepSpeed {version} is installed, frugal needs {OLDEST} or newer: {PIP} --upgrade")
    if not torch.distributed.is_initialized():
        raise UnsupportedError(
            "distributed.strategy: zero shares a run between processes: start it with `accelerate launch` or torchrun."
        )
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is not None and chosen != device.type:
        raise UnsupportedError(
            f"DS_ACCELERATOR={chosen} in the environment, and this run computes on {device.type}: unset it, or set it "
            f"to {device.type}."
        )
    if device.type == "cpu":
        _require_compiler()


def _require_compiler() -> None:
    """On CPUs DeepSpeed compiles one operation (one to two minutes) before its first start."""
    from torch.utils.cpp_extension import get_default_build_root  # it imports setuptools: only where it is needed

    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    folders = [found.parent for found in place.glob("**/deepspeed_shm_comm/*") if found.name in ("lock", "build.ninja")]
    built = any(next(folder.glob("*.so"), None) is not None for folder in folders)
    compiler = os.environ.get("CXX", "c++")
    if not built and shutil.which(compiler) is None:
        raise UnsupportedError(
            f"DeepSpeed on a CPU compiles an operation at its first start and needs a C++ compiler; {compiler} was not "
            "found. Install one (g++ or clang++), or use distributed.strategy: fsdp2."
        )
    for folder in set(folders):
        _refuse_left_lock(folder / "lock", built=built)


def _refuse_left_lock(lock: Path, *, built: bool) -> None:
    """Every start takes the lock, for seconds once the operation is built; one that nobody gives back is waited for
    without end inside torch, so it is waited for here."""
    limit = _CHECK_SECONDS if built else _BUILD_SECONDS
    while lock.exists():
        with contextlib.suppress(FileNotFoundError):
            age = time.time() - lock.stat().st_mtime
            if age > limit:
                raise UnsupportedError(
                    f"{lock} is left from a start of DeepSpeed that was killed, and every later start waits for it: "
                    "delete that file."
                )
        if not built:  # another process may be compiling
            return
        time.sleep(0.5)
