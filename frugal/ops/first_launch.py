"""One launch of a kernel with one element: whether Triton works on this machine, which only a launch can tell.

At its first launch in a process Triton compiles a small C module that talks to the driver: it needs a C compiler and
Python's headers, a cache folder that can be written, and a driver that takes its code.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from frugal.ops.launch import Launch


@triton.jit
def _one(x):
    tl.store(x, tl.load(x) + 1)


def launch_once(index: int) -> None:
    """Add 1 to a number on CUDA device ``index``. Raises whatever compiling, loading or launching raises."""
    number = torch.zeros(1, device=torch.device("cuda", index))
    Launch(_one, (1,), (number,)).run()
    if float(number) != 1:
        raise RuntimeError(f"a kernel that adds 1 to 0 gave {float(number)}")
