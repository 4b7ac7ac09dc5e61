"""How a run is shared: from configuration, launcher and plan; what contradicts each other is an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from frugal.config import Config, load_config
from frugal.decision import Decision
from frugal.distributed.launch import Launch
from frugal.distributed.strategy import OneProcess
from frugal.errors import ConfigError
from frugal.planning.inputs import Planned
from frugal.planning.planner import Planner
from frugal.run.sharing import _choice, share
from frugal.run.train import train

ONE = Launch("none", 1, 1)
CPU = torch.device("cpu")


def config(folder: Path, **distributed: Any) -> Config:
    return load_config(
        {
            "model": {"base": str(folder)},
            "data": {"train": "rows.jsonl"},
            "output": {"dir": "run"},
            "distributed": distributed,
        }
    )


def planner(given: Config, folder: Path, **known: Any) -> Planner:
    dtype = Decision("model.dtype", torch.bfloat16, "test")
    device = Planned("cuda", 0, "test", 24 << 30, (8, 0), host_bytes=64 << 30, dtype=dtype)
    return Planner(given, device, AutoConfig.from_pretrained(folder), **known)


def test_one_process_shares_nothing(tiny_llama_folder: Path) -> None:
    given = config(tiny_llama_folder)
    found = share(given, ONE, planner(given, tiny_llama_folder), CPU)
    assert isinstance(found.strategy, OneProcess)
    assert found.planner.world_size == 1


def test_a_refusal_comes_before_anything_is_written(
    tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for distributed in ({"strategy": "fsdp2"}, {"shard_base": True}, {"offload": True}):
        with pytest.raises(ConfigError, match="distributed"):
            train(config(tiny_llama_folder, **distributed))  # its data file is not even there
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("distributed", "message"),
    [
        ({"strategy": "fsdp2"}, r"distributed\.strategy: fsdp2 shards a run over several processes, and there is one"),
        ({"strategy": "zero3"}, r"distributed\.strategy: zero3 shards a run over several processes"),
        ({"shard_base": True}, r"distributed\.shard_base is true, and one process keeps the base whole"),
        ({"offload": True}, r"distributed\.offload is true, and one process keeps everything on its device"),
    ],
)
def test_what_one_process_cannot_do_is_an_error(
    tiny_llama_folder: Path, distributed: dict[str, Any], message: str
) -> None:
    given = config(tiny_llama_folder, **distributed)
    with pytest.raises(ConfigError, match=message):
        share(given, ONE, planner(given, tiny_llama_folder), CPU)


@pytest.mark.parametrize(
    ("distributed", "message"),
    [
        ({"strategy": "ddp", "shard_base": True}, r"shard_base is true, and ddp keeps the base whole"),
        ({"strategy": "ddp", "offload": True}, r"offload is true, and ddp keeps everything on its device"),
        ({"strategy": "zero2", "shard_base": True}, r"shard_base is true, and zero2 keeps the base whole"),
        ({"strategy": "zero3", "shard_base": False}, r"shard_base is false, and zero3 cuts everything"),
    ],
)
def test_keys_that_a_strategy_cannot_serve(tiny_llama_folder: Path, distributed: dict[str, Any], message: str) -> None:
    given = config(tiny_llama_folder, **distributed)
    with pytest.raises(ConfigError, match=message):
        share(given, Launch("torchrun", 2, 2), planner(given, tiny_llama_folder), CPU)


def test_configuration_against_launcher(tiny_llama_folder: Path) -> None:
    given = config(tiny_llama_folder, strategy="ddp")
    with pytest.raises(ConfigError, match=r"distributed\.strategy: ddp, but accelerate was started for fsdp2"):
        share(given, Launch("accelerate launch", 2, 2, "fsdp2"), planner(given, tiny_llama_folder), CPU)


def test_a_base_that_cannot_be_planned_is_copied_or_cut_as_asked(tiny_llama_folder: Path) -> None:
    given = config(tiny_llama_folder)
    broken = planner(given, tiny_llama_folder, world_size=2)
    broken.architecture = None
    name, cut, reason = _choice(broken)
    assert (name, cut) == ("ddp", False)
    assert "no forecast for this model" in reason
    broken.shard_base = True
    assert _choice(broken)[:2] == ("fsdp2", True)
    broken.shard_base, broken.strategy = False, "fsdp2"
    assert _choice(broken)[:2] == ("fsdp2", False)
    broken.shard_base, broken.strategy = None, "zero3"
    assert _choice(broken)[:2] == ("zero3", True)
