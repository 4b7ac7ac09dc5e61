"""Cross-entropy of rows of logits that exceed the registers, each read once: the gradient comes with a factor a row.

The gradient of a row is f * (e - total * [column is the label]) with e = exp(z - level), total = sum(e) and
f = weight / total. The kernel of `triton.py` needs ``total`` before it can write, so it reads a long row twice.
Here e is written while it is summed, and f is handed to the caller, who multiplies the product with the head by it: the
factor of a row of logits is the factor of a row of the product.

The level must be known before the row's largest value is. It is the larger of the label's value and the largest of the
first piece, and is raised when a later piece exceeds it by more than ``room``. Pieces written before are then rescaled
at the end, where the row's ``levels`` say which; so are all pieces of a row whose total would leave the range of
float16. Both are rare, and only cost time. Label smoothing and z-loss are left to the other kernel: their terms are no
multiple of f.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, cdiv, tile
from frugal.ops.linear_cross_entropy.triton import cap, zero_row

# Largest excess over the level, and largest total, that a row may have as it is written.
_ROOM = {torch.float16: 4.0, torch.bfloat16: 40.0, torch.float32: 40.0}
_MOST = {torch.float16: 4096.0, torch.bfloat16: 1e30, torch.float32: 1e30}


@triton.jit
def cross_entropy_once_kernel(
    LOGITS, LABELS, WEIGHTS, LOSS, FACTOR, LEVELS, stride, vocab, scale, softcap, ignore_index, room, most,
    HAS_WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    logits = LOGITS + row * stride
    lane = tl.arange(0, BLOCK)
    pieces = tl.cdiv(vocab, BLOCK)
    if label == ignore_index:
        tl.store(LOSS + row, 0.0)
        tl.store(FACTOR + row, 0.0)
        zero_row(logits, vocab, BLOCK)
    else:
        weight = 1.0
        if HAS_WEIGHTS:
            weight = tl.load(WEIGHTS + row).to(tl.float32)
        target, target_slope = cap(tl.load(logits + label).to(tl.float32), scale, softcap, SOFTCAP)
        levels = LEVELS + row * pieces
        level = target
        allowed = 0.0  # the first piece may raise the level freely
        total = 0.0
        for piece in range(pieces):
            column = piece * BLOCK + lane
            x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
            z, slope = cap(x, scale, softcap, SOFTCAP)
            z = tl.where(column < vocab, z, -float("inf"))
            top = tl.max(z, 0)
            higher = tl.where(top > level + allowed, top, level)
            # A piece may hold nothing but -inf (logits masked by the caller).
            finite = tl.where(higher == -float("inf"), 0.0, higher)
            e = tl.exp(z - finite)
            total = total * tl.exp(level - finite) + tl.sum(e, 0)
            level = higher
            allowed = room
            # The label's entry is written last.
            e = tl.where(column == label, 0.0, e) * slope
            tl.store(logits + column, e.to(LOGITS.dtype.element_ty), mask=column < vocab)
            tl.store(levels + piece, higher)
        lse = level + tl.log(total)
        tl.store(LOSS + row, weight * (lse - target))
        last = level
        if total > most:
            last = lse
            total = 1.0
        tl.store(FACTOR + row, weight / total)
        tl.debug_barrier()  # what other threads of the program stored
        if tl.load(levels) != last:
            for piece in range(pieces):
                written = tl.load(levels + piece)
                if written != last:
                    column = piece * BLOCK + lane
                    e = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
                    e = e * tl.exp(written - last)
                    tl.store(logits + column, e.to(LOGITS.dtype.element_ty), mask=column < vocab)
            tl.debug_barrier()
        hit = (tl.exp(target - last) - total) * target_slope
        tl.store(logits + label, hit.to(LOGITS.dtype.element_ty))


def prepare_cross_entropy_once(
    logits: Tensor,
    labels: Tensor,
    loss: Tensor,
    factor: Tensor,
    levels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    token_weights: Tensor | None = None,
    target: str | None = None,
) -> Launch:
    """``loss`` and ``factor`` float32 [tokens] of ``logits`` [tokens, vocab], which become the gradient of the losses'
    sum divided by ``factor`` of their row. ``levels`` is scratch, float32 of `levels_shape`.

    ``labels`` int64 [tokens] must lie in [0, vocab) or be ``ignore_index``: the kernel does not check.
    """
    tokens, vocab = logits.shape
    for name, t in (("loss", loss), ("factor", factor)):
        if t.shape != (tokens,) or t.dtype != torch.float32:
            raise ValueError(f"cross_entropy: {name} must be float32 [{tokens}], got {t.dtype} {tuple(t.shape)}")
    if labels.shape != (tokens,) or logits.stride(1) != 1:
        raise ValueError(f"cross_entropy: labels [{tokens}] and logits side by side expected, got {labels.shape}")
    if token_weights is not None and (token_weights.shape != (tokens,) or not token_weights.is_contiguous()):
        raise ValueError(f"token_weights [{tokens}] expected, got {tuple(token_weights.shape)}")
    sizes = tile("cross_entropy_once", logits.dtype, logits.device, target)
    block = sizes.pop("BLOCK")
    if levels.numel() < tokens * cdiv(vocab, block):
        raise ValueError(f"cross_entropy: {tokens * cdiv(vocab, block)} levels expected, got {levels.numel()}")
    return Launch(
        cross_entropy_once_kernel,
        (tokens,),
        (logits, labels, token_weights, loss, factor, levels, logits.stride(0), vocab, float(scale),
         float(softcap or 1.0), ignore_index, _ROOM[logits.dtype], _MOST[logits.dtype]),
        {"HAS_WEIGHTS": token_weights is not None, "SOFTCAP": softcap is not None, "BLOCK": block},
        sizes,
    )  # fmt: skip


def levels_shape(logits: Tensor, target: str | None = None) -> tuple[int, int]:
    """[tokens, pieces] of the scratch of `prepare_cross_entropy_once`."""
    return logits.shape[0], cdiv(
        logits.shape[1], tile("cross_entropy_once", logits.dtype, logits.device, target)["BLOCK"]
    )


def cross_entropy_once_(
    logits: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    token_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `prepare_cross_entropy_once`; returns losses and factors, float32 [tokens]."""
    loss, factor = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    levels = torch.empty(levels_shape(logits), dtype=torch.float32, device=logits.device)
    prepare_cross_entropy_once(
        logits, labels, loss, factor, levels,
        scale=scale, softcap=softcap, ignore_index=ignore_index, token_weights=token_weights,
    ).run()  # fmt: skip
    return loss, factor


def pays(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a row of ``vocab`` logits would be read twice by `frugal.ops.linear_cross_entropy.triton`."""
    return vocab > tile("cross_entropy", dtype, device)["ONE_READ"]
