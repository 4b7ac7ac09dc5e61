"""Plans for several ranks: parts, traffic by closed formulas, the choice of a strategy, JSON and text."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.config import load_config
from frugal.planning import Planner
from frugal.planning.api import choose_strategy, settled
from frugal.planning.host import ROUNDING, device_allowance
from frugal.planning.inputs import planned_device


def planner(folder: Path, vram: str = "8GB", **known: Any) -> Planner:
    config = load_config(
        {
            "model": {"base": str(folder)},
            "lora": {"r": 4},
            "data": {"train": "x.jsonl", "max_length": 256},
            "train": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": known.pop("accumulate", 1)},
            "memory": {"checkpoint": known.pop("checkpoint", "recompute"), **known.pop("memory", {})},
            "output": {"dir": "runs/x"},
        }
    )
    return Planner.of(config, planned_device("auto", gpu=None, vram=vram, host_ram=None), **known)


@pytest.fixture(scope="module")
def folder(make_tiny_llama: Any) -> Path:
    return make_tiny_llama(num_hidden_layers=4, tie_word_embeddings=False, vocab_size=900)  # type: ignore[no-any-return]


@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_of_a_rank_and_what_it_sends(folder: Path, ranks: int) -> None:
    one = planner(folder)
    base, trained = one.simulation("recompute").base_at_rest(), 4 * one.simulation("recompute").numbers()[1]
    part = (ranks - 1) / ranks
    for micro_batches in (1, 4):
        for strategy, cut in (("ddp", False), ("fsdp2", False), ("fsdp2", True), ("zero2", False), ("zero3", True)):
            shared = planner(
                folder, accumulate=micro_batches, world_size=ranks, strategy=strategy, shard_base=cut
            ).plan(with_line=False)
            sharing, network = shared.sharing, shared.network
            assert sharing is not None
            assert network is not None
            units, held = sharing.units, sharing.held()
            assert units.trained == trained
            assert units.frozen + units.buffers == base - trained
            assert held["adapters"] == (trained if strategy in ("ddp", "zero2") else trained // ranks)
            assert held["optimizer"] <= units.trained * units.state_ratio / (1 if strategy == "ddp" else ranks) + 1
            assert held["base"] == pytest.approx(units.frozen / (ranks if cut else 1) + units.buffers, abs=1)
            layers, tables = units.layers * units.layer, units.embedding + units.head
            expected = {
                ("ddp", False): 2 * trained * part,
                ("fsdp2", False): 2 * trained * part,
                ("zero2", False): 3 * trained * part,  # reduced to all ranks, then adapters come back (as measured)
                # gradients are reduced with every micro-batch: none wait whole
                ("fsdp2", True): part * (micro_batches * (trained + 2 * layers + tables) + units.root),
                ("zero3", True): part * (trained + micro_batches * (2 * layers + tables + 2 * units.root)),
            }[strategy, cut]  # fmt: skip
            assert network.sent_bytes == pytest.approx(expected, rel=1e-4), (strategy, cut)


def test_sharding_lowers_every_phase_and_many_ranks_come_close_to_nothing(folder: Path) -> None:
    peaks = []
    for ranks in (2, 8, 64):
        found = planner(folder, world_size=ranks, strategy="fsdp2", shard_base=True).plan(with_line=False)
        peaks.append({name: phase.bytes for name, phase in found.phases.items()})
        assert found.phases["save"].bytes < found.phases["steady_step"].bytes
    for few, many in pairwise(peaks):
        assert all(many[name] <= few[name] for name in few)
    rest = planner(folder, world_size=64, strategy="fsdp2", shard_base=True)
    units = rest.sharing.units  # type: ignore[union-attr]
    assert rest.simulation("recompute").at_rest("steady_step", rest.shape) < 0.05 * units.frozen + units.buffers


def test_shards_that_rest_on_the_host(folder: Path) -> None:
    on_device = planner(folder, world_size=2, strategy="fsdp2", shard_base=True).plan(with_line=False)
    on_host = planner(folder, world_size=2, strategy="fsdp2", shard_base=True, offload=True).plan(with_line=False)
    units = on_host.sharing.units  # type: ignore[union-attr]
    cut = (units.frozen + units.trained * (1 + units.state_ratio)) / 2
    assert on_device.phases["save"].bytes - on_host.phases["save"].bytes == pytest.approx(cut, rel=1e-3)
    assert on_host.host["shards"] == pytest.approx(cut + units.trained / 2, rel=1e-3)
    assert on_host.phases["steady_step"].bytes < on_device.phases["steady_step"].bytes


def test_the_choice_of_a_strategy(folder: Path) -> None:
    assert choose_strategy(planner(folder)).value.strategy is None
    roomy = choose_strategy(planner(folder, world_size=2))
    assert roomy.value == ("ddp", False)
    assert "fits each GPU" in roomy.reason
    whole = planner(folder, world_size=2, strategy="ddp", shard_base=False)
    cut = planner(folder, world_size=2, strategy="fsdp2", shard_base=True)
    need, least = whole.step_peak("recompute").bytes, cut.step_peak("recompute").bytes
    assert least < need
    fixed = sum(device_allowance("cuda", (8, 0), 0, 2).values())
    tight = planner(folder, world_size=2, memory={"budget": f"{int((need + least) / 2 * (1 + ROUNDING)) + fixed}B"})
    found = choose_strategy(tight)
    assert found.value == ("fsdp2", True)
    assert "does not fit" in found.reason
    asked = choose_strategy(replace(tight, strategy="fsdp2", simulations={}))
    assert asked.value == ("fsdp2", True)
    assert choose_strategy(planner(folder, world_size=2, strategy="fsdp2")).value.shard_base is False
    assert choose_strategy(replace(tight, strategy="ddp")).value.strategy == "ddp"
    plan = settled(tight)[0].plan(with_line=False)
    assert plan.strategy_reason == found.reason
    assert plan.phases["steady_step"].bytes == least


def test_json_and_text_of_a_shared_run(folder: Path) -> None:
    words = ["plan", str(folder), "--vram", "8GB", "--world-size", "4", "--strategy", "fsdp2", "--shard-base", "true",
             "--gpus-per-host", "2", "--tokens", "256", "memory.checkpoint=recompute"]  # fmt: skip
    result = CliRunner().invoke(app, [*words, "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["device"]["sharding"]["world_size"] == 4
    assert {"base", "adapters", "optimizer", "engine"} == set(found["device"]["sharding"]["held_bytes"])
    assert found["host"]["ranks"] == 2
    assert found["network"]["hosts"] == 2
    assert sum(found["network"]["sent_by_kind"].values()) == found["network"]["sent_bytes_per_step"]
    assert "2 hosts" in found["network"]["assumptions"][0]
    shown = CliRunner().invoke(app, words)
    assert "each of 4 ranks, fsdp2, base cut" in shown.stdout
    assert "a step: reduce-scatter of gradients" in shown.stdout
    one = json.loads(CliRunner().invoke(app, ["plan", str(folder), "--vram", "8GB", "--json", "--tokens", "64"]).stdout)
    assert one["network"] is None
    assert one["device"]["sharding"] is None
