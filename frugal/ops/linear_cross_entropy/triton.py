"""Cross-entropy of rows of logits, and its gradient written over them.

Loss of a row with label y and z = softcap * tanh(scale * x / softcap) of its logits x, where e is the label smoothing:

    (1 - e) * (lse - z_y) + e * (lse - mean(z)),   lse = log(sum(exp(z)))

Rows labelled ``IGNORE_INDEX`` lose nothing and get zero gradients. Computed in float32 whatever the logits' dtype. One
row a program and no meeting of programs: deterministic.

The gradient needs the row's log-sum-exp before its first element can be written, so `cross_entropy_` reads a row twice,
unless it fits the registers (32768 16-bit columns) and is read once. The second walk runs backwards: what was read last
is still in the caches.

`cross_entropy_once_` reads a long row once: the gradient comes with a factor a row. It is f * (e - total * [column is
the label]) with e = exp(z - level), total = sum(e) and f = 1 / total. e is written while it is summed, and f is handed
to the caller, who multiplies the product with the head by it: the factor of a row of logits is the factor of a row of
the product. The level must be known before the row's largest value is. It is the larger of the label's value and the
largest of the first piece, and is raised when a later piece exceeds it by more than ``room``. Pieces written before are
then rescaled at the end, where the row's ``levels`` say which; so are all pieces of a row whose total would leave the
range of float16. Both are rare, and only cost time. Label smoothing is no multiple of f: left to the other kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, cdiv, next_power_of_2, tile
from frugal.ops.linear_cross_entropy import IGNORE_INDEX

# Largest excess over the level, and largest total, that a row may have as it is written.
_ROOM = {torch.float16: 4.0, torch.bfloat16: 40.0, torch.float32: 40.0}
_MOST = {torch.float16: 4096.0, torch.bfloat16: 1e30, torch.float32: 1e30}


@triton.jit
def cap(x, scale, softcap, SOFTCAP: tl.constexpr):
    """(z, dz/dx) of logits x."""
    z = x * scale
    slope = scale
    if SOFTCAP:
        # tanh and its slope by the decaying exponential: neither overflows nor loses digits.
        e = tl.exp(-2.0 * tl.abs(z) / softcap)
        t = (1.0 - e) / (1.0 + e)
        z = tl.where(z < 0.0, -softcap * t, softcap * t)
        slope = scale * 4.0 * e / ((1.0 + e) * (1.0 + e))
    return z, slope


@triton.jit
def zero_row(logits, vocab, BLOCK: tl.constexpr):
    """The gradient of a row whose label is ignored."""
    for piece in range(tl.cdiv(vocab, BLOCK)):
        column = piece * BLOCK + tl.arange(0, BLOCK)
        tl.store(logits + column, tl.zeros((BLOCK,), logits.dtype.element_ty), mask=column < vocab)


@triton.jit
def cross_entropy_kernel(
    LOGITS, LABELS, LOSS, stride, vocab, scale, softcap, ignore_index, smoothing,
    SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr, ONE_READ: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(LABELS + row)
    logits = LOGITS + row * stride
    lane = tl.arange(0, BLOCK)
    pieces = tl.cdiv(vocab, BLOCK)
    if label == ignore_index:
        tl.store(LOSS + row, 0.0)
        if GRADIENT:
            zero_row(logits, vocab, BLOCK)
    else:
        target, _ = cap(tl.load(logits + label).to(tl.float32), scale, softcap, SOFTCAP)
        if ONE_READ:
            x = tl.load(logits + lane, mask=lane < vocab, other=0.0).to(tl.float32)
            z, slope = cap(x, scale, softcap, SOFTCAP)
            z = tl.where(lane < vocab, z, -float("inf"))
            top = tl.max(z, 0)
            if SMOOTHING:
                sum_z = tl.sum(tl.where(lane < vocab, z, 0.0), 0)
            e = tl.exp(z - top)
            total = tl.sum(e, 0)
        else:
            top = -float("inf")
            total = 0.0
            sum_z = 0.0
            for piece in range(pieces):
                column = piece * BLOCK + lane
                x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
                z, slope = cap(x, scale, softcap, SOFTCAP)
                if SMOOTHING:
                    sum_z += tl.sum(tl.where(column < vocab, z, 0.0), 0)
                z = tl.where(column < vocab, z, -float("inf"))
                higher = tl.maximum(top, tl.max(z, 0))
                # A piece may hold nothing but -inf (logits masked by the caller).
                finite = tl.where(higher == -float("inf"), 0.0, higher)
                total = total * tl.exp(top - finite) + tl.sum(tl.exp(z - finite), 0)
                top = higher
        lse = top + tl.log(total)
        loss = lse - target
        if SMOOTHING:
            loss = (1.0 - smoothing) * loss + smoothing * (lse - sum_z / vocab)
        tl.store(LOSS + row, loss)
        if GRADIENT:
            spread = smoothing / vocab
            hit = 1.0 - smoothing
            if ONE_READ:
                d = e / total
                if SMOOTHING:
                    d -= spread
                d = tl.where(lane == label, d - hit, d) * slope
                tl.store(logits + lane, d.to(LOGITS.dtype.element_ty), mask=lane < vocab)
            else:
                for back in range(pieces):
                    column = (pieces - 1 - back) * BLOCK + lane
                    x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
                    z, slope = cap(x, scale, softcap, SOFTCAP)
                    d = tl.exp(z - lse)
                    if SMOOTHING:
                        d -= spread
                    d = tl.where(column == label, d - hit, d) * slope
                    tl.store(logits + column, d.to(LOGITS.dtype.element_ty), mask=column < vocab)


@triton.jit
def cross_entropy_once_kernel(
    LOGITS, LABELS, LOSS, FACTOR, LEVELS, stride, vocab, scale, softcap, ignore_index, room, most,
    SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
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
        tl.store(LOSS + row, lse - target)
        last = level
        if total > most:
            last = lse
            total = 1.0
        tl.store(FACTOR + row, 1.0 / total)
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


def _check(logits: Tensor, labels: Tensor, *per_row: Tensor) -> None:
    """Labels must also lie in [0, vocab) or be ``IGNORE_INDEX``: neither this nor the kernels look."""
    tokens = logits.shape[0]
    if labels.shape != (tokens,) or any(t.shape != (tokens,) or t.dtype != torch.float32 for t in per_row):
        found = [tuple(labels.shape), *((t.dtype, tuple(t.shape)) for t in per_row)]
        raise ValueError(f"cross_entropy: labels and float32 loss and factor [{tokens}] expected, got {found}")
    if logits.stride(1) != 1:
        raise ValueError("cross_entropy: a row's logits must lie side by side")


def prepare_cross_entropy(
    logits: Tensor, labels: Tensor, loss: Tensor, *, scale: float = 1.0, softcap: float | None = None,
    label_smoothing: float = 0.0, gradient: bool = True, target: str | None = None,
) -> Launch:  # fmt: skip
    """``loss`` float32 [tokens] of ``logits`` [tokens, vocab] and int64 ``labels`` [tokens]; with ``gradient`` the
    logits become the gradient of the losses' sum."""
    _check(logits, labels, loss)
    tokens, vocab = logits.shape
    sizes = tile("cross_entropy", logits.dtype, logits.device, target)
    one_read = sizes.pop("ONE_READ")
    block = sizes.pop("BLOCK")
    whole = gradient and block < vocab <= one_read
    if whole or vocab < block:
        block = next_power_of_2(vocab)
    if whole:
        sizes["num_warps"] = max(sizes["num_warps"], min(16, block // 2048))
    return Launch(
        cross_entropy_kernel,
        (tokens,),
        (logits, labels, loss, logits.stride(0), vocab, float(scale), float(softcap or 1.0), IGNORE_INDEX,
         float(label_smoothing)),
        {
            "SOFTCAP": softcap is not None,
            "SMOOTHING": label_smoothing != 0.0,
            "GRADIENT": gradient,
            "ONE_READ": cdiv(vocab, block) == 1,
            "BLOCK": block,
        },
        sizes,
    )  # fmt: skip


def cross_entropy_(
    logits: Tensor, labels: Tensor, *, scale: float = 1.0, softcap: float | None = None, label_smoothing: float = 0.0,
    gradient: bool = True,
) -> Tensor:  # fmt: skip
    """Run `prepare_cross_entropy`; returns the losses, float32 [tokens]."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    prepare_cross_entropy(
        logits, labels, loss, scale=scale, softcap=softcap, label_smoothing=label_smoothing, gradient=gradient
    ).run()
    return loss


def prepare_cross_entropy_once(
    logits: Tensor, labels: Tensor, loss: Tensor, factor: Tensor, levels: Tensor, *, scale: float = 1.0,
    softcap: float | None = None, target: str | None = None,
) -> Launch:  # fmt: skip
    """``loss`` and ``factor`` float32 [tokens] of ``logits`` [tokens, vocab], which become the gradient of the losses'
    sum divided by ``factor`` of their row. ``levels`` is scratch, float32 of `levels_shape`."""
    _check(logits, labels, loss, factor)
    tokens, vocab = logits.shape
    sizes = tile("cross_entropy_once", logits.dtype, logits.device, target)
    block = sizes.pop("BLOCK")
    if levels.numel() < tokens * cdiv(vocab, block):
        raise ValueError(f"cross_entropy: {tokens * cdiv(vocab, block)} levels expected, got {levels.numel()}")
    return Launch(
        cross_entropy_once_kernel,
        (tokens,),
        (logits, labels, loss, factor, levels, logits.stride(0), vocab, float(scale), float(softcap or 1.0),
         IGNORE_INDEX, _ROOM[logits.dtype], _MOST[logits.dtype]),
        {"SOFTCAP": softcap is not None, "BLOCK": block},
        sizes,
    )  # fmt: skip


def levels_shape(logits: Tensor, target: str | None = None) -> tuple[int, int]:
    """[tokens, pieces] of the scratch of `prepare_cross_entropy_once`."""
    return logits.shape[0], cdiv(
        logits.shape[1], tile("cross_entropy_once", logits.dtype, logits.device, target)["BLOCK"]
    )


def cross_entropy_once_(
    logits: Tensor, labels: Tensor, *, scale: float = 1.0, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """Run `prepare_cross_entropy_once`; returns losses and factors, float32 [tokens]."""
    loss, factor = (torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device) for _ in range(2))
    levels = torch.empty(levels_shape(logits), dtype=torch.float32, device=logits.device)
    prepare_cross_entropy_once(logits, labels, loss, factor, levels, scale=scale, softcap=softcap).run()
    return loss, factor


def pays(vocab: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `cross_entropy_` would read a row of ``vocab`` logits twice."""
    return vocab > tile("cross_entropy", dtype, device)["ONE_READ"]
