"""The AdamW step with 8-bit moments (Dettmers et al. 2022, arXiv:2110.02861), in bitsandbytes' format.

On a GPU that the table gives it, frugal's kernel: moments get the nearest code of the map, as from bitsandbytes' CUDA
kernel, and parameter and gradient may have different dtypes. Elsewhere bitsandbytes' own operation: its CUDA kernel, or
its C++ and torch code on CPUs. State written by one is read by the other.
"""

from __future__ import annotations

import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)
import torch
from torch import Tensor

from frugal.ops.registry import implements, resolve


@torch.no_grad()
def adam8bit_(
    param: Tensor,
    grad: Tensor,
    state1: Tensor,
    state2: Tensor,
    absmax1: Tensor,
    absmax2: Tensor,
    map1: Tensor,
    map2: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    implementation: str | None = None,
) -> None:
    """One step in place; ``step`` counts from 1, weight decay is decoupled.

    ``param`` and ``grad`` are contiguous; ``state1`` and ``state2`` uint8 of as many elements, ``absmax1`` and
    ``absmax2`` float32 [ceil(elements / 256)], ``map1`` (signed) and ``map2`` (unsigned) float32 [256], rising.
    ``implementation`` names a row of the table ("triton", "bitsandbytes"); unset, the table chooses.
    """
    run, _ = resolve("adam8bit", param, implementation)
    run(
        param, grad, state1, state2, absmax1, absmax2, map1, map2,
        lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, step=step,
    )  # fmt: skip


@implements("adam8bit", "bitsandbytes")
def _by_bitsandbytes(
    param: Tensor, grad: Tensor, state1: Tensor, state2: Tensor, absmax1: Tensor, absmax2: Tensor, map1: Tensor,
    map2: Tensor, *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int,
) -> None:  # fmt: skip
    torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
        "adam", grad, param, state1, state2, *betas, 0.0, 0.0, eps, step, lr, map1, map2, absmax1, absmax2,
        weight_decay, 1.0, False,
    )  # fmt: skip
