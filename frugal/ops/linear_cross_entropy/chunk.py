"""One chunk of linear cross-entropy: logits made, turned into the loss, and in place into gradients.

Formulas in `frugal.ops.linear_cross_entropy`. Two walks over the vocabulary: the first for the log-sum-exp (online, so
a tile is enough), the second for the gradients. With the vocabulary in one piece the second walk reuses the first's
buffer; in tiles it computes the logits again.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

import torch
from torch import Tensor

from frugal.ops.registry import implements, resolve
from frugal.ops.weights import Weight, matmul_add_, matmul_t, rows

LOG2E = 1.4426950408889634  # exp2 is fast for every argument on CPUs; exp takes 20 times longer near underflow


@dataclass(frozen=True)
class Options:
    logit_scale: float
    softcap: float | None
    label_smoothing: float
    lora_scale: float
    chunk_tokens: int
    chunk_vocab: int
    implementation: str | None = None


@dataclass
class Grads:
    """Gradient buffers; None where nobody asked."""

    hidden: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    u: Tensor | None = None
    lora_b: Tensor | None = None

    @property
    def wanted(self) -> bool:
        return any(g is not None for g in (self.hidden, self.weight, self.bias, self.u, self.lora_b))


class Chunk:
    """Logits of one chunk of tokens, turned in place into the loss's gradient with respect to them."""

    def __init__(self, parts: Parts, grads: Grads, options: Options) -> None:
        self.parts, self.grads, self.options = parts, grads, options
        self.acc = torch.promote_types(parts.hidden.dtype, torch.float32)
        # What is added to logits, and products of gradients that are kept in fp32, need fp32 logits.
        fp32_logits = None
        if parts.bias is not None or parts.u is not None or grads.weight is not None:
            fp32_logits = "a bias, an adapter on the head or a trained head needs logits in fp32"
        elif options.chunk_vocab < int(parts.weight.shape[0]):
            fp32_logits = "the vocabulary is taken in tiles"
        self.form, _ = resolve("linear_cross_entropy", parts.hidden, options.implementation, fp32_logits=fp32_logits)
        self.fused = self.form is Chunk.run_by_kernel
        """Logits stay in the hidden states' dtype and become their gradients in one launch."""

    def run(self, h: Tensor, u: Tensor | None, y: Tensor, w: Tensor | None,
            buffer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """Loss of each token [chunk] and, if asked for, the gradients of h and u in fp32: of the losses' sum, or of
        their sum weighted by ``w`` [chunk], the gradients that came from above."""
        found: tuple[Tensor, Tensor | None, Tensor | None] = self.form(self, h, u, y, w, buffer)
        return found

    def run_by_kernel(self, h: Tensor, u: Tensor | None, y: Tensor, w: Tensor | None,
                      buffer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """`run` by the Triton kernel."""
        o = self.options
        logits = matmul_t(h, self.parts.weight, buffer)
        kernels = importlib.import_module("frugal.ops.linear_cross_entropy.triton")
        settings = {"scale": o.logit_scale, "softcap": o.softcap}
        wanted, factor = self.grads.hidden is not None, w
        loss: Tensor
        if wanted and o.label_smoothing == 0.0 and kernels.pays(logits.shape[1], logits.dtype, logits.device):
            # One walk over a long row: its gradient comes divided by a factor, which the product is multiplied with.
            loss, factor = kernels.cross_entropy_once_(logits, y, **settings)
            factor = factor if w is None else factor * w
        else:
            loss = kernels.cross_entropy_(logits, y, label_smoothing=o.label_smoothing, gradient=wanted, **settings)
        if not wanted:
            return loss, None, None
        product = matmul_add_(torch.zeros_like(h), logits, self.parts.weight)
        return loss, product if factor is None else factor[:, None] * product, None

    def logits(self, h: Tensor, u: Tensor | None, lo: int, hi: int, buffer: Tensor | None) -> Tensor:
        """z before the soft cap for vocabulary rows lo..hi: [chunk, hi - lo], fp32 (fp64 for fp64 input)."""
        p, o = self.parts, self.options
        out = h.new_empty(h.shape[0], hi - lo) if buffer is None or buffer.dtype != h.dtype else buffer
        if (lo, hi) == (0, int(p.weight.shape[0])):
            matmul_t(h, p.weight, out)
        else:
            torch.mm(h, rows(p.weight, lo, hi, h.dtype).t(), out=out)
        z = out if out.dtype == self.acc else (out.to(self.acc) if buffer is None else buffer.copy_(out))
        if p.bias is not None:
            z += p.bias[lo:hi]
        if u is not None and p.lora_b is not None:
            z.addmm_(u, p.lora_b[lo:hi].to(self.acc).t(), alpha=o.lora_scale)
        if o.logit_scale != 1.0:
            z *= o.logit_scale
        return z

    def backward(self, dz: Tensor, h: Tensor, dh: Tensor | None, u: Tensor | None, du: Tensor | None,
                 lo: int, hi: int) -> None:  # fmt: skip
        """Adds what dz [chunk, hi - lo] (with respect to the scaled logits) contributes to every gradient."""
        p, g, o = self.parts, self.grads, self.options
        if o.logit_scale != 1.0:
            dz *= o.logit_scale
        if g.bias is not None:
            g.bias[lo:hi] += dz.sum(0)
        if g.weight is not None:
            g.weight[lo:hi].addmm_(dz.t(), h.to(self.acc))
        if u is not None and g.lora_b is not None:
            g.lora_b[lo:hi].addmm_(dz.t(), u, alpha=o.lora_scale)
        if du is not None and p.lora_b is not None:
            du.addmm_(dz, p.lora_b[lo:hi].to(self.acc), alpha=o.lora_scale)
        if dh is not None:
            narrow = dz.to(h.dtype)
            if (lo, hi) == (0, int(p.weight.shape[0])):
                if dh.dtype == narrow.dtype:
                    matmul_add_(dh, narrow, p.weight)
                else:
                    dh += matmul_add_(torch.zeros_like(h), narrow, p.weight)
            else:
                block = rows(p.weight, lo, hi, h.dtype)
                dh += torch.mm(narrow, block)

    def run_by_torch(self, h: Tensor, u: Tensor | None, y: Tensor, w: Tensor | None,
                     buffer: Tensor | None) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        """`run` in torch operations."""
        p, g, o, acc = self.parts, self.grads, self.options, self.acc
        vocab = int(p.weight.shape[0])
        blocks = list(ranges(vocab, o.chunk_vocab))
        whole = len(blocks) == 1
        # First walk over the vocabulary: log-sum-exp, the target's logit, and the mean for label smoothing.
        highest = h.new_full((h.shape[0],), -torch.inf, dtype=acc)
        total = torch.zeros_like(highest)
        target = torch.zeros_like(highest)
        mean = torch.zeros_like(highest) if o.label_smoothing else None
        z = slope = None
        for lo, hi in blocks:
            z = self.logits(h, u, lo, hi, buffer if whole else None)
            slope = _cap_(z, o.softcap, g.wanted and whole)
            if mean is not None:
                mean += z.sum(1) / vocab
            inside = (y >= lo) & (y < hi)
            found = z.gather(1, (y - lo).clamp(0, hi - lo - 1)[:, None])[:, 0]
            target = torch.where(inside, found, target)
            top = torch.maximum(highest, z.amax(1))
            if whole and z.device.type == "cpu":
                total = _softmax_(z)
            else:
                total = total * torch.exp(highest - top)
                z.sub_(top[:, None]).mul_(LOG2E).exp2_()
                total += z.sum(1)
            highest = top
        lse = highest + total.log()
        loss = lse - target
        if mean is not None:
            loss = (1 - o.label_smoothing) * loss + o.label_smoothing * (lse - mean)
        if not g.wanted:
            return loss, None, None
        # Second walk: probabilities to gradients. With one block the exponentials are still in the buffer.
        dh = torch.zeros_like(h, dtype=acc) if g.hidden is not None else None
        du = torch.zeros_like(u) if u is not None and g.u is not None else None
        for lo, hi in blocks:
            if whole and z is not None:
                if z.device.type != "cpu":
                    z *= total.reciprocal()[:, None]
            else:
                z = self.logits(h, u, lo, hi, None)
                slope = _cap_(z, o.softcap, True)
                z.sub_(lse[:, None]).mul_(LOG2E).exp2_()
            if o.label_smoothing:
                z -= o.label_smoothing / vocab
            inside = (y >= lo) & (y < hi)
            hit = inside.to(acc).mul_(o.label_smoothing - 1.0)
            z.scatter_add_(1, (y - lo).clamp(0, hi - lo - 1)[:, None], hit[:, None])
            if slope is not None:
                z *= slope
            if w is not None:
                z *= w[:, None]
            self.backward(z, h, dh, u, du, lo, hi)
        return loss, dh, du


implements("linear_cross_entropy", "triton")(Chunk.run_by_kernel)
implements("linear_cross_entropy", "torch")(Chunk.run_by_torch)


def _softmax_(z: Tensor) -> Tensor:
    """z becomes softmax(z) in place; returns sum(exp(z - max)) of each row, which is 1 / the largest probability.

    torch's CPU kernel works row by row, each row read before it is written, so input and output may be one tensor.
    """
    torch._softmax(z, 1, False, out=z)
    return z.amax(1).reciprocal_()


def _cap_(z: Tensor, softcap: float | None, want_slope: bool) -> Tensor | None:
    """Soft cap in place; returns d cap(z) / dz = 1 - tanh^2 when asked."""
    if softcap is None:
        return None
    z.div_(softcap).tanh_()
    slope = torch.square(z).neg_().add_(1) if want_slope else None
    z.mul_(softcap)
    return slope


@dataclass(frozen=True)
class Parts:
    hidden: Tensor
    weight: Weight
    bias: Tensor | None
    u: Tensor | None
    lora_b: Tensor | None


def ranges(total: int, step: int) -> list[tuple[int, int]]:
    return [(lo, min(lo + step, total)) for lo in range(0, total, step)]
