"""The plan of one rank against what tensors really take on each of two ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection
from frugal.device import Device
from frugal.planning.sharding import Sharing, units_of
from frugal.planning.simulate import MemorySimulator
from frugal.planning.simulated_model import Shape
from tests.distributed.ranks.cases_plan import settings
from tests.distributed.ranks.harness import Outcome, run_cases


@pytest.fixture(scope="module")
def base(make_tiny_llama: Callable[..., Path]) -> Path:
    return make_tiny_llama(num_hidden_layers=5, tie_word_embeddings=False, hidden_size=128, intermediate_size=384,
                           head_dim=32, vocab_size=640)  # fmt: skip


@pytest.fixture(scope="module")
def ranks(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return run_cases(tmp_path_factory.mktemp("peaks"), "cases_plan", ["peaks"], TINY_WIDE=str(base))["peaks"]


def planned(base: Path, values: dict[str, Any]) -> MemorySimulator:
    train = TrainSection(
        per_device_train_batch_size=values["micro"],
        gradient_accumulation_steps=values["accumulate"],
        max_grad_norm=0.5,
    )
    sim = MemorySimulator(
        AutoConfig.from_pretrained(base),
        ModelSection(base="x"),
        LoraSection(r=4),
        train,
        MemorySection(),
        torch.float32,
        Device("cpu"),
        policy=values["policy"],
        world_size=2,
    )
    units = units_of(sim.built(sim.counts[0]), sim.layers)
    sim.sharing = Sharing(values["strategy"], 2, values["base"], units, values["accumulate"])
    return sim


@pytest.mark.parametrize("name", settings())
def test_forecast_of_a_rank_and_measured_peak(name: str, base: Path, ranks: Outcome) -> None:
    values = settings()[name]
    sim = planned(base, values)
    for phase in ("first_step", "steady_step"):
        for rank, report in enumerate(ranks.reports):
            real = report[name][phase]
            peak = sim.peak(phase, Shape(1, real["tokens"], real["targets"]))  # type: ignore[arg-type]
            error = peak.bytes / real["peak"] - 1
            told = f"{phase} on rank {rank}: forecast {peak.bytes:,}, measured {real['peak']:,} ({error:+.2%})"
            assert abs(error) <= 0.05, told
            assert peak.bytes > sim.at_rest(phase, Shape(1, real["tokens"], real["targets"]))  # type: ignore[arg-type]
    at_rest = sim.at_rest("steady_step", Shape(1, 48))
    for report in ranks.reports:
        assert at_rest == pytest.approx(report[name]["steady_step"]["start"], rel=0.15 if name == "ddp" else 0.01)
