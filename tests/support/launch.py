"""`frugal train` as several gloo processes, as torchrun or accelerate starts them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def start_ranks(*arguments: str, world: int = 2) -> list[subprocess.Popen[str]]:
    """Start `frugal ...` once a rank; the caller waits."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            [sys.executable, "-m", "frugal", *arguments],
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def finish(processes: list[subprocess.Popen[str]], code: int = 0, timeout: float = 480) -> list[str]:
    """Wait for all; each must leave with ``code``. Returns what each wrote to stderr."""
    errors = []
    try:
        for process in processes:
            errors.append(process.communicate(timeout=timeout)[1])
    finally:
        for process in processes:
            process.kill()
    for process, text in zip(processes, errors, strict=True):
        assert process.returncode == code, f"exit code {process.returncode}\n{text[-3000:]}"
    return errors
