"""Too little memory: the warm-up step, the out-of-memory fallback and the budget. What is computed never changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.config import load_config
from frugal.errors import MemoryBudgetError
from frugal.files import read_json
from frugal.memory.meter import LiveBytesMeter, OutOfBudget
from frugal.memory.space import OutOfHostMemory, is_out_of_memory, refuse_when_host_is_full
from frugal.run.train import train
from frugal.training.log import read_log
from frugal.training.loop import train_loop
from frugal.training.oom_fallback import OutOfMemoryFallback
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
        fallback.next("no room")
        order.append(fallback.taken[-1])
    with pytest.raises(MemoryBudgetError, match="no room"):
        fallback.next("no room")
    job.memory.close()
    assert [word for word in ("chunks", "recompute", "disk", "2 rows", "1 rows") if any(word in o for o in order)] == [
        "chunks", "recompute", "disk", "2 rows", "1 rows"
    ]  # fmt: skip
    assert len(order) == 5
    assert len(said) == 5


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
    assert not is_out_of_memory(ValueError("x"))


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


def test_budget_in_a_configuration() -> None:
    plain = {"model": {"base": "x"}, "data": {"train": "x"}, "output": {"dir": "x"}}
    assert load_config(plain).memory.budget_bytes is None
    assert load_config({**plain, "memory": {"budget": "6GB"}}).memory.budget_bytes == 6 << 30
    with pytest.raises(Exception, match="budget"):
        load_config({**plain, "memory": {"budget": "plenty"}})
