"""Activation checkpointing: equal results, exact storage, what is kept."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from frugal.errors import MemoryBudgetError, UnsupportedError
from frugal.memory import apply_activation_checkpointing
from frugal.memory import meter_report as kinds
from frugal.memory.checkpointing import LayerCheckpoint
from frugal.memory.meter import LiveBytesMeter
from frugal.memory.offload import SLAB_BYTES, DiskStore, HostSlot, HostStore
from frugal.memory.scratch import ScratchFile
from frugal.memory.space import OutOfHostMemory
from frugal.ops import recompute
from frugal.planning.host import Sizes, host_bytes
from tests.conftest import make_llama
from tests.support.lora import assert_same, batch, gradients, lora_model


def test_equals_transformers_own_checkpointing() -> None:
    model = lora_model(dropout=0.1)
    inputs = batch()
    stock = copy.deepcopy(model)
    stock.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    expected = gradients(stock, inputs, use_cache=False)
    apply_activation_checkpointing(model, "recompute")
    assert_same(gradients(model, inputs, use_cache=False), expected)


def test_accumulation_over_batches_of_other_lengths(tmp_path: Path) -> None:
    model = lora_model()
    lengths = (12, 5, 9)
    sums: dict[str, torch.Tensor] = {}
    for length in lengths:
        for name, grad in gradients(model, batch(length)).items():
            sums[name] = sums.get(name, 0) + grad
    for policy in ("offload", "disk"):
        handle = apply_activation_checkpointing(model, policy, scratch_dir=tmp_path)
        model.zero_grad()
        losses = [model(**batch(length)).loss for length in lengths]  # three graphs at once
        for loss in losses:
            loss.backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                torch.testing.assert_close(parameter.grad, sums[name], rtol=1e-5, atol=1e-7)
        handle.close()


def test_evaluation_and_generation_are_untouched() -> None:
    model = lora_model()
    inputs = {"input_ids": batch()["input_ids"][:1]}
    model.eval()
    plain = model.generate(**inputs, max_new_tokens=5, do_sample=False)
    handle = apply_activation_checkpointing(model, "recompute")
    assert torch.equal(model.generate(**inputs, max_new_tokens=5, do_sample=False), plain)
    with torch.no_grad():
        assert model(**inputs, use_cache=True).past_key_values is not None
    handle.close()


def test_only_layer_inputs_are_kept() -> None:
    inputs = batch(64)
    peaks: dict[str, int] = {}
    saved: dict[str, int] = {}
    for policy in ("none", "recompute"):
        model = lora_model(num_hidden_layers=8)
        apply_activation_checkpointing(model, policy)
        gradients(model, inputs)
        with LiveBytesMeter(model) as meter:
            gradients(model, inputs)
        report = meter.report()
        peaks[policy], saved[policy] = report.peak_bytes, report.by_category[kinds.SAVED]
    hidden = 2 * 64 * 64 * 4
    logits = 2 * 64 * 300 * 4
    assert peaks["recompute"] < 0.5 * peaks["none"]
    assert saved["recompute"] < 8 * hidden + 4 * logits  # layer inputs, and what the loss keeps


def test_disk_keeps_no_layer_input_but_the_last(tmp_path: Path) -> None:
    hidden, layers = 2 * 64 * 64 * 4, 8
    held = {}
    for policy in ("recompute", "disk"):
        model = lora_model(num_hidden_layers=layers)
        handle = apply_activation_checkpointing(model, policy, scratch_dir=tmp_path)
        inputs = batch(64)
        gc.collect()
        meter = LiveBytesMeter(model)
        with meter:
            loss = model(**inputs).loss
        held[policy] = meter.report().end_bytes
        del loss
        if policy == "disk":
            assert isinstance(handle.store, DiskStore)
            assert handle.store.file.peak_bytes == (layers - 1) * hidden
            assert handle.store.file.take(1) == 0  # the dropped graph gave its space back
    assert held["recompute"] - held["disk"] == (layers - 1) * hidden
    assert list(tmp_path.iterdir()) == []  # no name is left, not even while it is open


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_stores_give_back_the_same_bits(dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randint(-(2**31), 2**31 - 1, (3, 5, 128), dtype=torch.int32).view(dtype)  # with NaNs and infinities
    for store in (HostStore(), HostStore(slab_bytes=4096), DiskStore(tmp_path)):
        for tensor in (values, values.transpose(0, 1), values[:, 1:3]):
            one, two = store.put(tensor), store.put(tensor.flip(0))
            back = one.get()
            assert back.dtype == dtype
            assert torch.equal(back.view(torch.uint8), tensor.contiguous().view(torch.uint8))
            assert torch.equal(two.get().view(torch.uint8), tensor.flip(0).contiguous().view(torch.uint8))
        store.close()


def test_host_memory_is_taken_in_slabs_and_used_again() -> None:
    """What is stored and less than a slab more, no power of two of each input; the next step takes nothing."""
    store, inputs = HostStore(slab_bytes=1 << 16), [torch.randn(5, 1000 + i) for i in range(40)]
    for _ in range(3):
        slots = [store.put(tensor) for tensor in inputs]
        assert all(isinstance(slot, HostSlot) for slot in slots)
        stored = sum(-(-t.nbytes // 4096) * 4096 for t in inputs)  # in whole pages
        assert stored <= store.host_bytes < stored + (1 << 16)
        for slot, tensor in reversed(list(zip(slots, inputs, strict=True))):
            assert torch.equal(slot.get(), tensor)
            slot.release()
        del slot, slots
    assert SLAB_BYTES.bit_count() == 1  # what torch's allocator of pinned memory does not round up
    shorter = [store.put(tensor[:, :10]) for tensor in inputs]
    assert store.host_bytes < stored + (1 << 16)
    del shorter
    store.close()
    assert store.host_bytes == 0


def test_no_slab_beyond_what_the_host_has(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HostStore(slab_bytes=1 << 12)
    kept = store.put(torch.arange(1000))
    monkeypatch.setattr("frugal.memory.space.HOST_RESERVE_BYTES", 1 << 60)
    with pytest.raises(OutOfHostMemory):
        store.put(torch.arange(10_000))
    assert torch.equal(kept.get(), torch.arange(1000))


def test_scratch_space_is_given_out_like_a_stack(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    a, b, c = file.take(100), file.take(5000), file.take(100)
    assert (a, b, c) == (0, 4096, 12288)
    file.give_back(b, 5000)
    assert file.take(8000) == b  # the same size again
    file.give_back(c, 100)
    file.give_back(b, 8000)
    file.give_back(a, 100)
    assert file.take(1) == 0
    assert file.peak_bytes == 16384


def test_no_room_on_the_disk_is_said_before_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(tmp_path)
    with pytest.raises(MemoryBudgetError, match="scratch file"):
        file.take(1 << 60)
    (tmp_path / "a-file").write_text("")
    with pytest.raises(MemoryBudgetError, match="cannot write"):
        ScratchFile(tmp_path / "a-file")


def test_a_second_backward_is_refused_where_the_input_is_gone(tmp_path: Path) -> None:
    model = lora_model()
    apply_activation_checkpointing(model, "disk", scratch_dir=tmp_path)
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="read back once"):
        loss.backward()


def test_recompute_allows_a_second_backward() -> None:
    model = lora_model()
    expected = gradients(model, batch())
    apply_activation_checkpointing(model, "recompute")
    model.zero_grad()
    loss = model(**batch()).loss
    loss.backward(retain_graph=True)
    loss.backward()
    for name, p in model.named_parameters():
        if p.requires_grad:
            torch.testing.assert_close(p.grad, 2 * expected[name])


def test_layers_before_the_first_adapter_keep_nothing() -> None:
    base = make_llama(num_hidden_layers=4)
    config = LoraConfig(r=4, target_modules=["q_proj"], layers_to_transform=[2])
    model = get_peft_model(base, config).train()
    nn.init.normal_(next(p for n, p in model.named_parameters() if "lora_B" in n))
    expected = gradients(model, batch())
    apply_activation_checkpointing(model, "recompute")
    assert_same(gradients(model, batch()), expected)


def test_models_and_parameters_it_cannot_serve_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="Linear has none"):
        apply_activation_checkpointing(nn.Linear(2, 2), "recompute")
    apply_activation_checkpointing(nn.Linear(2, 2), "none")
    model = lora_model()
    next(p for p in model.parameters() if p.requires_grad).register_hook(lambda grad: grad * 2)
    with pytest.raises(UnsupportedError, match="gradient hook"):
        apply_activation_checkpointing(model, "recompute")


# ---- leaving out what nobody reads -----------------------------------------------------------------------------------


class _Counted(torch.autograd.Function):
    """A linear map that takes part: counts its products and returns garbage when told that nobody reads it."""

    products = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, skip: bool) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        if skip:
            return torch.full((*x.shape[:-1], weight.shape[0]), float("nan"))
        _Counted.products += 1
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.flatten(0, -2).t() @ x.flatten(0, -2), None


class CountedLinear(nn.Module):
    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ticket = recompute.ticket()
        y: torch.Tensor = _Counted.apply(x, self.weight, ticket is not None and ticket.skip)  # type: ignore[no-untyped-call]
        if ticket is not None:
            ticket.done(y)
        return y


def counted_model() -> tuple[LlamaForCausalLM, int]:
    model = make_llama(num_hidden_layers=3).train()
    swapped = 0
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and "lm_head" not in name:
            model.set_submodule(name, CountedLinear(module))
            swapped += 1
    return model, swapped


def test_the_last_product_of_a_layer_is_not_recomputed() -> None:
    model, swapped = counted_model()
    expected = gradients(model, batch())
    apply_activation_checkpointing(model, "recompute")
    counts = []
    for _ in range(3):
        _Counted.products = 0
        assert_same(gradients(model, batch()), expected)
        counts.append(_Counted.products)
    # The first step computes all twice; then each of the three layers leaves out its down projection.
    assert counts == [2 * swapped, 2 * swapped - 3, 2 * swapped - 3]


class Doubled(nn.Module):
    """An MLP whose output is squared: now somebody reads it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * y


def test_an_output_that_is_read_is_recomputed() -> None:
    model, swapped = counted_model()
    for layer in model.model.layers:
        layer.mlp = Doubled(layer.mlp)
    expected = gradients(model, batch())
    apply_activation_checkpointing(model, "recompute")
    for _ in range(2):
        _Counted.products = 0
        assert_same(gradients(model, batch()), expected)
        assert _Counted.products == 2 * swapped


def test_a_layer_that_changes_later_is_recomputed_in_full() -> None:
    model, _ = counted_model()
    apply_activation_checkpointing(model, "recompute")
    gradients(model, batch())
    for layer in model.model.layers:
        layer.mlp = Doubled(layer.mlp)
    got = gradients(model, batch())
    run: LayerCheckpoint = vars(model.model.layers[0])["_gradient_checkpointing_func"]
    assert run.full_recomputes == 1
    fresh, _ = counted_model()
    for layer in fresh.model.layers:
        layer.mlp = Doubled(layer.mlp)
    assert_same(got, gradients(fresh, batch()))


def test_a_plan_counts_the_slabs_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("frugal.planning.host.SLAB_BYTES", 1 << 16)
    for tokens in (1, 37, 500):
        store = HostStore(slab_bytes=1 << 16)
        kept = [store.put(torch.zeros(tokens, 24)) for _ in range(9)]
        sizes = Sizes(kind="cuda", layers=10, hidden_size=24, itemsize=4, tokens=tokens, policy="offload",
                      trained_bytes=0, checkpoint_bytes=0, kept_checkpoints=1, base_parameters=0)  # fmt: skip
        assert host_bytes(sizes, [])["offloaded layer inputs"] == store.host_bytes
        del kept
