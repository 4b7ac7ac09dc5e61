"""Cross-entropy of hidden states times head, without ever holding the logits of all tokens.

The sum over tokens of ``(1 - e) * (lse_t - z_t[y]) + e * (lse_t - mean_v z_t)`` with label smoothing e,
``z = softcap * tanh(s / softcap)``, ``s = logit_scale * (hidden W^T + bias + lora_scale * (hidden A^T) B^T)`` and
``lse = logsumexp(z)``. Tokens whose label is ``IGNORE_INDEX`` are left out of every product.

For ``sum`` and ``mean`` the gradients are made in the forward pass, chunk by chunk, while a chunk's logits are there,
and multiplied by the upstream scalar in backward. For ``none`` every token has an upstream gradient of its own, which
cannot be applied after tokens were summed into a weight gradient; there the chunks are computed again in backward.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops.host_values import on_host, to_device
from frugal.ops.linear_cross_entropy.chunk import Chunk, Grads, Options, Parts, ranges
from frugal.ops.simulated import is_fake, sampled, simulated_targets
from frugal.ops.weights import Weight, row_blocks

IGNORE_INDEX = -100
"""Label of a position that is no target, as torch and transformers have it."""

Reduction = Literal["sum", "mean", "none"]
# One chunk of logits. Every chunk reads (or dequantises, or widens) the whole head: a few hundred tokens make up for
# it.
CHUNK_BYTES = 128 * 2**20
CPU_CHUNK_BYTES = 48 * 2**20
MIN_CHUNK_TOKENS = 32  # narrower products are slow on every device


def chunk_tokens_for(vocab: int, logit_bytes: int, *, on_cpu: bool) -> int:
    """Tokens of a chunk whose logits, of ``logit_bytes`` each, reach the device's bound."""
    return max(MIN_CHUNK_TOKENS, (CPU_CHUNK_BYTES if on_cpu else CHUNK_BYTES) // (logit_bytes * vocab))


def linear_cross_entropy_reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    reduction: Reduction = "sum",
    count: Tensor | float | None = None,
) -> Tensor:
    """The definition, with all logits at once. Arguments as in `linear_cross_entropy`."""
    acc = torch.promote_types(hidden.dtype, torch.float32)
    logits = F.linear(hidden, weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)).to(acc)
    if lora is not None:
        a, b, scale = lora
        logits = logits + scale * F.linear(F.linear(hidden.to(acc), a.to(acc)), b.to(acc))
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    keep = labels != IGNORE_INDEX
    lse = torch.logsumexp(logits, dim=-1)
    target = logits.gather(1, labels.where(keep, 0)[:, None])[:, 0]
    loss = (1 - label_smoothing) * (lse - target) + label_smoothing * (lse - logits.mean(-1))
    loss = loss.where(keep, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() if reduction == "sum" else loss.sum() / _count(labels, count)


def _count(labels: Tensor, count: Tensor | float | None) -> Tensor | float:
    return (labels != IGNORE_INDEX).sum().clamp(min=1) if count is None else count


def _targets(labels: Tensor, vocab: int, hidden: Tensor) -> Tensor | None:
    """Positions of labels that are not ignored, None for all of them.

    Raises IndexError for labels outside of the vocabulary. The device is asked where the host does not know the labels.
    """
    if is_fake(hidden) or is_fake(labels):
        # planning without memory cannot look at labels: it counts every token, the upper bound
        return torch.arange(simulated_targets(labels.shape[0]), device=hidden.device)
    values = on_host(labels).numpy()
    keep = values != IGNORE_INDEX
    if (keep & ((values < 0) | (values >= vocab))).any():
        raise IndexError(f"labels must be {IGNORE_INDEX} or in [0, {vocab}); got {values.min()} to {values.max()}")
    return None if keep.all() else to_device(torch.from_numpy(np.flatnonzero(keep)), hidden.device)


def _walk(
    parts: Parts, labels: Tensor, picked: Tensor | None, upstream: Tensor | None, grads: Grads, options: Options
) -> Tensor:
    """Loss of every token [tokens]; fills ``grads`` with gradients of their sum, weighted by ``upstream`` [tokens].

    ``picked``: as from `_targets`.
    """
    hidden = parts.hidden
    acc = torch.promote_types(hidden.dtype, torch.float32)
    n_tokens, vocab = hidden.shape[0], int(parts.weight.shape[0])
    losses = hidden.new_zeros(n_tokens, dtype=acc)
    fake = is_fake(hidden) or is_fake(labels)
    n_kept = n_tokens if picked is None else picked.shape[0]
    chunk = Chunk(parts, grads, options)
    # evened out: a last chunk of two tokens would read the head as often as a full one
    step = max(1, -(n_kept // -max(1, -(n_kept // -options.chunk_tokens))))
    whole_vocab = options.chunk_vocab >= vocab
    dtype = hidden.dtype if chunk.fused else acc
    buffer = hidden.new_empty(min(step, n_kept), vocab, dtype=dtype) if whole_vocab and n_kept else None
    for lo, hi in sampled(ranges(n_kept, step), hidden):
        index: Any = slice(lo, hi) if picked is None else picked[lo:hi]
        h, y = hidden[index], labels[index]
        w = None if upstream is None else upstream[index].to(acc)
        if fake:
            y = y.clamp(min=0)
        u = None if parts.u is None else parts.u[index]
        loss, dh, du = chunk.run(h, u, y, w, None if buffer is None else buffer[: hi - lo])
        losses[index] = loss
        if grads.hidden is not None and dh is not None:
            grads.hidden[index] = dh.to(hidden.dtype)
        if grads.u is not None and du is not None:
            grads.u[index] = du
    return losses


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor | None, quantised: Any, labels: Tensor, bias: Tensor | None,
                u: Tensor | None, lora_b: Tensor | None, options: Options, per_token: bool) -> Tensor:  # fmt: skip
        parts = Parts(hidden, quantised if weight is None else weight, bias, u, lora_b)
        needs = ctx.needs_input_grad
        ctx.options, ctx.per_token, ctx.quantised = options, per_token, quantised
        grads = Grads() if per_token else _buffers(parts, needs)
        picked = _targets(labels, int(parts.weight.shape[0]), hidden)
        losses = _walk(parts, labels, picked, None, grads, options)
        if per_token:
            ctx.save_for_backward(hidden, weight, labels, bias, u, lora_b, picked)
            return losses
        ctx.save_for_backward(grads.hidden, grads.weight, grads.bias, grads.u, grads.lora_b)
        ctx.dtypes = tuple(None if t is None else t.dtype for t in (hidden, weight, bias, u, lora_b))
        return losses.sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (upstream,) = outputs
        if ctx.per_token:
            hidden, weight, labels, bias, u, lora_b, picked = ctx.saved_tensors
            parts = Parts(hidden, ctx.quantised if weight is None else weight, bias, u, lora_b)
            grads = _buffers(parts, ctx.needs_input_grad)
            _walk(parts, labels, picked, upstream, grads, ctx.options)
            found = (grads.hidden, grads.weight, grads.bias, grads.u, grads.lora_b)
            sources = (hidden, weight, bias, u, lora_b)
            out = [None if g is None else g.to(s.dtype) for g, s in zip(found, sources, strict=True)]
        else:
            out = [
                None if g is None else (g * upstream).to(d) for g, d in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
            ]
        d_hidden, d_weight, d_bias, d_u, d_b = out
        return d_hidden, d_weight, None, None, d_bias, d_u, d_b, None, None


def _buffers(parts: Parts, needs: tuple[bool, ...]) -> Grads:
    acc = torch.promote_types(parts.hidden.dtype, torch.float32)

    def zeros(t: Any, wanted: bool, dtype: torch.dtype = acc) -> Tensor | None:
        return torch.zeros_like(t, dtype=dtype) if wanted and isinstance(t, Tensor) else None

    return Grads(
        hidden=zeros(parts.hidden, needs[0], parts.hidden.dtype),
        weight=zeros(parts.weight, needs[1]),
        bias=zeros(parts.bias, needs[4]),
        u=zeros(parts.u, needs[5]),
        lora_b=zeros(parts.lora_b, needs[6]),
    )


def linear_cross_entropy(
    hidden: Tensor,
    weight: Weight,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    logit_scale: float = 1.0,
    softcap: float | None = None,
    label_smoothing: float = 0.0,
    lora: tuple[Tensor, Tensor, float] | None = None,
    lora_input: Tensor | None = None,
    chunk_tokens: int | None = None,
    chunk_vocab: int | None = None,
    reduction: Reduction = "sum",
    count: Tensor | float | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Cross-entropy of ``hidden [tokens, hidden_size]`` times head ``weight [vocab, hidden_size]``.

    ``labels [tokens]`` int64 are already shifted: the label of row t is the token that row t predicts. ``weight`` is
    dense (frozen or trained) or quantised (frozen). ``lora`` is (A [r, hidden_size], B [vocab, r], scale) on the head,
    and ``lora_input [tokens, hidden_size]`` what A reads instead of ``hidden`` (after dropout). ``chunk_tokens`` and
    ``chunk_vocab`` bound a chunk of logits; unset, it is at most 128 MiB (48 on a CPU). ``mean`` divides by ``count``,
    or by the number of labels that are not ignored (0/0 is 0). Returns fp32 (fp64 for fp64 input): a scalar, or
    [tokens] for ``none``.
    """
    if hidden.dim() != 2 or labels.dim() != 1 or hidden.shape[0] != labels.shape[0]:
        raise ValueError(f"hidden [tokens, hidden_size] and labels [tokens] expected, got {tuple(hidden.shape)} and "
                         f"{tuple(labels.shape)}")  # fmt: skip
    vocab = int(weight.shape[0])
    n_buffers = 2 if softcap is not None else 1  # the cap's slope is a second buffer
    chunk_bytes = CPU_CHUNK_BYTES if hidden.device.type == "cpu" else CHUNK_BYTES
    if chunk_vocab is None:
        # Tiling the vocabulary computes logits twice: only where a few tokens alone would overflow the chunk.
        chunk_vocab = max(1, min(vocab, chunk_bytes // (4 * n_buffers * MIN_CHUNK_TOKENS // 2)))
    if chunk_tokens is None:
        chunk_tokens = chunk_tokens_for(min(vocab, chunk_vocab), 4 * n_buffers, on_cpu=hidden.device.type == "cpu")
    dense = weight if isinstance(weight, Tensor) else None
    if dense is None and chunk_vocab < vocab:
        blocks = list(row_blocks(weight, hidden.dtype, hidden.device))
        chunk_vocab = min(chunk_vocab, blocks[0][1])
    u, b, scale = None, None, 1.0
    if lora is not None:
        # [tokens, r] is small: autograd keeps it and takes care of A (and of a dropout before it).
        a, b, scale = lora
        acc = torch.promote_types(hidden.dtype, torch.float32)
        u = F.linear((hidden if lora_input is None else lora_input).to(acc), a.to(acc))
    options = Options(
        logit_scale, softcap, label_smoothing, scale, max(1, chunk_tokens), max(1, chunk_vocab), implementation
    )  # fmt: skip
    loss: Tensor = _LinearCrossEntropy.apply(
        hidden, dense, weight if dense is None else None, labels, bias, u, b, options, reduction == "none",
    )  # fmt: skip
    return loss if reduction != "mean" else loss / _count(labels, count)
