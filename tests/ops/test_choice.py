"""Which implementation runs where: each GPU generation, each refusal with its reason, names that cannot be had."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.device import Device, describe
from frugal.errors import UnsupportedError
from frugal.ops import attention, attention_reference, choose
from frugal.ops import rows as rules
from frugal.ops.attention.sdpa import grouped_as_batch, takes_flash
from frugal.ops.registry import ROWS, check_attention, choices
from frugal.ops.rows import no_triton

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
T4 = Device("cuda", capability=(7, 5), name="Tesla T4")
GPUS = [Device("cuda", capability=c) for c in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]
CPU = Device("cpu")


@pytest.fixture(autouse=True)
def _no_flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "flash_attn_missing", lambda: "flash-attn is not installed")


def test_cpu_never_chooses_triton() -> None:
    for op in ROWS:
        for dtype in (F32, F16, BF16):
            choice = choose(op, CPU, dtype)
            assert choice.value not in ("triton", "flash_attn"), choice
    assert choose("attention", CPU).value == "cpu_flash"


def test_t4_has_sdpa_and_cublas_never_triton_attention() -> None:
    by_op = {choice.key: choice for choice in choices(T4, F16, head_size=128)}
    assert by_op["matrix products"].value == "cuBLAS"
    assert "no tensor-core path" in by_op["matrix products"].reason
    assert by_op["attention"].value == "sdpa"
    assert "no tensor-core path in Triton" in by_op["attention"].rejected["triton"]
    assert "compute capability 8.0" in by_op["attention"].rejected["flash_attn"]
    assert choose("attention", T4, F16, window=512).value == "blockwise"
    assert choose("attention", T4, F16, softcap=50.0).value == "blockwise"
    assert no_triton(T4, F16) is None, "element-wise kernels run on a T4"
    assert "only emulated" in str(no_triton(T4, BF16))
    # Heads of 80 fp16 numbers are 160 bytes, a multiple of 16; of 20 they are not, and all scores would be built
    assert choose("attention", T4, F16, head_size=80).value == "sdpa"
    assert choose("attention", T4, F16, head_size=20).value == "blockwise"


@pytest.mark.parametrize("target", GPUS, ids=lambda t: t.label)
def test_newer_gpus_have_the_packed_kernel(target: Device) -> None:
    for facts in ({}, {"window": 4096}, {"softcap": 50.0}, {"head_size": 80}, {"head_size": 256}, {"documents": 7}):
        choice = choose("attention", target, BF16, **facts)
        assert choice.value == "triton", choice
        assert "not installed" in choice.rejected["flash_attn"]
    one = choose("attention", target, BF16, documents=1, head_size=128)
    assert one.value == "sdpa"
    assert "one document" in one.rejected["triton"]
    assert choose("attention", target, BF16, documents=1, window=16).value == "triton"
    assert choose("attention", target, BF16, head_size=288).value == "sdpa"
    assert choose("attention", target, F32, head_size=256).value == "sdpa"
    assert choose("attention", target, torch.float64).value == "sdpa"


def test_flash_attn_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "flash_attn_missing", lambda: None)
    assert choose("attention", GPUS[0], BF16, head_size=128, softcap=30.0).value == "flash_attn"
    assert choose("attention", GPUS[0], BF16, head_size=100).value == "triton"
    assert choose("attention", GPUS[0], F32, head_size=128).value == "triton"
    assert choose("attention", T4, F16).value == "sdpa"
    assert choose("attention", CPU).value == "cpu_flash"


@pytest.mark.parametrize(
    ("target", "named", "dtype", "message"),
    [
        (CPU, "triton", F32, "triton was asked for but cannot run here: device cpu: only cuda"),
        (T4, "triton", F16, "no tensor-core path"),
        (T4, "flash_attn", F16, "compute capability 8.0"),
        (GPUS[0], "flash_attn", BF16, "not installed"),
        (Device("cuda", capability=(7, 0)), "triton", F16, "Triton compiles for sm_75"),
        (Device("cuda", amd=True), "triton", F16, "not supported on ROCm"),
        (CPU, "flash", F32, "no implementation 'flash'"),
    ],
)
def test_a_name_that_cannot_run_is_an_error(target: Device, named: str, dtype: torch.dtype, message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        check_attention(target, dtype, named)
    with pytest.raises(UnsupportedError, match=message):
        choices(target, dtype, attention=named)


def test_a_name_is_not_replaced_by_what_is_preferred() -> None:
    assert choose("attention", GPUS[0], BF16, named="triton", documents=1).value == "triton"
    assert choose("attention", CPU, named="sdpa").value == "sdpa"
    with pytest.raises(UnsupportedError, match=r"no soft cap\. Here cpu_flash|no soft cap\. Here blockwise"):
        choose("attention", CPU, named="sdpa", softcap=50.0)
    check_attention(CPU, F32, "auto")


def test_amd_and_slices() -> None:
    amd = Device("cuda", amd=True, name="AMD Radeon RX 7900 XTX")
    assert amd.label == "rocm"
    assert choose("attention", amd, BF16).value == "sdpa"
    assert "never ran" in str(no_triton(amd, BF16)) or "no AMD GPU ever ran" in str(no_triton(amd, BF16))
    assert Device("cuda", capability=(8, 0), name="NVIDIA A100-SXM4-40GB MIG 1g.5gb").mig
    assert not Device("cuda", capability=(8, 0), name="NVIDIA A100-SXM4-40GB").mig


def test_a_device_that_is_not_here() -> None:
    if not torch.cuda.is_available():
        assert describe("cuda").capability is None
        assert "no CUDA device here" in str(no_triton(describe("cuda"), BF16))
    assert describe("cpu").kind == "cpu"


def test_every_choice_says_why_and_why_not() -> None:
    for target in (CPU, T4, *GPUS):
        for choice in choices(target, F16):
            assert choice.reason
            assert all(choice.rejected.values())
            assert {"chosen", "why"} <= set(choice.to_json())


def test_dora_goes_to_peft() -> None:
    by_op = {choice.key: choice for choice in choices(CPU, F32, use_dora=True)}
    assert by_op["lora_linear"].value == "peft"
    assert "DoRA" in by_op["lora_linear"].reason


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_grouped_queries_as_a_batch(batch: int, kv_heads: int) -> None:
    """What the memory-efficient backend is given: the same numbers, and only views for a packed batch."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(batch, 9, h, 8, generator=generator, dtype=torch.float64).transpose(1, 2).requires_grad_()
              for h in (4, kv_heads, kv_heads)]  # fmt: skip
    grouped = grouped_as_batch(*leaves)
    assert all(t.shape == (batch * kv_heads, 4 // kv_heads, 9, 8) for t in grouped)
    if batch == 1:
        assert [t.data_ptr() for t in grouped] == [t.data_ptr() for t in leaves]
    got = F.scaled_dot_product_attention(*grouped, is_causal=True).reshape(batch, 4, 9, 8)
    want = attention_reference(*leaves)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(want.shape, generator=generator, dtype=torch.float64)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_backend_of_sdpa() -> None:
    assert takes_flash(GPUS[0], BF16, 128)
    assert not takes_flash(GPUS[0], F32, 128)
    assert not takes_flash(GPUS[0], BF16, 264)
    assert not takes_flash(T4, F16, 128)


def stand_in(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: tuple[int, int] = (-1, -1), softcap: float = 0.0, deterministic: bool = False,
) -> Tensor:  # fmt: skip
    """flash-attn's signature and conventions ([tokens, heads, size], a window without the token itself, cap 0)."""
    lengths = cu_seqlens_q.diff()
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    assert (max_seqlen_q, max_seqlen_k) == (int(lengths.max()), int(lengths.max()))
    assert deterministic
    left, right = window_size
    assert right == (0 if causal and left >= 0 else -1)
    settings: dict[str, Any] = {"scale": softmax_scale, "softcap": softcap or None, "causal": causal}
    settings["window"] = None if left < 0 else left + 1
    inputs = [t.transpose(0, 1)[None] for t in (q, k, v)]
    return attention_reference(*inputs, cu_seqlens=cu_seqlens_q, **settings)[0].transpose(0, 1)


@pytest.mark.parametrize("facts", [{}, {"window": 5}, {"softcap": 2.0}, {"causal": False}])
def test_what_flash_attn_is_called_with(facts: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("frugal.ops.attention.flash_attn"), "load", lambda: (stand_in, ""))
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 11, 8, generator=generator, dtype=torch.float64) for h in (4, 2, 2))
    offsets = (0, 4, 11, 12, 22)
    got = attention(q, k, v, cu_seqlens=offsets, implementation="flash_attn", **facts)
    torch.testing.assert_close(got, attention_reference(q, k, v, cu_seqlens=offsets, **facts), rtol=1e-12, atol=1e-12)
