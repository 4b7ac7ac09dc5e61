"""The live-bytes meter against tensors whose bytes are known, and against torch's own allocator record."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from frugal.memory import meter as meter_module
from frugal.memory import meter_report as kinds
from frugal.memory.meter import LiveBytesMeter

KB = 1024


def test_peak_counts_live_tensors_only() -> None:
    with LiveBytesMeter() as meter:
        a = torch.empty(256)  # 1 KB
        b = torch.empty(512)  # 2 KB: 3 KB live
        del a
        c = torch.empty(256)  # 3 KB live again
        del b, c
        torch.empty(128)
    assert meter.peak_bytes == 3 * KB
    assert meter.report().end_bytes == 0


def test_views_and_in_place_operations_count_once() -> None:
    with LiveBytesMeter() as meter:
        a = torch.zeros(256)
        b = a.view(16, 16).t()[2:5]
        a.add_(1)
        del a
        c = torch.empty(256)  # the view still holds a's storage
    assert meter.peak_bytes == 2 * KB
    assert meter.report().end_bytes == 2 * KB
    del b, c


def test_storage_that_existed_before_counts_in_its_category() -> None:
    weight, batch = torch.empty(1024), torch.ones(256)
    meter = LiveBytesMeter()
    meter.register(kinds.WEIGHTS, [weight, weight.view(32, 32)])
    with meter:
        batch.view(16, 16)  # nobody registered it: found by its view
        out = weight[:256] * batch
    report = meter.report()
    assert report.by_category == {kinds.WEIGHTS: 4 * KB, kinds.TEMPORARIES: KB, kinds.INPUTS: KB}
    assert report.peak_bytes == 6 * KB
    del out


def test_categories_of_a_training_step() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW([model[2].weight], foreach=False)
    x = torch.randn(256, 64)
    with LiveBytesMeter(model, optimizer) as meter:
        model(x).square().sum().backward()
        optimizer.step()
    report = meter.report()
    weight, rows = 64 * 64 * 4, 256 * 64 * 4
    # Peak in backward: tanh's output (saved for the weight's gradient), the last output saved by square, and in
    # square's backward two more of that size.
    assert report.by_category[kinds.WEIGHTS] == weight
    assert report.by_category[kinds.ADAPTERS] == weight
    assert report.by_category[kinds.SAVED] == 2 * rows + 8  # and the loss and its gradient
    assert report.peak_bytes == sum(report.by_category.values())
    # after the step: two weights, gradient, exp_avg, exp_avg_sq and the step count
    assert report.end_bytes == 5 * weight + 4
    saved = {site.module for site in report.sites if site.category == kinds.SAVED}
    assert {"*"} <= saved  # the Tanh and the second Linear, by module number


def test_gradients_and_optimizer_state_at_a_peak_of_their_own() -> None:
    model = nn.Linear(512, 512, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    x = torch.randn(1, 512)
    with LiveBytesMeter(model, optimizer) as meter:
        model(x).sum().backward()
        optimizer.step()
    weight = 512 * 512 * 4
    categories = meter.report().by_category
    assert categories[kinds.GRADIENTS] == weight
    assert categories[kinds.OPTIMIZER] == weight


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        big = torch.cat([x] * 64)  # seen although it lives only here
        return grad * 2 * big[: len(x)]


def test_sees_inside_custom_functions_in_backward_and_names_the_module() -> None:
    class Squares(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Square.apply(x)

    model = nn.ModuleDict({"inner": Squares()})
    x = torch.randn(256, requires_grad=True)
    with LiveBytesMeter(model) as meter:
        model["inner"](x).sum().backward()
    report = meter.report()
    top = report.sites[0]
    assert (top.bytes, top.module, top.op) == (64 * KB, "inner", "_SquareBackward > aten.cat")
    assert report.peak_bytes >= 65 * KB


def test_sees_the_recompute_of_a_checkpoint() -> None:
    layer = nn.Sequential(nn.Linear(64, 4096, bias=False), nn.Tanh(), nn.Linear(4096, 64, bias=False))
    model = nn.ModuleDict({"layer": layer})
    x = torch.randn(128, 64, requires_grad=True)
    with LiveBytesMeter(model) as meter:
        checkpoint(layer, x, use_reentrant=False).sum().backward()
    report = meter.report()
    assert any("layer" in site.module and site.op.startswith("recompute > ") for site in report.sites)


def test_sees_inside_python_custom_ops() -> None:
    @torch.library.custom_op("frugal_test_meter::inner", mutates_args=())
    def inner(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x] * 8)[: x.shape[0]].clone()

    x = torch.ones(256)
    with LiveBytesMeter() as meter:
        inner(x)
    assert meter.peak_bytes == 9 * KB


def test_sees_inside_bitsandbytes_ops() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(64, 64)
    packed, state = bnb.functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=True)
    meter = LiveBytesMeter()
    meter.register(kinds.WEIGHTS, [packed])
    with meter:
        out = bnb.functional.dequantize_4bit(packed, state)
    assert meter.peak_bytes >= 64 * 64 // 2 + 64 * 64 * 4
    del out


def test_a_step_on_fake_tensors() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        model = nn.Linear(1024, 1024, bias=False)
        with LiveBytesMeter(model, detail=True) as meter:
            model(torch.empty(1 << 20, 1024)).sum().backward()
    assert meter.report().by_category[kinds.ADAPTERS] == 4 << 20
    assert meter.peak_bytes > 8 << 30


def test_agrees_with_the_allocators_own_record() -> None:
    """torch's profiler writes down every allocation and release of the CPU allocator: the peaks must agree."""

    def step() -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.LayerNorm(1024), nn.Linear(1024, 256))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            out = checkpoint(model, torch.randn(512, 256, requires_grad=True), use_reentrant=False)
            nn.functional.cross_entropy(out, torch.zeros(512, dtype=torch.long)).backward()
            optimizer.step()
            optimizer.zero_grad()

    with LiveBytesMeter() as meter:
        step()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        step()
    live = peak = 0
    for event in record.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    assert peak > 1 << 20
    assert abs(meter.peak_bytes - peak) / peak < 0.01


def test_one_region_a_meter() -> None:
    meter = LiveBytesMeter()
    with meter:
        torch.empty(1)
    with pytest.raises(RuntimeError, match="one region"), meter:
        pass


def test_report_prints_and_serialises() -> None:
    with LiveBytesMeter() as meter:
        torch.ones(1024)
    report = meter.report()
    assert report.to_dict()["peak_bytes"] == 4096
    assert "temporaries" in report.table()


def test_private_torch() -> None:
    """What the meter takes from `torch._C` means what it is used for."""
    x = torch.ones(3, requires_grad=True)
    number = meter_module.next_sequence_number()
    y = x.exp()
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == number
    assert meter_module.next_sequence_number() == number + 1
    assert not meter_module.in_backward_pass()
    assert meter_module.current_autograd_node() is None
    seen: list[tuple[bool, str]] = []

    def look(grad: torch.Tensor) -> None:
        node = meter_module.current_autograd_node()
        seen.append((meter_module.in_backward_pass(), node.name()))

    x.register_hook(look)
    y.sum().backward()
    assert seen
    assert seen[0][0]
    exp, matmul = torch.ops.aten.exp.default, torch.ops.aten.matmul.default
    assert meter_module.has_kernel(exp, "CPU")
    assert meter_module.has_kernel(matmul, "CompositeImplicitAutograd")
    assert not meter_module.has_kernel(matmul, "CPU")
    assert meter_module.kernel_keys(exp, "meta") is None
    keys = meter_module.kernel_keys(exp, "cpu")
    assert torch.equal(exp.redispatch(keys, torch.zeros(2)), torch.ones(2))
