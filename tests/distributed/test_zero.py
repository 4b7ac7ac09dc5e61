"""DeepSpeed ZeRO computes what one process does, partitions what it says, and its checkpoints are everybody's."""

from __future__ import annotations

import importlib.util
import math
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.ranks.harness import Outcome, Outcomes, run_cases
from tests.distributed.ranks.sharded_runs import Running, Setting, largest_difference, rows, rows_masked_for_some, start

if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed: pip install deepspeed", allow_module_level=True)
if shutil.which("c++") is None:
    pytest.skip("DeepSpeed on a CPU compiles an operation and there is no C++ compiler", allow_module_level=True)

from frugal.distributed.optimizer_state import OptimizerState, load_optimizer_state, optimizer_state
from frugal.tensor_files import read_tensors, write_tensors
from frugal.training.setup import LoopState
from tests.distributed.ranks import cases_zero as cases

pytestmark = pytest.mark.timeout(1200)  # the first launch compiles an operation, and may share its cores

NAMES = [
    "zero1", "zero2", "zero3", "zero2_offload", "zero3_offload", "zero2_masked",
    "zero2_odd", "zero3_odd", "zero3_tied", "zero2_groups", "zero2_one_micro", "zero3_one_micro",
    "zero3_half", "zero3_from_one", "zero2_from_zero3", "zero3_odd_from_one", "bytes", "every_dtype",
    "evaluation_and_probe", "loss_scaling", "not_finite", "raises", "other_ages", "layer_by_layer", "gathers",
]  # fmt: skip
"""In one launch; those that go on from what another wrote come after it."""


@pytest.fixture(scope="module", autouse=True)
def bases(make_tiny_llama: Callable[..., Path]) -> Iterator[None]:
    found = {
        "TINY_UNTIED": make_tiny_llama(num_hidden_layers=4, tie_word_embeddings=False),
        "TINY_BF16": make_tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=False),
        "TINY_TIED": make_tiny_llama(),
        "TINY_ODD": make_tiny_llama(intermediate_size=131, vocab_size=301, tie_word_embeddings=False),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in found.items():
            patch.setenv(name, str(folder))
        yield


class Alone:
    """One process: records and adapter of a setting, with its state half-way as a checkpoint holds it."""

    def __init__(self, setting: Setting, folder: Path | None = None, **options: Any) -> None:
        self.running: Running = start(setting, **options)
        self.running.job = replace(self.running.job, save_steps=cases.HALF_WAY)
        self.folder = folder
        self.running.train(save=self._keep)
        self.running.handle.close()

    def _keep(self, state: LoopState) -> None:
        if self.folder is not None and state.step == cases.HALF_WAY:
            self.folder.mkdir(parents=True)
            write_tensors(self.folder / "0.half.safetensors", self.running.adapter())
            found = optimizer_state(self.running.job.optimizer)
            write_tensors(self.folder / "optimizerhalf.safetensors", found.tensors, found.meta)


@pytest.fixture(scope="module")
def place(bases: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def plain(place: Path) -> Alone:
    return Alone(Setting(), place / "alone")


@pytest.fixture(scope="module")
def odd(place: Path) -> Alone:
    return Alone(cases.ODD, place / "alone_odd")


@pytest.fixture(scope="module")
def two(place: Path, plain: Alone, odd: Alone) -> Outcomes:
    return run_cases(place, "cases_zero", NAMES, timeout=900)


@pytest.fixture(scope="module")
def four(bases: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("four"), "cases_zero", ["zero2", "zero3_masked"], world=4)


def check(out: Outcome, want: Alone, *, first: int = 0, weights: float = 1e-5) -> None:
    """Every rank's records, the gathered adapter and the optimizer state are those of one process."""
    for report in out.reports:
        compare_records(report["records"], want.running.records[first:])
    assert largest_difference(out.tensors(0), want.running.adapter()) < weights
    tensors, meta = read_tensors(out.folder / "optimizer.safetensors")
    state = optimizer_state(want.running.job.optimizer)
    assert meta == state.meta
    assert largest_difference(tensors, state.tensors) < 1e-5


def compare_records(got: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    assert len(got) == len(want)
    for mine, record in zip(got, want, strict=True):
        assert mine["rows_sha256"] == record["rows_sha256"]
        assert mine["learning_rate"] == record["learning_rate"]
        assert mine["loss"] == pytest.approx(record["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(record["grad_norm"], rel=1e-4)


@pytest.mark.parametrize("case", ["zero1", "zero2", "zero3", "zero2_offload", "zero3_offload"])
def test_two_ranks_as_one(two: Outcomes, plain: Alone, case: str) -> None:
    check(two[case], plain)


def test_four_ranks_as_one(four: Outcomes, plain: Alone) -> None:
    check(four["zero2"], plain)


def test_a_rank_whose_rows_are_all_masked(two: Outcomes, four: Outcomes) -> None:
    want = Alone(Setting(), data=rows_masked_for_some())
    check(two["zero2_masked"], want)
    check(four["zero3_masked"], want)


@pytest.mark.parametrize("case", ["zero2_odd", "zero3_odd"])
def test_sizes_that_do_not_divide(two: Outcomes, odd: Alone, case: str) -> None:
    check(two[case], odd)


def test_tied_table_and_new_tokens(two: Outcomes) -> None:
    check(two["zero3_tied"], Alone(cases.TIED))


def test_groups_with_rates_of_their_own(two: Outcomes) -> None:
    check(two["zero2_groups"], Alone(cases.LORA_PLUS))


@pytest.mark.parametrize("case", ["zero2_one_micro", "zero3_one_micro"])
def test_one_micro_batch_a_window(two: Outcomes, plain: Alone, case: str) -> None:
    # 4 rows a micro-batch add up in another order than 4 of one row: AdamW makes much of gradients near zero
    check(two[case], plain, weights=5e-5)


@pytest.mark.parametrize("case", ["zero3_from_one", "zero2_from_zero3"])
def test_resume(two: Outcomes, plain: Alone, case: str) -> None:
    check(two[case], plain, first=cases.HALF_WAY)


def test_resume_with_sizes_that_do_not_divide(two: Outcomes, odd: Alone) -> None:
    check(two["zero3_odd_from_one"], odd, first=cases.HALF_WAY)


def test_zero3_to_one_process(two: Outcomes, plain: Alone) -> None:
    half = two["zero3_half"].folder
    tensors, meta = read_tensors(half / "optimizerhalf.safetensors")
    running = start(Setting())
    running.job.strategy.load_adapter(running.model, load_file(half / "0.half.safetensors"))
    load_optimizer_state(running.job.optimizer, OptimizerState(tensors, meta), "the file")
    running.train(LoopState(step=cases.HALF_WAY))
    compare_records(running.records, plain.running.records[cases.HALF_WAY :])
    assert largest_difference(running.adapter(), plain.running.adapter()) < 1e-5


def test_files_half_way_are_those_of_one_process(two: Outcomes, place: Path) -> None:
    mine, other = two["zero3_half"].folder, place / "alone"
    for name in ("0.half.safetensors", "optimizerhalf.safetensors"):
        (got, meta), (want, meta_wanted) = read_tensors(mine / name), read_tensors(other / name)
        assert meta == meta_wanted or name == "0.half.safetensors"
        assert {key: (t.dtype, t.shape) for key, t in got.items()} == {k: (t.dtype, t.shape) for k, t in want.items()}
        assert largest_difference(got, want) < 1e-5


def test_bytes(two: Outcomes) -> None:
    """Stage by stage less is held, and under ZeRO-3 nothing is whole, 4-bit storage included."""
    for report in two["bytes"].reports:
        whole = report["whole"]
        moments = 2 * whole["trained"]
        for stage in (1, 2, 3):
            held = report[f"zero{stage}"]
            assert held["optimizer"] < 0.51 * moments
            assert held["measured"] == held["optimizer"]
            assert held["masters"] == 0, "float32 parameters are their own masters"
        assert report["zero2"]["frozen"] == whole["frozen"]
        assert report["zero2"]["trained"] == whole["trained"]
        three = report["zero3"]
        assert three["frozen"] < 0.51 * whole["frozen"]
        assert three["trained"] < 0.51 * whole["trained"]
        assert three["gradients"] < 0.51 * whole["trained"]


def test_a_base_that_no_rank_ever_holds(two: Outcomes, plain: Alone) -> None:
    out = two["layer_by_layer"]
    check(out, plain)
    for report in out.reports:
        assert report["held"] == two["zero3"].reports[0]["held"]
        layers = report["layers"]
        assert len(layers) == 4
        assert sum(layers) < report["held"]["frozen"], "a layer's frozen part was cut before the next was read"


def test_recomputation_gathers_nothing_more(two: Outcomes, plain: Alone) -> None:
    """Two gathers a layer, in forward and in backward; the recomputation runs on what is there."""
    for report in two["gathers"].reports:
        for policy in ("recompute", "offload"):
            assert report[policy]["losses"] == report["none"]["losses"]
            assert report[policy]["counts"] == report["none"]["counts"]
        layers, types, rest = 4, 3, 5  # codes and scales, adapters and norms; embedding, norm and head beside them
        assert report["none"]["counts"]["_allgather_base_"] <= 2 * layers * types + rest


def test_nothing_is_cast(two: Outcomes) -> None:
    for report in two["every_dtype"].reports:
        for stage in ("2", "3"):
            assert report[stage]["wrong"] == []
            assert report[stage]["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.uint8"]


def test_evaluation_probe_and_answers(two: Outcomes) -> None:
    setting = Setting(steps=3, train={"eval_steps": 2, "per_device_eval_batch_size": 2})
    want = start(setting, eval_rows=rows([2, 1, 5, 3, 4], seed=3))
    want.train()
    answer = cases.answer_with(want.model).tolist()
    out = two["evaluation_and_probe"]
    for report in out.reports:
        for stage in ("2", "3"):
            found = report[stage]
            assert found["unchanged"], stage
            assert found["unchanged_later"], stage
            assert found["answer"] == answer
            for mine, record in zip(found["records"], want.records, strict=True):
                assert mine.get("loss", 0) == pytest.approx(record.get("loss", 0), abs=1e-5)
                assert mine.get("eval_loss", 0) == pytest.approx(record.get("eval_loss", 0), abs=1e-5)
            assert largest_difference(out.tensors(0, stage), want.adapter()) < 1e-5


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(two: Outcomes) -> None:
    want = start(Setting(steps=6, policy="none"), loss_scaling=True)
    cases.overflow_in_third_step(want)
    end = want.train()
    assert end.skipped_steps == 1
    for report in two["loss_scaling"].reports:
        for stage in ("2", "3"):
            assert report[stage]["skipped"] == 1
            assert report[stage]["scale"] == end.loss_scaling["scale"]
            assert not math.isfinite(report[stage]["records"][2]["grad_norm"])
            got, records = ([r for r in found if r["step"] != 3] for found in (report[stage]["records"], want.records))
            compare_records(got, records)
            assert largest_difference(two["loss_scaling"].tensors(0, stage), want.adapter()) < 1e-5


def test_a_gradient_that_is_no_number(two: Outcomes) -> None:
    for report in two["not_finite"].reports:
        for stage in ("2", "3"):
            assert report[stage]["message"].startswith("step 1: the loss is nan")
            assert report[stage]["same"]


def test_an_error_amid_a_window_waits_for_nobody(two: Outcomes) -> None:
    assert two["raises"].reports == [{"2": "", "3": ""}, {"2": "amid a window", "3": "amid a window"}]


def test_state_that_deepspeed_cannot_hold(two: Outcomes) -> None:
    for report in two["other_ages"].reports:
        ages, kind = report["messages"]
        assert "parameters of different ages" in ages
        assert "AdamW8bit" in kind
