"""FSDP2 computes what one process does, and everything is really sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.training.optim import trainable
from tests.distributed.ranks import cases_fsdp2 as cases
from tests.distributed.ranks.harness import Outcome, Outcomes, run_cases
from tests.distributed.ranks.sharded_runs import Running, Setting, largest_difference, rows, rows_masked_for_some, start
from tests.support.tiny_models import tiny_model

TWO = [
    "same", "masked", "adapters_only", "eight_bit", "host_shards", "tied_with_new_tokens", "trained_head",
    "stock_modules", "experts", "policies", "bytes", "every_byte", "evaluation_and_probe", "loss_scaling", "compared",
]  # fmt: skip
FOUR = ["same", "masked", "tied_with_new_tokens"]


@pytest.fixture(scope="module", autouse=True)
def bases(make_tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    experts = tmp_path_factory.mktemp("experts")
    tiny_model("qwen3_moe", vocab_size=300).save_pretrained(experts)
    found = {
        "TINY_UNTIED": make_tiny_llama(num_hidden_layers=4, tie_word_embeddings=False),
        "TINY_BF16": make_tiny_llama(dtype=torch.bfloat16, tie_word_embeddings=False),
        "TINY_TIED": make_tiny_llama(),
        "TINY_EXPERTS": experts,
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in found.items():
            patch.setenv(name, str(folder))
        yield


@pytest.fixture(scope="module")
def two(bases: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("two"), "cases_fsdp2", TWO)


@pytest.fixture(scope="module")
def four(bases: None, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    return run_cases(tmp_path_factory.mktemp("four"), "cases_fsdp2", FOUR, world=4)


@pytest.fixture(scope="module")
def plain(bases: None) -> Running:
    running = start(Setting())
    running.train()
    return running


def check(out: Outcome, want: Running, *, loss: float = 1e-5, weights: float = 1e-5) -> None:
    """Every rank's records and the gathered adapter are those of one process."""
    for report in out.reports:
        assert len(report["records"]) == len(want.records)
        for got, record in zip(report["records"], want.records, strict=True):
            assert got["rows_sha256"] == record["rows_sha256"]
            assert got["trained_tokens"] == record["trained_tokens"]
            assert got["loss"] == pytest.approx(record["loss"], abs=loss)
            assert got["grad_norm"] == pytest.approx(record["grad_norm"], rel=10 * loss)
    assert largest_difference(out.tensors(0), want.adapter()) < weights


def alone(setting: Setting, **options: Any) -> Running:
    running = start(setting, **options)
    running.train()
    running.handle.close()
    return running


@pytest.mark.parametrize("case", ["same", "adapters_only", "host_shards"])
def test_two_ranks_as_one(two: Outcomes, plain: Running, case: str) -> None:
    check(two[case], plain)


def test_four_ranks_as_one(four: Outcomes, plain: Running) -> None:
    check(four["same"], plain)


def test_only_adapters_are_cut_when_the_base_is_not(two: Outcomes) -> None:
    for report in two["adapters_only"].reports:
        assert report["whole_base"]
        assert report["cut_adapters"]


def test_a_rank_whose_rows_are_all_masked(two: Outcomes, four: Outcomes) -> None:
    want = alone(Setting(), data=rows_masked_for_some())
    check(two["masked"], want)
    check(four["masked"], want)


def test_tied_table_and_new_tokens(two: Outcomes, four: Outcomes) -> None:
    want = alone(cases.TIED)
    check(two["tied_with_new_tokens"], want)
    check(four["tied_with_new_tokens"], want)


def test_trained_head(two: Outcomes) -> None:
    check(two["trained_head"], alone(cases.TRAINED_HEAD))


def test_stock_modules_and_a_dense_base(two: Outcomes) -> None:
    check(two["stock_modules"], alone(cases.STOCK))


def test_experts_in_nf4(two: Outcomes) -> None:
    assert all(report["cut"] for report in two["experts"].reports)
    check(two["experts"], alone(cases.EXPERTS))


def test_eight_bit_state(two: Outcomes) -> None:
    want = alone(cases.EIGHT_BIT)
    kinds = {s["state1"].dtype for s in want.job.optimizer.state.values()}
    assert torch.uint8 in kinds
    check(two["eight_bit"], want, loss=1e-3, weights=1e-3)


def test_policies_compute_the_same_with_two_gathers_a_layer(two: Outcomes) -> None:
    layers = 4
    for report in two["policies"].reports:
        for policy in cases.POLICIES:
            assert report[policy]["losses"] == report["recompute"]["losses"]
            assert report[policy]["counts"] == {
                "_allgather_base_": 2 * layers + 2,  # and the embedding and the root, once, in forward
                "all_gather_into_tensor": 1,  # the head, into one tensor
                "_reduce_scatter_base_": layers,
            }


def test_everything_is_sharded(two: Outcomes) -> None:
    for report in two["bytes"].reports:
        before, after = report["before"], report["after"]
        assert after["nf4"] == before["nf4"] / 2
        for kind in ("base", "adapters"):
            assert after[kind] == pytest.approx(before[kind] / 2, rel=0.05)
        assert after["gradients"] == after["adapters"]
        assert after["optimizer"] == pytest.approx(before["adapters"], rel=0.05)  # two moments of half the elements


def test_every_byte_pattern_survives(two: Outcomes) -> None:
    for report in two["every_byte"].reports:
        assert report["wrong"] == []
        assert report["seen"] == report["planted"] > 20
        assert report["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.uint8"]


def test_evaluation_probe_and_answers(two: Outcomes) -> None:
    setting = Setting(steps=3, train={"eval_steps": 2, "per_device_eval_batch_size": 2})
    want = start(setting, eval_rows=rows([2, 1, 5, 3, 4], seed=3))
    want.train()
    want.model.eval()
    answer = want.model.generate(input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=5, do_sample=False)
    assert len(want.records) == 4
    for report in two["evaluation_and_probe"].reports:
        assert report["unchanged"]
        assert report["unchanged_later"]
        assert report["all_cut"]
        assert report["step_bytes"] > 0
        assert report["answer"] == answer.tolist()
        for got, record in zip(report["records"], want.records, strict=True):
            for key in ("loss", "eval_loss"):
                if key in record:
                    assert got[key] == pytest.approx(record[key], abs=1e-5)
    assert largest_difference(two["evaluation_and_probe"].tensors(0), want.adapter()) < 1e-5


def test_an_overflow_on_one_rank_leaves_out_the_step_on_all(two: Outcomes) -> None:
    out = two["loss_scaling"]
    for report in out.reports:
        assert report["skipped"] == 1
        assert report["scales"][1] == 2 * report["scales"][2]
        assert report["records"][0]["loss"] == out.reports[0]["records"][0]["loss"]
    want = start(Setting(steps=4), loss_scaling=True)
    clip = want.job.strategy.norm_and_clip
    calls: list[float] = []

    def with_overflow(optimizer: Any, max_norm: float, scaler: Any) -> Any:
        calls.append(scaler.get_scale())
        if len(calls) == 2:
            next(iter(trainable(want.model).values())).grad.fill_(float("inf"))  # type: ignore[union-attr]
        return clip(optimizer, max_norm, scaler)

    want.job.strategy.norm_and_clip = with_overflow  # type: ignore[method-assign]
    want.train()
    assert largest_difference(out.tensors(0), want.adapter()) < 1e-5


def test_a_drifting_rank_is_stopped_by_name(two: Outcomes) -> None:
    for report in two["compared"].reports:
        assert report["steps"] == 1
        assert "after step 1" in report["error"]
        assert report["name"] in report["error"]
        assert "process 1" in report["error"]
