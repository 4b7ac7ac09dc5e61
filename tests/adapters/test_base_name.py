"""The base that an adapter and its card name is one that a stranger can load (U08)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

import frugal.checkpoints.run_folder as run_folder
from frugal.adapters import save_adapter
from frugal.checkpoints.run_folder import open_run
from frugal.config import load_config
from frugal.errors import ModelError
from frugal.exports.card import adapter_card
from frugal.hub import public_base
from frugal.models.resolve import base_fingerprint
from tests.support.merged import make_run

HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"


def as_fetched(folder: Path, base: Path) -> Path:
    """``base`` as `frugal fetch` leaves a model."""
    shutil.copytree(base, folder)
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    content = {"name": "smollm2-135m-instruct", "files": files}
    (folder / "source.json").write_text(json.dumps(content))
    return folder


def test_names(tmp_path: Path, tiny_llama_folder: Path) -> None:
    snapshot = tmp_path / "models--org--a-model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    assert public_base(str(snapshot)) == "org/a-model"
    assert public_base(str(as_fetched(tmp_path / "cache", tiny_llama_folder))) == HUB_ID
    assert public_base("smollm2-135m-instruct") == HUB_ID
    for own in ("org/a-model", str(tmp_path), "models/mine"):
        assert public_base(own) == own


def test_adapter_and_card_of_a_fetched_base(
    tmp_path: Path, tiny_llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both name the original; frugal finds the fetched weights again where they are the trained ones."""
    base = as_fetched(tmp_path / "smollm2-135m-instruct-0.1.2-1", tiny_llama_folder)
    model = make_run(tmp_path / "run", base)
    save_adapter(model, tmp_path / "alone", base_fingerprint=base_fingerprint(base))
    written = json.loads((tmp_path / "alone" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == HUB_ID
    config = {"model": {"base": "smollm2-135m-instruct"}, "data": {"train": "r"}, "output": {"dir": "runs/x"}}
    front = yaml.safe_load(adapter_card(load_config(config), base_folder=base).split("---\n")[1])
    assert (front["base_model"], f"base_model:adapter:{HUB_ID}" in front["tags"]) == (HUB_ID, True)

    monkeypatch.setattr(run_folder, "cache_folder", lambda: tmp_path)
    monkeypatch.setattr("frugal.assets.cache_folder", lambda: tmp_path)
    assert open_run(tmp_path / "alone").base_source().path == base


def test_a_base_that_is_not_here(tmp_path: Path, tiny_llama_folder: Path) -> None:
    """What is missing, where it was, and the option that says where it is."""
    base = tmp_path / "gone"
    shutil.copytree(tiny_llama_folder, base)
    model = make_run(tmp_path / "run", base)
    save_adapter(model, tmp_path / "alone")
    shutil.rmtree(base)
    for folder in ("alone", "run"):
        with pytest.raises(ModelError, match=rf"{folder} was trained over .*gone \(a folder of the machine.*--base"):
            open_run(tmp_path / folder).base_source()
    assert open_run(tmp_path / "alone").base_source(tiny_llama_folder).path == tiny_llama_folder
