"""torch's attention kernels a few heads at a time: the same bits, less workspace; what CUDA's are called with."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from frugal.device import Device
from frugal.memory.meter import LiveBytesMeter
from frugal.ops import attention, attention_reference, choose, registry
from frugal.ops.attention.sdpa import (
    CPU,
    EFFICIENT,
    FLASH,
    WORKSPACE_BYTES,
    Kernel,
    _Sdpa,
    head_ranges,
    kernel_for,
    key_heads_at_once,
    sdpa,
)
from frugal.ops.simulated import simulating

WHOLE = [(0, 2, 0, 40)]
DOCUMENTS = [(0, 1, 0, 13), (0, 1, 13, 40), (1, 2, 0, 40)]


def qkv(dtype: torch.dtype = torch.float32, *, batch: int = 2, heads: int = 6, kv: int = 3, tokens: int = 40,
        size: int = 16, device: str = "cpu") -> list[Tensor]:  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, tokens, h, size) for h in (heads, kv, kv)]
    made = [torch.randn(s, generator=generator).to(dtype).transpose(1, 2) for s in shapes]
    return [t.to(device).requires_grad_() for t in made]


def with_gradients(leaves: list[Tensor], pieces: list[tuple[int, int, int, int]], kernel: Kernel) -> list[Tensor]:
    out = _Sdpa.apply(*leaves, pieces, kernel, 0.25, True)
    upstream = torch.linspace(-1, 1, out.numel(), dtype=torch.float32).view(out.shape).to(out)
    return [out, *torch.autograd.grad(out, leaves, upstream)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pieces", [WHOLE, DOCUMENTS])
def test_few_heads_at_a_time_give_the_same_bits(
    dtype: torch.dtype, pieces: list[tuple[int, int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    together = with_gradients(qkv(dtype), pieces, CPU)
    monkeypatch.setattr(sys.modules["frugal.ops.attention.sdpa"], "WORKSPACE_BYTES", 1)
    calls: list[int] = []

    def counted(d_out: Tensor, q: Tensor, k: Tensor, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
        calls.append(k.shape[1])
        return CPU.backward(d_out, q, k, *rest)

    apart = with_gradients(qkv(dtype), pieces, Kernel(CPU.forward, counted))
    assert calls == [1] * (3 * len(pieces))
    for one, other in zip(together, apart, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("pieces", [WHOLE, DOCUMENTS])
def test_values_are_the_definition(pieces: list[tuple[int, int, int, int]]) -> None:
    leaves = qkv(torch.float64)
    offsets = [0, 40, 80] if pieces is WHOLE else [0, 13, 40, 80]
    got = sdpa(*leaves, pieces, 0.25, True)
    want = attention_reference(*leaves, cu_seqlens=offsets, scale=0.25)
    upstream = torch.randn(want.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kernel", [FLASH, EFFICIENT])
@pytest.mark.parametrize("pieces", [WHOLE, DOCUMENTS])
def test_what_the_kernels_of_a_gpu_are_called_with(
    kernel: Kernel, pieces: list[tuple[int, int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own rules of shapes for its CUDA kernels, which hold for tensors without memory as well."""
    monkeypatch.setattr(sys.modules["frugal.ops.attention.sdpa"], "WORKSPACE_BYTES", 1)
    leaves = qkv(torch.float16, device="meta")
    out, *grads = with_gradients(leaves, pieces, kernel)
    assert out.shape == leaves[0].shape
    assert [(g.shape, g.dtype) for g in grads] == [(t.shape, t.dtype) for t in leaves]
    assert all(g.transpose(1, 2).is_contiguous() for g in grads)  # as the projections' backward reads them


def test_which_kernel_serves_which_device() -> None:
    hopper, turing = Device("cuda", capability=(9, 0)), Device("cuda", capability=(7, 5))
    assert kernel_for(hopper, torch.bfloat16, 128) is FLASH
    assert kernel_for(hopper, torch.float32, 128) is EFFICIENT
    assert kernel_for(turing, torch.float16, 64) is EFFICIENT
    assert kernel_for(Device("cpu"), torch.float32, 64) is CPU
    assert kernel_for(Device("mps"), torch.float32, 64) is None


def test_calls_cover_all_heads_within_the_workspace() -> None:
    for tokens in (1, 300, 4096, 20_000, 500_000):
        at_once = key_heads_at_once(1, tokens, 4, 128, 2, 8)
        ranges = head_ranges(8, at_once)
        assert (ranges[0][0], ranges[-1][1]) == (0, 8)
        assert all(a[1] == b[0] for a, b in pairwise(ranges))
        assert at_once == 1 or at_once * tokens * 4 * 128 * 12 <= WORKSPACE_BYTES
    assert key_heads_at_once(1, 300, 4, 128, 2, 8) == 8
    assert key_heads_at_once(1, 500_000, 4, 128, 2, 8) == 1


def test_backward_of_several_documents_holds_one_set_of_gradients() -> None:
    leaves = qkv(batch=1, tokens=512, size=32)
    pieces = [(0, 1, lo, lo + 64) for lo in range(0, 512, 64)]
    out = _Sdpa.apply(*leaves, pieces, CPU, 0.25, True)
    upstream = torch.ones_like(out)
    with LiveBytesMeter() as meter:
        torch.autograd.grad(out, leaves, upstream)
    gradients = sum(t.numel() * 4 for t in leaves)
    assert gradients <= meter.peak_bytes - meter.report().start_bytes < 1.5 * gradients


def backward_bytes(asked: str, documents: int = 1) -> int:
    """Live bytes at the highest moment of attention's backward in a plan for a GPU, besides what was kept."""
    tokens = 32_768
    q, k, v = qkv(torch.bfloat16, batch=1, heads=32, kv=8, tokens=tokens, size=128, device="meta")
    offsets = list(range(0, tokens + 1, tokens // documents))
    with simulating(Device("cuda", capability=(8, 6)), attention=asked):
        out = attention(q, k, v, cu_seqlens=offsets)
        with LiveBytesMeter(detail=True, device="meta") as meter:
            torch.autograd.grad(out, (q, k, v), torch.empty_like(out))
    return (meter.peak_bytes - meter.report().start_bytes) // tokens


def test_what_a_plan_counts_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes a token. Llama 3.1 8B's heads: q is 8,192 bytes a token, k and v 2,048 each."""
    gradients = 8192 + 8192 + 2 * 2048  # that of the output, made here, and three results
    each_head = 32 * 4  # sum(out * d_out)
    one_key_head = 4 * 128 * (2 + 2 * 2 + 4 + 2 * 2) + 2 * 256
    assert backward_bytes("auto") == gradients + max(one_key_head, each_head)
    assert backward_bytes("auto", documents=8) == backward_bytes("triton") == max(gradients, 8192 + each_head)
    assert backward_bytes("flash_attn") == gradients + 4 * 4096 + 2 * 8192
    monkeypatch.setattr(registry, "_RESOLVED", {})
    monkeypatch.setattr("frugal.ops.rows.flash_attn_missing", lambda: None)
    assert backward_bytes("auto") == gradients + one_key_head  # one document: torch's own
    assert backward_bytes("auto", documents=8) == gradients + 4 * 4096 + 2 * 8192


def test_flash_attn_is_left_out_for_one_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frugal.ops.rows.flash_attn_missing", lambda: None)
    ampere = Device("cuda", capability=(8, 6))
    for documents, facts, name in [(1, {}, "sdpa"), (2, {}, "flash_attn"), (1, {"window": 9}, "flash_attn")]:
        chosen = choose("attention", ampere, torch.bfloat16, head_size=128, documents=documents, **facts)
        assert chosen.value == name
    assert choose("attention", ampere, torch.bfloat16, head_size=128, named="flash_attn").value == "flash_attn"


def test_under_autocast_it_computes_in_its_dtype() -> None:
    leaves = qkv()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = sdpa(*leaves, WHOLE, 0.25, True)
    assert out.dtype is torch.bfloat16
    grads = torch.autograd.grad(out.sum(), leaves)
    assert all(g.dtype is torch.float32 for g in grads)
