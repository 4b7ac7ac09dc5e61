"""Every `auto` is resolved once, written to config.yaml with its reason and to the manifest."""

from __future__ import annotations

from pathlib import Path

import yaml

from frugal.checkpoints.run_folder import open_run
from frugal.config import load_config
from frugal.files import read_json
from frugal.run.train import train
from tests.support import runs


def test_config_yaml_and_manifest_say_what_auto_came_to(tiny_llama_folder: Path, tmp_path: Path) -> None:
    rows = runs.write_rows(tmp_path / "rows.jsonl")
    config = runs.config(tiny_llama_folder, rows, tmp_path / "run")
    config["train"]["max_steps"] = 2
    config["memory"] = {"checkpoint": "auto"}
    config["model"].pop("dtype", None)
    train(config)

    text = (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
    assert "  dtype: float32  # auto: CPU: " in text
    assert "  optimizer_in_backward: false  # auto: train." in text
    assert "  embedding: device  # auto: the device is the host" in text
    assert "  strategy: auto  # one process: one process" in text
    assert "  budget: auto  # " in text
    assert yaml.safe_load(text)["memory"]["checkpoint"] in ("none", "recompute", "disk")
    assert load_config(tmp_path / "run" / "config.yaml").model.dtype == "float32"

    manifest = read_json(tmp_path / "run" / "manifest.json")
    found = manifest["decisions"]["memory.checkpoint"]
    assert found["asked"] == "auto"
    assert found["why"] == "the fastest that fits"
    assert manifest["decisions"]["data.train.0.format"]["chosen"] == "messages"
    assert set(manifest["seconds"]) >= {"data", "load", "warm-up step", "training", "saving"}
    asked = manifest["config"]
    left = {f"{section}.{key}" for section in ("model", "memory", "distributed") for key in asked[section]
            if asked[section][key] == "auto"}  # fmt: skip
    assert left - {"memory.attention", "distributed.shard_base", "distributed.offload"} <= set(manifest["decisions"])
    # another machine may compute in another dtype
    opened = open_run(tmp_path / "run").config
    assert opened is not None
    assert opened.model.dtype == "auto"


def test_the_runs_own_config_resumes_it(tiny_llama_folder: Path, tmp_path: Path) -> None:
    rows = runs.write_rows(tmp_path / "rows.jsonl")
    config = runs.config(tiny_llama_folder, rows, tmp_path / "run")
    config["train"]["max_steps"] = 2
    config["output"]["save_steps"] = 1
    own = tmp_path / "run" / "config.yaml"
    train(config)
    as_decided = own.read_text(encoding="utf-8")
    assert "  dtype: float32  # auto: CPU: " in as_decided
    # a finished run: nothing to do, nothing written
    assert train(own, resume=True).steps == 2
    assert own.read_text(encoding="utf-8") == as_decided
    # step 2 once more: what the file has is now asked, not decided
    assert train(own, resume=tmp_path / "run" / "checkpoint-1").steps == 2
    assert "  dtype: float32\n" in own.read_text(encoding="utf-8")
