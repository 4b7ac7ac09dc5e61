"""Preference training under a strategy that cuts tensors is refused with exit code 2 before rows or base are read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from frugal.config import load_config
from frugal.distributed.launch import Launch
from frugal.errors import ConfigError, UnsupportedError
from frugal.run.sharing import refuse_pairs
from tests.distributed.ranks.harness import group_environment
from tests.support import runs

TWO = Launch("torchrun", 2, 2)


def written(folder: Path, strategy: str, name: str = "dpo") -> dict[str, object]:
    """A configuration whose rows are not even there."""
    made = runs.config(folder, folder / "no-rows.jsonl", folder / "run", objective={"name": name})
    return {**made, "distributed": {"strategy": strategy}}


@pytest.mark.parametrize("strategy", ["fsdp2", "zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", ["dpo", "orpo", "simpo", "kto"])
def test_a_configuration_that_asks_for_it_is_refused_as_it_is_read(tmp_path: Path, strategy: str, name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(written(tmp_path, strategy, name))
    assert caught.value.exit_code == 2
    said = str(caught.value)
    assert f"distributed.strategy: {strategy}" in said
    assert f"objective.name: {name}" in said
    assert "write distributed.strategy: ddp" in said


@pytest.mark.parametrize("strategy", ["fsdp2", "zero2"])
def test_sft_may_be_cut(tmp_path: Path, strategy: str) -> None:
    assert load_config(written(tmp_path, strategy, "sft")).distributed.strategy == strategy


def test_a_launcher_that_asks_for_it_is_refused(tmp_path: Path) -> None:
    """The way out is the launcher's: distributed.strategy: ddp would contradict it."""
    config = load_config(written(tmp_path, "auto"))
    for engine in ("fsdp2", "zero3"):
        with pytest.raises(UnsupportedError, match=f"accelerate was started for {engine}.*--multi_gpu") as caught:
            refuse_pairs(config, Launch("accelerate launch", 2, 2, engine))
        assert "distributed.strategy: ddp" not in str(caught.value)
    for launch in (TWO, Launch("none", 1, 1), Launch("accelerate launch", 2, 2, "ddp")):
        refuse_pairs(config, launch)
    refuse_pairs(load_config(written(tmp_path, "auto", "sft")), Launch("accelerate launch", 2, 2, "fsdp2"))


@pytest.mark.parametrize("strategy", ["fsdp2", "auto"])
def test_the_command_ends_with_2_and_reads_nothing(tiny_llama_folder: Path, tmp_path: Path, strategy: str) -> None:
    """One of two ranks: what is refused is refused before the ranks meet, or this one would wait for the other."""
    made = {**written(tmp_path, strategy), "model": {"base": str(tiny_llama_folder)}}
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    made["data"] = {"train": str(rows)}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(made))
    fsdp = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_MIXED_PRECISION": "no"}
    environment = group_environment(2, RANK="0", LOCAL_RANK="0", **(fsdp if strategy == "auto" else {}))
    done = subprocess.run(
        [sys.executable, "-m", "frugal", "train", str(tmp_path / "run.yaml")],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr[-2000:]
    assert "objective.name: dpo" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
