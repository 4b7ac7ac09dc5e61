"""The value checks: every operation as it would run here, against its definition in float64, forward and gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from bitsandbytes import functional as bnb
from torch import Tensor

from frugal.codecs import dequantize_nf4, quantize_nf4
from frugal.errors import UnsupportedError
from frugal.ops import (
    IGNORE_INDEX,
    Projection,
    attention,
    attention_reference,
    choose,
    gated_mlp,
    gated_mlp_reference,
    linear_cross_entropy,
    linear_cross_entropy_reference,
    lora_linear,
    lora_linear_reference,
    rms_norm,
    rms_norm_reference,
    rope_pair,
    rope_reference,
)
from frugal.ops.adam8bit import adam8bit_
from frugal.ops.rows import ROWS
from frugal.verification.judge import Measurement, Random, Results, Subject, drawn, with_gradients

_OFFSETS = (0, 97, 98, 300)
_ATTENTION: dict[str, dict[str, Any]] = {
    "packed documents": {},
    "packed, window 64": {"window": 64},
    "packed, soft cap 30": {"softcap": 30.0},
}


def attention_checks(subject: Subject) -> Iterator[Measurement]:
    """Check each implementation that can run here, not only the preferred one, with each mask that it can do."""
    for what, facts in _ATTENTION.items():
        for row in ROWS["attention"]:
            if row.name == "reference":
                continue
            try:
                choose("attention", subject.device, subject.dtype, named=row.name, head_size=64, **facts)
            except UnsupportedError:
                continue
            yield Measurement("attention", row.name, what, drawn(partial(_attention, subject.random, row.name, facts)))


def rms_norm_checks(subject: Subject) -> Iterator[Measurement]:
    """Check the norm, its input's and its weight's gradient."""
    yield _chosen(subject, "rms_norm", "37 x 256", _rms_norm)


def rope_checks(subject: Subject) -> Iterator[Measurement]:
    """Check rotary positions of queries and keys together."""
    yield _chosen(subject, "rope", "2 x (4 + 2) x 33 x 64", _rope)


def gated_mlp_checks(subject: Subject) -> Iterator[Measurement]:
    """Check an MLP over 4-bit weights with an adapter."""
    yield _chosen(subject, "gated_mlp", "NF4, rank 8", _gated_mlp)


def lora_linear_checks(subject: Subject) -> Iterator[Measurement]:
    """Check a linear layer over 4-bit weights with an adapter."""
    yield _chosen(subject, "lora_linear", "NF4, rank 8", _lora_linear)


def loss_checks(subject: Subject) -> Iterator[Measurement]:
    """Check the cross-entropy that holds no logits."""
    yield _chosen(subject, "linear_cross_entropy", "61 tokens, 1000 words", _loss)


def nf4_checks(subject: Subject) -> Iterator[Measurement]:
    """Compare 4-bit storage with bitsandbytes, bit for bit."""
    yield Measurement("nf4", "frugal", "bitsandbytes' bits", partial(_nf4, subject.random, subject.dtype))


def adam8bit_checks(subject: Subject) -> Iterator[Measurement]:
    """Check two updates of the 8-bit optimizer, whose parameters are float32 whatever the compute dtype is."""
    name = choose("adam8bit", subject.device, torch.float32).value
    yield Measurement("adam8bit", name, "2 steps, float32", partial(adam_error, subject.random))


def _chosen(subject: Subject, op: str, what: str, results: Callable[[Random], Results]) -> Measurement:
    return Measurement(
        op, choose(op, subject.device, subject.dtype).value, what, drawn(partial(results, subject.random))
    )


def _attention(random: Random, name: str, facts: dict[str, Any]) -> Results:
    q, k, v, grad = (random(1, heads, _OFFSETS[-1], 64) for heads in (4, 2, 2, 4))
    settings = {"cu_seqlens": _OFFSETS, **facts}

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_reference(q, k, v, **settings)

    got = with_gradients(lambda q, k, v: attention(q, k, v, implementation=name, **settings), (q, k, v), grad)
    return _against(got, reference, (q, k, v), grad)


def _against(got: list[Tensor], reference: Callable[..., Tensor], inputs: tuple[Tensor, ...], grad: Tensor) -> Results:
    exact = with_gradients(reference, [t.double() for t in inputs], grad)
    return got, exact, with_gradients(reference, inputs, grad)


def _rms_norm(random: Random) -> Results:
    x, w, grad = random(37, 256), random(256), random(37, 256)
    got = with_gradients(lambda x, w: rms_norm(x, w, 1e-5), (x, w), grad)
    return _against(got, lambda x, w: rms_norm_reference(x, w, 1e-5), (x, w), grad)


def _rope(random: Random) -> Results:
    q, k, grad, angle = random(2, 4, 33, 64), random(2, 2, 33, 64), random(2, 6, 33, 64), random(1, 33, 32)
    cos, sin = angle.cos(), angle.sin()

    def reference(*heads: Tensor) -> Tensor:
        wide = [torch.cat([t, t], -1)[:, None].to(heads[0].dtype) for t in (cos, sin)]
        return torch.cat([rope_reference(t, *wide) for t in heads], 1)

    got = with_gradients(lambda q, k: torch.cat(rope_pair(q * 1, k * 1, cos, sin), 1), (q, k), grad)
    return _against(got, reference, (q, k), grad)


def _lora_linear(random: Random) -> Results:
    weight = quantize_nf4(random(192, 128))
    x, a, b, grad = random(40, 128), random(8, 128).float(), random(192, 8).float(), random(40, 192)
    got = with_gradients(lambda x, a, b: lora_linear(x, weight, lora=(a, b, 0.5)), (x, a, b), grad)

    def reference(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return lora_linear_reference(x, dequantize_nf4(weight, x.dtype), lora=(a, b, 0.5))

    return _against(got, reference, (x, a, b), grad)


def _gated_mlp(random: Random) -> Results:
    gate, up, down = (quantize_nf4(random(*shape) / 8) for shape in ((192, 128), (192, 128), (128, 192)))
    x, grad = random(40, 128), random(40, 128)
    factors = [random(8, 128).float(), random(192, 8).float() / 8]

    def parts(x: Tensor, a: Tensor, b: Tensor, dense: bool) -> tuple[tuple[Projection, ...], Projection]:
        w = [dequantize_nf4(t, x.dtype) if dense else t for t in (gate, up, down)]
        return (Projection(w[0], None, (a, b, 0.5)), Projection(w[1])), Projection(w[2])

    got = with_gradients(lambda x, a, b: gated_mlp(x, *parts(x, a, b, False)), (x, *factors), grad)
    return _against(got, lambda x, a, b: gated_mlp_reference(x, *parts(x, a, b, True)), (x, *factors), grad)


def _loss(random: Random) -> Results:
    hidden, head = random(61, 128), random(1000, 128) / 4
    labels = torch.randint(0, 1000, (61,), generator=torch.Generator().manual_seed(1)).to(hidden.device)
    labels[::7] = IGNORE_INDEX
    one = torch.ones((), device=hidden.device, dtype=torch.float64)
    got = with_gradients(lambda h: linear_cross_entropy(h, head, labels), (hidden,), one)
    exact = with_gradients(lambda h: linear_cross_entropy_reference(h, head.double(), labels), (hidden.double(),), one)
    naive = with_gradients(lambda h: linear_cross_entropy_reference(h, head, labels), (hidden,), one)
    return [t.to(n.dtype) for t, n in zip(got, naive, strict=True)], exact, naive


def adam_error(random: Random, implementation: str | None = None) -> float:
    """The first step from no state is exact whatever the codes are; the second as near as codes of 8 bits allow."""
    start, first, second = (random(300).float() for _ in range(3))
    # Gradients of a like size: a code is precise to a part of the block's largest value.
    first, second = (g.sign() * (1 + g.abs().clamp(max=1)) for g in (first, second))
    maps = [bnb.create_dynamic_map(signed).to(start.device) for signed in (True, False)]
    states = [torch.zeros(300, dtype=torch.uint8, device=start.device) for _ in range(2)]
    scales = [torch.zeros(2, device=start.device) for _ in range(2)]
    got = start.clone()
    exact = start.double().requires_grad_()
    settings: dict[str, Any] = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3, "weight_decay": 0.1}
    reference = torch.optim.AdamW([exact], **settings)
    worst_share = 0.0
    for step, (grad, allowed) in enumerate(((first, 1e-5), (second, 0.03 * settings["lr"])), 1):
        exact.grad = grad.double()
        reference.step()
        adam8bit_(got, grad, *states, *scales, *maps, step=step, implementation=implementation, **settings)
        worst_share = max(worst_share, float((got.double() - exact.detach()).abs().max()) / allowed)
    return worst_share


def _nf4(random: Random, dtype: torch.dtype) -> float:
    """0 when codes, scales and dequantised values have bitsandbytes' bits, else infinite."""
    weight = random(96, 320)
    for double in (True, False):
        packed, state = bnb.quantize_4bit(weight, blocksize=64, quant_type="nf4", compress_statistics=double)
        ours = quantize_nf4(weight, double)
        theirs = bnb.dequantize_4bit(packed, state).to(dtype)
        if not torch.equal(ours.packed.flatten(), packed.flatten()) or not torch.equal(
            dequantize_nf4(ours, dtype), theirs
        ):
            return float("inf")
    return 0.0
