"""Cross-entropy of a chunk of logits: the loss of each row, and its gradient over the logits, in one launch.

With s = scale * logit and z = softcap * tanh(s / softcap) (z = s without a cap) a row's loss is

    weight * ((1 - e) * (lse - z_y) + e * (lse - mean(z)) + z_loss * lse^2),   lse = log(sum(exp(z)))

and rows labelled ``ignore_index`` lose nothing and get zero gradients. Computed in float32 whatever the logits' dtype.

The gradient needs the row's log-sum-exp before its first element can be written, so a row is read twice, unless it fits
the registers (32768 16-bit columns) and is read once. The second walk runs backwards: what was read last is still in
the caches. One row a program and no meeting of programs: deterministic. `triton_once` beside this file reads
a long row once where the caller can take its gradient divided by a factor.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from frugal.ops.launch import Launch, cdiv, next_power_of_2, tile


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
    LOGITS, LABELS, WEIGHTS, LOSS, stride, vocab, scale, softcap, ignore_index, smoothing, z_loss,
    HAS_WEIGHTS: tl.constexpr, SOFTCAP: tl.constexpr, SMOOTHING: tl.constexpr, GRADIENT: tl.constexpr,
    ONE_READ: tl.constexpr, BLOCK: tl.constexpr,
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
        weight = 1.0
        if HAS_WEIGHTS:
            weight = tl.load(WEIGHTS + row).to(tl.float32)
        target, _ = cap(tl.load(logits + label).to(tl.float32), scale, softcap, SOFTCAP)
        if ONE_READ:
            x = tl.load(logits + lane, mask=lane < vocab, other=0.0).to(tl.float32)
            z, slope = cap(x, scale, softcap, SOFTCAP)
            z = tl.where(lane < vocab, z, -float("inf"))
            top = tl.max(z, 0)
            total = tl.sum(tl.exp(z - top), 0)
            if SMOOTHING:
                sum_z = tl.sum(tl.where(lane < vocab, z, 0.0), 0)
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
        loss += z_loss * lse * lse
        tl.store(LOSS + row, weight * loss)
        if GRADIENT:
            share = weight * (1.0 + 2.0 * z_loss * lse)
            spread = weight * smoothing / vocab
            hit = weight * (1.0 - smoothing)
            if ONE_READ:
                d = share * tl.exp(z - lse)
                if SMOOTHING:
                    d -= spread
                d = tl.where(lane == label, d - hit, d) * slope
                tl.store(logits + lane, d.to(LOGITS.dtype.element_ty), mask=lane < vocab)
            else:
                for back in range(pieces):
                    column = (pieces - 1 - back) * BLOCK + lane
                    x = tl.load(logits + column, mask=column < vocab, other=0.0).to(tl.float32)
                    z, slope = cap(x, scale, softcap, SOFTCAP)
                    d = share * tl.exp(z - lse)
                    if SMOOTHING:
                        d -= spread
                    d = tl.where(column == label, d - hit, d) * slope
                    tl.store(logits + column, d.to(LOGITS.dtype.element_ty), mask=column < vocab)


def prepare_cross_entropy(
    logits: Tensor,
    labels: Tensor,
    loss: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    gradient: bool = True,
    target: str | None = None,
) -> Launch:
    """``loss`` float32 [tokens] of ``logits`` [tokens, vocab]; with ``gradient`` the logits become the gradient of the
    losses' sum.

    ``labels`` int64 [tokens] must lie in [0, vocab) or be ``ignore_index``: the kernel does not check.
    """
    tokens, vocab = logits.shape
    if labels.shape != (tokens,) or loss.shape != (tokens,) or loss.dtype != torch.float32:
        raise ValueError(f"labels and float32 loss [{tokens}] expected, got {tuple(labels.shape)}, {tuple(loss.shape)}")
    if logits.stride(1) != 1:
        raise ValueError("cross_entropy: a row's logits must lie side by side")
    if token_weights is not None and (token_weights.shape != (tokens,) or not token_weights.is_contiguous()):
        raise ValueError(f"token_weights [{tokens}] expected, got {tuple(token_weights.shape)}")
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
        (logits, labels, token_weights, loss, logits.stride(0), vocab, float(scale), float(softcap or 1.0),
         ignore_index, float(label_smoothing), float(z_loss)),
        {
            "HAS_WEIGHTS": token_weights is not None,
            "SOFTCAP": softcap is not None,
            "SMOOTHING": label_smoothing != 0.0,
            "GRADIENT": gradient,
            "ONE_READ": cdiv(vocab, block) == 1,
            "BLOCK": block,
        },
        sizes,
    )  # fmt: skip


def cross_entropy_(
    logits: Tensor,
    labels: Tensor,
    *,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    token_weights: Tensor | None = None,
    gradient: bool = True,
) -> Tensor:
    """Run `prepare_cross_entropy`; returns the losses, float32 [tokens]."""
    loss = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    prepare_cross_entropy(
        logits, labels, loss, scale=scale, softcap=softcap, ignore_index=ignore_index,
        label_smoothing=label_smoothing, z_loss=z_loss, token_weights=token_weights, gradient=gradient,
    ).run()  # fmt: skip
    return loss
