"""Each Triton kernel by itself, on a CUDA device. On other devices there is nothing to run."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.codecs import dequantize_nf4, quantize_nf4
from frugal.codecs.nf4_codes import nested_code, nf4_code
from frugal.device import describe
from frugal.ops import IGNORE_INDEX, rms_norm_reference, rope_reference
from frugal.ops.rows import no_triton
from frugal.verification.judge import Measurement, Results, Subject, drawn

KERNELS = ("nf4", "rms_norm", "rope", "gated", "cross_entropy", "adam8bit", "attention")


def kernel_checks(subject: Subject) -> Iterator[Measurement]:
    """Element-wise and row kernels; attention is checked with the operations, where it has a row of its own."""
    if no_triton(describe(subject.device), subject.dtype) is not None:
        return
    yield Measurement("kernels.nf4", "triton", "bitsandbytes' bits", partial(_nf4, subject.random))
    for name, what, results in (
        ("rms_norm", "forward, backward", _rms_norm),
        ("rope", "q and k in place", _rope),
        ("gated", "SiLU, both ways", _gated),
        ("cross_entropy", "loss and gradient", _cross_entropy),
    ):
        yield Measurement(f"kernels.{name}", "triton", what, drawn(partial(results, subject.random)))


def _module(name: str) -> Any:
    """The Triton form in a folder of `frugal.ops`; importing it needs Triton."""
    return importlib.import_module(f"frugal.ops.{name}")


def _nf4(random: Callable[..., Tensor]) -> float:
    """0 when the dequantised values have the bits of the torch form (which has bitsandbytes'), else infinite."""
    kernel = _module("weights.triton")
    weight = random(96, 320)
    for double in (True, False):
        stored = quantize_nf4(weight, double)
        tables = nf4_code(weight.device), nested_code(weight.device) if double else None
        parts = kernel.Nf4Parts(stored.packed, stored.absmax, stored.nested_absmax, stored.offset, *tables)
        got = kernel.dequantize(parts, 0, weight.numel(), weight.dtype)
        if not torch.equal(got.view_as(weight), dequantize_nf4(stored, torch.float32).to(weight.dtype)):
            return float("inf")
    return 0.0


def _rms_norm(random: Callable[..., Tensor]) -> Results:
    kernel = _module("rms_norm.triton")
    x, w, dy = random(37, 256), random(256), random(37, 256)

    def reference(to: torch.dtype) -> list[Tensor]:
        leaves = [t.to(to).requires_grad_() for t in (x, w)]
        y = rms_norm_reference(leaves[0], leaves[1], 1e-5)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy.to(to))]

    dx, dw = kernel.rms_norm_backward(dy, x, w, 1e-5, weight_grad=True)
    got = [kernel.rms_norm(x, w, 1e-5), dx, dw.to(x.dtype)]
    return got, reference(torch.float64), reference(x.dtype)


def _rope(random: Callable[..., Tensor]) -> Results:
    q, k, angle = random(2, 4, 33, 64), random(2, 2, 33, 64), random(1, 33, 32)
    cos, sin = angle.cos(), angle.sin()

    def reference(x: Tensor, to: torch.dtype) -> Tensor:
        wide_cos, wide_sin = (torch.cat([t, t], -1)[:, None].to(to) for t in (cos, sin))
        return rope_reference(x.to(to), wide_cos, wide_sin)

    exact, naive = ([reference(t, to) for t in (q, k)] for to in (torch.float64, q.dtype))
    _module("rope.triton").rope_(q, k, cos, sin)
    return [q, k], exact, naive


def _gated(random: Callable[..., Tensor]) -> Results:
    kernel = _module("gated_mlp.triton")
    gate, up, d = random(33, 200), random(33, 200), random(33, 200)

    def reference(to: torch.dtype) -> list[Tensor]:
        leaves = [t.to(to).requires_grad_() for t in (gate, up)]
        y = F.silu(leaves[0]) * leaves[1]
        return [y.detach(), *torch.autograd.grad(y, leaves, d.to(to))]

    exact, naive = reference(torch.float64), reference(gate.dtype)
    out = kernel.gated(gate, up, torch.empty_like(gate))
    kernel.gated_backward_(d, gate, up)
    return [out, gate, up], exact, naive


def _cross_entropy(random: Callable[..., Tensor]) -> Results:
    """Rows that are read whole, and rows in pieces whose gradient comes with a factor."""
    whole, once = _cross_entropy_of(random(17, 1000), False), _cross_entropy_of(random(5, 9000), True)
    got, exact, naive = ([*a, *b] for a, b in zip(whole, once, strict=True))
    return got, exact, naive


def _cross_entropy_of(logits: Tensor, once: bool) -> Results:
    labels = torch.arange(logits.shape[0], device=logits.device) * 50
    labels[3] = IGNORE_INDEX

    def reference(to: torch.dtype) -> list[Tensor]:
        leaf = logits.to(to).requires_grad_()
        loss = F.cross_entropy(leaf, labels, reduction="none")
        return [loss.detach(), torch.autograd.grad(loss.sum(), leaf)[0]]

    exact, naive = reference(torch.float64), reference(logits.dtype)
    if once:
        loss, factor = _module("linear_cross_entropy.triton").cross_entropy_once_(logits, labels)
        logits = (factor[:, None] * logits).to(logits.dtype)
    else:
        loss = _module("linear_cross_entropy.triton").cross_entropy_(logits, labels)
    return [loss, logits], exact, [naive[0].float(), naive[1]]
