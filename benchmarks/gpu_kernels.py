"""Each Triton kernel at Llama-3.1-8B's shapes against torch and against the device's own roofline. Part of gpu.py.

The roofline is measured, not looked up: bytes a second of a large copy, and operations a second of a large product in
the compute dtype. ``share_of_roofline`` is what the kernel reaches of it, by the bytes that it must move (or, for
attention, by its products).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from bitsandbytes import functional as bnb
from torch import Tensor

from benchmarks.attention_cases import ATTENTION_CASES, FORMS, Form
from benchmarks.kernel_cases import CASES, HEAD_SIZE, HIDDEN, INTERMEDIATE, KV_HEADS, Q_HEADS, RANK, TOKENS
from frugal.device import describe
from frugal.ops.adam8bit import adam8bit_
from frugal.ops.rows import no_tensor_cores, no_triton

Timer = Callable[[Callable[[], Any]], float]
# Products of [tokens, tokens] x size for each head: forward has two, dq three, dk and dv four.
PRODUCTS = {"attention": 2, "attention_dq": 3, "attention_dkdv": 4}


def real(device: torch.device) -> Callable[..., Tensor]:
    """A maker of tensors with values on ``device``."""

    def make(*shape: int, dtype: torch.dtype) -> Tensor:
        if dtype == torch.uint8:
            return torch.randint(0, 256, shape, dtype=dtype, device=device)
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype, device=device)
        return torch.randn(shape, device=device, dtype=dtype)

    return make


def torch_forms(dtype: torch.dtype, device: torch.device) -> dict[str, Callable[[], Callable[[], Any]]]:
    """For some kernels what torch (or bitsandbytes) does for the same result; each builds its inputs when called."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, dtype=dtype)

    def rms_norm() -> Callable[[], Any]:
        x, w = random(TOKENS, HIDDEN), random(HIDDEN)
        return lambda: F.rms_norm(x, (HIDDEN,), w, 1e-5)

    def gated() -> Callable[[], Any]:
        gate, up = random(TOKENS, INTERMEDIATE), random(TOKENS, INTERMEDIATE)
        return lambda: F.silu(gate) * up

    def cross_entropy(vocab: int) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            logits = random(256, vocab).requires_grad_()
            labels = torch.zeros(256, dtype=torch.int64, device=device)
            return lambda: torch.autograd.grad(F.cross_entropy(logits.float(), labels, reduction="sum"), logits)

        return build

    def nf4() -> Callable[[], Any]:
        packed, state = bnb.quantize_4bit(random(INTERMEDIATE, HIDDEN), blocksize=64, quant_type="nf4",
                                          compress_statistics=True)  # fmt: skip
        return lambda: bnb.dequantize_4bit(packed, state)

    def rope() -> Callable[[], Any]:
        heads = [random(1, TOKENS, n, HEAD_SIZE).transpose(1, 2) for n in (Q_HEADS, KV_HEADS)]
        cos, sin = random(1, 1, TOKENS, HEAD_SIZE), random(1, 1, TOKENS, HEAD_SIZE)

        def turned(x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            return x * cos + torch.cat([-b, a], -1) * sin

        return lambda: [turned(x) for x in heads]

    def adam() -> Callable[[], Any]:
        count = INTERMEDIATE * RANK
        param, grad = random(count), random(count)
        states = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2)]
        scales = [torch.zeros(count // 256, device=device) for _ in range(2)]
        maps = [bnb.create_dynamic_map(signed).to(device) for signed in (True, False)]
        return lambda: adam8bit_(
            param, grad, *states, *scales, *maps, lr=1e-4, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, step=2,
            implementation="bitsandbytes",
        )  # fmt: skip

    def attention(form: Form, backward: bool) -> Callable[[], Callable[[], Any]]:
        def build() -> Callable[[], Any]:
            half = form.tokens // 2
            q, k, v = (random(1, half, h, form.size).transpose(1, 2).requires_grad_(backward)
                       for h in (form.heads, form.kv_heads, form.kv_heads))  # fmt: skip

            def forward() -> Tensor:
                return F.scaled_dot_product_attention(q, k, v, is_causal=form.causal, enable_gqa=True)

            if not backward:
                return lambda: [forward() for _ in range(2)]  # two documents
            out = forward()
            grad = torch.ones_like(out)
            return lambda: [torch.autograd.grad(out, (q, k, v), grad, retain_graph=True) for _ in range(2)]

        return build

    forms: dict[str, Callable[[], Callable[[], Any]]] = {
        "rms_norm": rms_norm,
        "gated_silu": gated,
        "cross_entropy_128256": cross_entropy(128256),
        "cross_entropy_once_128256": cross_entropy(128256),
        "rope": rope,
        "adam8bit": adam,
        "nf4_dequantize_double": nf4,
    }
    for name, form in FORMS.items():
        if form.window is None and form.softcap is None:
            forms[f"attention_{name}"] = attention(form, False)
            forms[f"attention_dkdv_{name}"] = attention(form, True)  # torch's is dq, dk and dv together
    return forms


def pairs(form: Form) -> int:
    """Query-key pairs that one head sees in two documents."""
    half = form.tokens // 2
    if not form.causal:
        return 2 * half * half
    window = min(form.window or half, half)
    return 2 * (window * (window + 1) // 2 + (half - window) * window)


def roofline(device: torch.device, dtype: torch.dtype, timer: Timer, size: int) -> dict[str, float]:
    """Measured bytes and operations a second. ``size`` bytes are copied; the product is square."""
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = timer(lambda: target.copy_(source))
    edge = 8192 if device.type == "cuda" else 64
    a, b = (torch.randn(edge, edge, device=device, dtype=dtype) for _ in range(2))
    product = timer(lambda: torch.mm(a, b))
    return {"bytes_per_second": 2 * size / copy, "operations_per_second": 2 * edge**3 / product}


def measure(
    device: torch.device, dtype: torch.dtype, timer: Timer, left: Callable[[], float],
    emit: Callable[[dict[str, Any]], None], *, dry: bool,
) -> None:  # fmt: skip
    """A row for each kernel; ``dry`` plans launches of real size on the meta device and runs none."""
    top = roofline(device, dtype, timer, 2**20 if dry else 2**30)
    emit({"phase": "roofline", "dtype": str(dtype).removeprefix("torch."), **top})
    target = describe(device)
    refused = None if dry else no_triton(target, dtype)
    if refused is not None:
        emit({"phase": "kernel", "skipped": refused})
        return
    known = {} if dry else torch_forms(dtype, device)
    make = real(torch.device("meta") if dry else device)
    for name, build in {**CASES, **ATTENTION_CASES}.items():
        kernel = next((k for k in sorted(PRODUCTS, key=len, reverse=True) if name.startswith(k + "_d")), None)
        if kernel is not None and no_tensor_cores(target) is not None:
            emit({"phase": "kernel", "kernel": name, "skipped": no_tensor_cores(target)})
            continue
        if left() < 5:
            emit({"phase": "kernel", "kernel": name, "skipped": "no time left"})
            continue
        try:
            emit(_row(name, kernel, build, dtype, make, timer, top, known, dry))
        except (torch.OutOfMemoryError, RuntimeError) as error:
            emit({"phase": "kernel", "kernel": name, "failed": str(error).splitlines()[0][:200]})
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _row(
    name: str, kernel: str | None, build: Callable[..., Any], dtype: torch.dtype, make: Callable[..., Tensor],
    timer: Timer, top: dict[str, float], known: dict[str, Callable[[], Callable[[], Any]]], dry: bool,
) -> dict[str, Any]:  # fmt: skip
    case = build(dtype, make, None)
    row: dict[str, Any] = {"phase": "kernel", "kernel": name, "bytes": case.ideal_bytes}
    ideal = case.ideal_bytes / top["bytes_per_second"]
    if kernel is not None:
        form = FORMS[name.removeprefix(f"{kernel}_")]
        row["operations"] = 2 * PRODUCTS[kernel] * pairs(form) * form.heads * form.size
        ideal = max(ideal, row["operations"] / top["operations_per_second"])
    if dry:
        return {**row, "programs": math.prod(case.launch.grid)}
    seconds = row["seconds"] = timer(case.launch.run)
    row["share_of_roofline"] = ideal / seconds
    del case
    if name in known:
        row["torch_seconds"] = timer(known[name]())
        row["torch_over_ours"] = row["torch_seconds"] / seconds
    return row
