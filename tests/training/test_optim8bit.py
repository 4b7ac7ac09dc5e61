"""8-bit AdamW in bitsandbytes' numbers, its state on disk (R05), and the optimizer inside backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path

import bitsandbytes as bnb
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from safetensors.torch import load_file, save_file
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from frugal.errors import CheckpointError, ConfigError
from frugal.memory.meter import LiveBytesMeter
from frugal.training.optim8bit import AdamW8bit
from frugal.training.step import OptimizerInBackward

SHAPES = [(16, 576), (1536, 16), (5000,), (64,), (33, 127)]  # with a short last block, and small ones


def parameters(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(100 + step)
        for p in params:
            scale = 10.0 ** torch.randint(-4, 2, p.shape, generator=generator)
            p.grad = (torch.randn(p.shape, generator=generator) * scale).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_bitsandbytes_own(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters(dtype)
    settings = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
    a, b = AdamW8bit(ours, **settings), bnb.optim.AdamW8bit(theirs, **settings)
    run(a, ours, 6)
    run(b, theirs, 6)
    for p, q in zip(ours, theirs, strict=True):
        assert torch.equal(p, q)
        for key, value in a.state[p].items():
            expected = b.state[q][key]
            assert value == expected if key == "step" else torch.equal(value, expected), key
    assert a.state[ours[3]]["state1"].dtype == torch.float32  # fewer than 4096 elements
    assert a.state[ours[0]]["state1"].dtype == torch.uint8


def test_update_is_the_published_formula() -> None:
    """An independent form of each step: decode the moments, Adam in fp32, code the moments again."""
    p = nn.Parameter(torch.randn(4096, generator=torch.Generator().manual_seed(1)))
    optimizer = AdamW8bit([p], lr=1e-2, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.05)
    m, v = torch.zeros(4096), torch.zeros(4096)
    for step in (1, 2, 3):
        p.grad = torch.randn(4096, generator=torch.Generator().manual_seed(step))
        m, v = 0.9 * m + 0.1 * p.grad, 0.99 * v + 0.01 * p.grad**2
        update = (m / (1 - 0.9**step)) / (v.sqrt() / math.sqrt(1 - 0.99**step) + 1e-8)
        expected = p.detach() * (1 - 1e-2 * 0.05) - 1e-2 * update
        optimizer.step()
        torch.testing.assert_close(p.detach(), expected, rtol=0, atol=2e-6)
        state = optimizer.state[p]
        m = assert_coded(m, state["state1"], state["absmax1"], signed=True)
        v = assert_coded(v, state["state2"], state["absmax2"], signed=False)


def assert_coded(x: torch.Tensor, codes: torch.Tensor, absmax: torch.Tensor, signed: bool) -> torch.Tensor:
    """What the bytes stand for, after a check against x: within half the widest step of the map (0.9 / 64 signed,
    0.9 / 128 unsigned) of the block's maximum. Below 1e-4 of it bitsandbytes' CPU code takes a near value, not always
    the nearest one."""
    table, blocks = create_dynamic_map(signed), x.view(-1, 256)
    torch.testing.assert_close(absmax, blocks.abs().amax(1), rtol=1e-6, atol=0)
    decoded = table[codes.long()].view(-1, 256) * absmax[:, None]
    error = ((decoded - blocks).abs() / absmax[:, None]).view(-1)
    assert float(error.max()) <= 1.01 * 0.9 / (128 if signed else 256)
    nearest = ((blocks / absmax[:, None])[..., None] - table).abs().argmin(-1).view(-1)
    assert float((nearest != codes.long()).float().mean()) < 0.06
    return decoded.view(-1)


def test_two_bytes_an_element() -> None:
    p = nn.Parameter(torch.zeros(1024, 1024))
    optimizer = AdamW8bit([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    tensors = [t for t in optimizer.state[p].values() if isinstance(t, torch.Tensor)]
    assert sum(t.nbytes for t in tensors) == 2 * 2**20 + 2 * 4 * 4096


def test_non_contiguous_parameter() -> None:
    base = torch.randn(80, 64)
    p, q = nn.Parameter(base.clone().t()), nn.Parameter(base.t().contiguous())
    assert not p.is_contiguous()
    for x in (p, q):
        optimizer = AdamW8bit([x], lr=1e-2)
        x.grad = torch.ones(64, 80).t().t()
        optimizer.step()
    assert torch.equal(p, q)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_state_survives_a_file_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    through, straight = parameters(dtype), parameters(dtype)
    first, whole = AdamW8bit(through, lr=1e-2), AdamW8bit(straight, lr=1e-2)
    run(first, through, 4)
    run(whole, straight, 8)
    saved = first.state_dict()
    tensors = {f"{i}.{k}": v for i, s in saved["state"].items() for k, v in s.items() if isinstance(v, torch.Tensor)}
    save_file(tensors, tmp_path / "optimizer.safetensors")
    restored = copy.deepcopy({"state": {}, "param_groups": saved["param_groups"]})
    for name, tensor in load_file(tmp_path / "optimizer.safetensors").items():
        index, key = name.split(".")
        restored["state"].setdefault(int(index), {"step": 4})[key] = tensor
    again = [nn.Parameter(p.detach().clone()) for p in through]
    second = AdamW8bit(again, lr=1.0)
    second.load_state_dict(restored)
    for p, q in zip(through, again, strict=True):
        for key, value in first.state[p].items():
            got = second.state[q][key]
            assert got == value if key == "step" else (got.dtype == value.dtype and torch.equal(got, value)), key
    run(second, again, 4, first=4)
    for p, q in zip(again, straight, strict=True):
        assert torch.equal(p, q)


def test_state_of_another_optimizer_or_number_of_parameters_is_refused() -> None:
    params = parameters()
    other = torch.optim.AdamW(params)
    run(other, params, 1)
    with pytest.raises(CheckpointError, match="another optimizer"):
        AdamW8bit(params).load_state_dict(other.state_dict())
    eight = AdamW8bit(params[:3])
    with pytest.raises(CheckpointError, match="number of parameters"):
        AdamW8bit(params).load_state_dict(eight.state_dict())


def test_a_step_on_fake_tensors() -> None:
    with FakeTensorMode():
        p = nn.Parameter(torch.empty(8192, 8192))
        optimizer = AdamW8bit([p])
        p.grad = torch.empty_like(p)
        optimizer.step()
        assert optimizer.state[p]["state1"].shape == (8192, 8192)
        assert optimizer.state[p]["state1"].dtype == torch.uint8


@pytest.mark.parametrize("make", [lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: AdamW8bit(p, lr=1e-2)])
def test_in_backward_equals_a_step_after_it(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
    torch.manual_seed(0)
    one = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    two = copy.deepcopy(one)
    batches = [torch.randn(8, 64) for _ in range(3)]
    after = make(list(one.parameters()))
    for x in batches:
        one(x).square().mean().backward()
        after.step()
        after.zero_grad()
    inside = make(list(two.parameters()))
    with OptimizerInBackward(inside, gradient_accumulation_steps=1, max_grad_norm=0.0) as attached:
        for x in batches:
            two(x).square().mean().backward()
            assert all(p.grad is None for p in two.parameters())
    assert attached.updates == 12
    assert len(inside.param_groups[0]["params"]) == 4
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert torch.equal(p, q)
    two(batches[0]).sum().backward()  # closed: an ordinary optimizer again
    assert all(p.grad is not None for p in two.parameters())


def test_in_backward_holds_one_gradient_at_a_time() -> None:
    model = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(8)])
    x, weight = torch.randn(1, 256), 256 * 256 * 4
    peaks = []
    for inside in (False, True):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, foreach=False)
        attached = OptimizerInBackward(optimizer, gradient_accumulation_steps=1, max_grad_norm=0) if inside else None
        with LiveBytesMeter(model) as meter:
            model(x).sum().backward()
        peaks.append(meter.peak_bytes)
        model.zero_grad()
        if attached is not None:
            attached.close()
    assert peaks[0] - peaks[1] > 5.9 * weight


def test_in_backward_refuses_what_needs_all_gradients() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    with pytest.raises(ConfigError) as caught:
        OptimizerInBackward(
            optimizer, gradient_accumulation_steps=4, max_grad_norm=1.0, loss_scaling=True, world_size=2
        )
    for part in ("gradient_accumulation_steps is 4", "max_grad_norm is 1.0", "loss scaling", "2 ranks"):
        assert part in str(caught.value)
