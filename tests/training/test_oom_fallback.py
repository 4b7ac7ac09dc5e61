"""Too little memory: the warm-up step, the out-of-memory fallback and the budget. What is computed never changes."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.config import load_config
from frugal.errors import MemoryBudgetError
from frugal.files import read_json
from frugal.memory.meter import LiveBytesMeter, OutOfBudget
from frugal.memory.offload import HostArena
from frugal.memory.space import (
    OutOfHostMemory,
    Shortage,
    is_of_host,
    is_out_of_memory,
    recover,
    refuse_when_host_is_full,
)
from frugal.models.replacement import replace_modules
from frugal.run.memory import warm_up
from frugal.run.train import train
from frugal.training.log import read_log
from frugal.training.loop import train_loop
from frugal.training.oom_fallback import MOST_REPEATS, MemorySettings, OutOfMemoryFallback
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from frugal.training.warmup_step import longest_micro_batch, run_warmup_step
from tests.support import runs
from tests.support import training as toy


def losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_log(folder / "train_log.jsonl") if "loss" in record]


def settings(base: Path, tmp_path: Path, name: str, **memory: Any) -> dict[str, Any]:
    rows = runs.write_rows(tmp_path / "rows.jsonl", 12)
    plain = runs.config(base, rows, tmp_path / name, data={"eval_split": 2}, memory=memory)
    plain["train"].update(
        num_train_epochs=1,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=1,
        per_device_eval_batch_size=2,
        learning_rate=2e-4,
    )
    plain["lora"]["lora_dropout"] = 0.0  # another micro-batch draws other masks
    return plain


def test_a_run_with_less_memory_ends_with_the_same_losses(
    make_tiny_llama: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """30 % under its need: settings get cheaper until it fits, every loss equals that of the run with enough."""
    folder = make_tiny_llama(vocab_size=4000)
    train(settings(folder, tmp_path, "enough", checkpoint="none"))
    manifest = read_json(tmp_path / "enough" / "manifest.json")
    need = manifest["warm-up step"]["step_bytes"]
    assert manifest["out-of-memory fallback"] == []
    assert manifest["forecast"]["device"]["phases"]["steady_step"]["bytes"] == pytest.approx(need, rel=0.05)

    train(settings(folder, tmp_path, "less", checkpoint="none", budget=f"{int(0.7 * need)}B"))
    manifest = read_json(tmp_path / "less" / "manifest.json")
    taken = manifest["out-of-memory fallback"]
    assert taken
    assert manifest["warm-up step"]["step_bytes"] <= 0.7 * need
    # of losses near 9, of which float32 tells 1e-6 apart: other chunks, other order of sums
    assert losses(tmp_path / "less") == pytest.approx(losses(tmp_path / "enough"), rel=1e-6)
    shown = capsys.readouterr()
    assert "out of memory" in shown.out + shown.err
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "less" / name).is_file()


def test_auto_needs_no_fallback(make_tiny_llama: Any, tmp_path: Path) -> None:
    """The plan chooses what fits before the first step."""
    folder = make_tiny_llama(vocab_size=500)
    train(settings(folder, tmp_path, "none", checkpoint="none"))
    need = read_json(tmp_path / "none" / "manifest.json")["warm-up step"]["step_bytes"]
    train(settings(folder, tmp_path, "auto", budget=f"{int(0.9 * need)}B"))
    manifest = read_json(tmp_path / "auto" / "manifest.json")
    assert manifest["out-of-memory fallback"] == []
    assert manifest["implementations"]["activation checkpointing"]["chosen"] == "recompute"
    assert losses(tmp_path / "auto") == pytest.approx(losses(tmp_path / "none"), abs=1e-6)


def test_what_cannot_fit_says_what_would(tiny_llama_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(MemoryBudgetError, match=r"Tried: .*chunks.*1 rows.*memory\.budget"):
        train(settings(tiny_llama_folder, tmp_path, "hopeless", budget="100KB"))


def fallback_for(job: Any, said: list[str]) -> OutOfMemoryFallback:
    return OutOfMemoryFallback(job.memory, say=said.append)


def test_changes_come_in_a_fixed_order() -> None:
    said: list[str] = []
    job = toy.make_job(toy.tiny_model(), toy.rows([3] * 8), per_device_train_batch_size=4)
    fallback = fallback_for(job, said)
    order = []
    for _ in range(5):
        fallback.next(Shortage("no room", first=True))
        order.append(fallback.taken[-1])
    with pytest.raises(MemoryBudgetError, match="no room"):
        fallback.next(Shortage("no room"))
    job.memory.close()
    assert [word for word in ("chunks", "recompute", "disk", "2 rows", "1 rows") if any(word in o for o in order)] == [
        "chunks", "recompute", "disk", "2 rows", "1 rows"
    ]  # fmt: skip
    assert len(order) == 5
    assert len(said) == 5


def test_order_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """S2: what is cheap there first. Tiles of 64 tokens cost five times a step; offloading costs next to nothing."""
    monkeypatch.setattr(MemorySettings, "on_cuda", True)
    said: list[str] = []
    job = toy.make_job(toy.tiny_model(), toy.rows([3] * 8), per_device_train_batch_size=4)
    replace_modules(job.module.model)
    fallback = fallback_for(job, said)
    assert fallback.memory.checkpointing.policy == "none"
    fallback.next(Shortage("CUDA out of memory. Tried to allocate 2 GiB", first=True))
    assert fallback.taken == []
    assert "once more with the device's cache emptied" in said[0]
    fallback.memory.tokens = 2000
    for _ in range(8):
        fallback.next(Shortage("CUDA out of memory. Tried to allocate 2 GiB"))
    with pytest.raises(MemoryBudgetError):
        fallback.next(Shortage("CUDA out of memory. Tried to allocate 2 GiB"))
    assert fallback.taken[:2] == ["memory.checkpoint: recompute", "memory.checkpoint: offload"]
    sizes = [int(one.split()[-1]) for one in fallback.taken if "tiles" in one]
    assert sizes == [1000, 500, 256, 64], "64 at the very end"
    rows = [number for number, one in enumerate(fallback.taken) if "rows a micro-batch" in one]
    assert rows == [len(fallback.taken) - 3, len(fallback.taken) - 2]
    assert not any("disk" in one for one in fallback.taken), "a file takes nothing off the device"
    job.memory.close()


def test_a_full_host_goes_to_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Smaller tiles would not help: what is short is memory for offloaded inputs."""
    monkeypatch.setattr(MemorySettings, "on_cuda", True)
    job = toy.make_job(toy.tiny_model(), toy.rows([3] * 8), per_device_train_batch_size=4)
    fallback = fallback_for(job, [])
    fallback.next(Shortage("x"))
    fallback.next(Shortage("x"))
    fallback.next(Shortage("64 MB wanted on the host", host=True, first=True))
    assert fallback.taken[-1] == "memory.checkpoint: disk"
    fallback.next(Shortage("64 MB wanted on the host", host=True))
    assert fallback.taken[-1].startswith("2 rows")
    job.memory.close()


def test_repeats_come_to_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that only an emptied cache lets through again and again are slow: then settings change."""
    monkeypatch.setattr(MemorySettings, "on_cuda", True)
    job = toy.make_job(toy.tiny_model(), toy.rows([3] * 8), per_device_train_batch_size=4)
    fallback = fallback_for(job, [])
    for _ in range(MOST_REPEATS + 1):
        fallback.next(Shortage("x", first=True))
    assert fallback.taken == ["memory.checkpoint: recompute"]
    job.memory.close()


class OutOnce:
    """Raises out-of-memory in the middle of the third step's backward, once."""

    def __init__(self, job: Any) -> None:
        self.calls = 0
        parameter = next(p for p in job.module.parameters() if p.requires_grad)
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: torch.Tensor) -> None:
        self.calls += 1
        if self.calls == 6:  # two micro-batches a step
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def steps(*, fail: bool) -> tuple[list[dict[str, Any]], list[str], torch.Tensor]:
    torch.manual_seed(5)
    job = toy.make_job(
        toy.tiny_model(dropout=0.2), toy.rows([3, 5, 2, 7] * 4), max_steps=5, per_device_train_batch_size=1,
        gradient_accumulation_steps=2,
    )  # fmt: skip
    said: list[str] = []
    fallback = fallback_for(job, said)
    if fail:
        OutOnce(job)
    records: list[dict[str, Any]] = []
    hooks = Hooks(records.append, lambda state: None, StopRequest(print), fallback.next)
    torch.manual_seed(9)
    train_loop(job, hooks, LoopState())
    job.memory.close()
    weights = torch.cat([p.detach().flatten() for p in job.module.parameters() if p.requires_grad])
    return records, said, weights


def test_out_of_memory_in_a_later_step_repeats_that_step() -> None:
    """From the last consistent state: gradients thrown away, dropout's generator put back."""
    calm, _, want = steps(fail=False)
    troubled, said, got = steps(fail=True)
    assert [r["loss"] for r in troubled] == pytest.approx([r["loss"] for r in calm], abs=1e-6)
    assert [r["rows_sha256"] for r in troubled] == [r["rows_sha256"] for r in calm]
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-4)
    assert len(said) == 1
    assert "CUDA out of memory" in said[0]


def test_other_errors_are_no_matter_of_memory() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("x"))
    assert is_out_of_memory(OutOfBudget("x"))
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    assert not is_out_of_memory(RuntimeError("out of resource: shared memory, Required: 131072"))
    assert not is_out_of_memory(OSError(2, "No such file or directory"))
    assert not is_out_of_memory(ValueError("x"))


@pytest.mark.parametrize(
    ("error", "host"),
    [
        (torch.AcceleratorError("CUDA error: out of memory\nCUDA kernel errors might be reported later"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), False),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), False),
        (RuntimeError("Triton Error [CUDA]: out of memory"), False),
        (torch.distributed.DistBackendError("Call to cudaMalloc failed\nCuda failure 2 'out of memory'"), False),
        (RuntimeError("Error out of memory at line 380 in file /src/csrc/pythonInterface.cpp"), False),
        (RuntimeError("CUDA driver error: out of memory"), False),
        (OutOfHostMemory("64 bytes wanted on the host"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
    ],
)  # fmt: skip
def test_every_kind_of_out_of_memory(error: Exception, host: bool) -> None:
    """B4: context, cuBLAS, Triton's modules, NCCL and pinned memory lie outside torch's allocator, and fail first."""
    assert is_out_of_memory(error)
    assert is_of_host(error) == host


def test_what_cannot_be_done_is_no_shortage() -> None:
    assert not is_out_of_memory(RuntimeError("Need to provide pin_memory allocator to use pin memory."))


def test_nothing_of_a_failed_attempt_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    emptied: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append("cache"))

    def attempt() -> None:
        tensor = torch.zeros(4)
        left.append(weakref.ref(tensor))
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    left: list[Any] = []
    found = None
    try:
        attempt()
    except RuntimeError as error:
        found = recover(error, first=True), left[0]()
    assert found == (Shortage("Triton Error [CUDA]: out of memory", host=False, first=True), None)
    assert emptied == ["cache"]


def test_the_warmup_step_is_tried_again_after_cublas_ran_out(monkeypatch: pytest.MonkeyPatch) -> None:
    job = toy.make_job(toy.tiny_model(), toy.rows([3] * 4), per_device_train_batch_size=2)
    calls: list[Shortage] = []

    def fails(*args: Any, **kwargs: Any) -> str:
        if len(calls) < 2:
            raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")
        return "measured"

    class Noting(OutOfMemoryFallback):
        def next(self, shortage: Shortage) -> None:
            calls.append(shortage)

    monkeypatch.setattr("frugal.run.memory.run_warmup_step", fails)
    config = load_config({"model": {"base": "x"}, "data": {"train": "x"}, "output": {"dir": "x"}})
    found = warm_up(config, job, Noting(job.memory, say=print), first_step=0, save=lambda: None)
    assert str(found) == "measured"
    assert [one.first for one in calls] == [True, False]


def test_memory_that_cannot_be_pinned_is_ordinary_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """B4: WSL pins half of the machine's memory at most."""
    make = torch.empty

    def limited(*size: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        if pin_memory:
            raise torch.AcceleratorError("CUDA error: out of memory")
        return make(*size, **kwargs)

    monkeypatch.setattr(torch, "empty", limited)
    arena = HostArena(1 << 16, pinned=True)
    with pytest.warns(UserWarning, match="no more memory can be pinned"):
        assert arena.take(100_000) == 0
    assert arena.nbytes == 2 << 16
    assert sum(piece.numel() for *_, piece in arena.pieces(0, 100_000)) == 100_000


def test_the_host_keeps_a_reserve() -> None:
    refuse_when_host_is_full(1000)
    with pytest.raises(OutOfHostMemory, match="available"):
        refuse_when_host_is_full(1 << 50)


def test_the_meter_enforces_a_limit() -> None:
    meter = LiveBytesMeter(limit_bytes=10_000)
    with pytest.raises(OutOfBudget, match="10,000"), meter:
        torch.stack([torch.zeros(500) for _ in range(10)])


@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit"])
def test_the_warmup_step_changes_nothing(optim: str) -> None:
    """Weights, optimizer state and random generators are those before, bit for bit, also in the middle of a run."""
    job = toy.make_job(
        toy.tiny_model(dropout=0.1), toy.rows([3, 5, 2, 7], length=40), eval_rows=toy.rows([4, 4]), max_steps=3,
        per_device_train_batch_size=2, gradient_accumulation_steps=1, optim=optim,
    )  # fmt: skip
    hooks = Hooks(lambda record: None, lambda state: None, StopRequest(print))
    for before_training in (True, False):
        if not before_training:
            train_loop(job, hooks, LoopState())
        weights = [p.detach().clone() for p in job.module.parameters()]
        state = {
            (i, key): value.clone() if isinstance(value, torch.Tensor) else value
            for i, values in enumerate(job.optimizer.state.values())
            for key, value in values.items()
        }
        generator = torch.get_rng_state()
        result = run_warmup_step(job, save=lambda: None)
        assert result.step_bytes > result.eval_bytes > result.save_bytes
        assert result.save_bytes > sum(w.nbytes for w in weights)  # with optimizer state, as after a step
        assert torch.equal(torch.get_rng_state(), generator)
        assert all(torch.equal(a, b) for a, b in zip(weights, job.module.parameters(), strict=True))
        after = {
            (i, key): value for i, values in enumerate(job.optimizer.state.values()) for key, value in values.items()
        }
        assert after.keys() == state.keys()
        for key, value in state.items():
            same = torch.equal(after[key], value) if isinstance(value, torch.Tensor) else after[key] == value
            assert same, key
        assert all(p.grad is None for p in job.module.parameters())


def test_the_warmup_step_takes_the_longest_micro_batch_of_all_steps() -> None:
    data = toy.rows([2] * 9, length=12)  # lengths 12, 13, 14, 12, ...
    job = toy.make_job(toy.tiny_model(), data, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    found = longest_micro_batch(job.order, job.plan, data.lengths, micro=2, flat=True)
    totals = [
        int(data.lengths[rows[i : i + 2]].sum())
        for step in range(job.plan.total_steps)
        for rows in [job.order.rows_of(step)]
        for i in range(0, len(rows), 2)
    ]
    assert int(data.lengths[found].sum()) == max(totals)
    assert run_warmup_step(job).rows == len(found)
    longer = replace(job.plan, total_steps=10**9)  # at once, and at least as long as any of its micro-batches
    assert sorted(data.lengths[longest_micro_batch(job.order, longer, data.lengths, micro=2, flat=True)]) == [14, 14]


def test_budget_in_a_configuration() -> None:
    plain = {"model": {"base": "x"}, "data": {"train": "x"}, "output": {"dir": "x"}}
    assert load_config(plain).memory.budget_bytes is None
    assert load_config({**plain, "memory": {"budget": "6GB"}}).memory.budget_bytes == 6 << 30
    with pytest.raises(Exception, match="budget"):
        load_config({**plain, "memory": {"budget": "plenty"}})
