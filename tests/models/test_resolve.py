"""Where a base model comes from, and what is said when it cannot be had."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import errors as hub

from frugal.errors import ConfigError, ModelError, UnsupportedError
from frugal.models import resolve as source
from frugal.models.resolve import base_fingerprint, resolve_base


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(tiny_llama_folder, tmp_path / "model")
    return tmp_path / "model"


def test_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    source = resolve_base("model")
    assert (source.kind, source.path, source.reference) == ("folder", folder, str(folder))
    assert source.config().model_type == "llama"


@pytest.mark.parametrize(
    ("remove", "message"),
    [
        ("config.json", r"missing config\.json"),
        ("tokenizer.json tokenizer_config.json", "missing a tokenizer"),
        ("model.safetensors", r"missing model\.safetensors"),
    ],
)
def test_what_is_missing_is_named(folder: Path, remove: str, message: str) -> None:
    for name in remove.split():
        (folder / name).unlink()
    with pytest.raises(ModelError, match=message):
        resolve_base(str(folder))


def test_a_missing_shard_is_named(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00002.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"missing model-00002-of-00002\.safetensors"):
        resolve_base(str(folder))


@pytest.mark.parametrize(("name", "way_out"), [("m.gguf", "from_gguf"), ("pytorch_model.bin", "save_pretrained")])
def test_other_formats_are_refused_with_a_way_out(folder: Path, name: str, way_out: str) -> None:
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(UnsupportedError, match=way_out):
        resolve_base(str(folder))


def test_an_adapter_is_no_base(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")
    with pytest.raises(ModelError, match="holds an adapter"):
        resolve_base(str(folder))


def test_paths_names_and_revisions(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no folder \./nope"):
        resolve_base("./nope")
    with pytest.raises(ModelError, match="Did you mean smollm2-135m-instruct"):
        resolve_base("SmolLM2-135M-Instruct")
    with pytest.raises(ConfigError, match="is a data set"):
        resolve_base("chatterbot-corpus")
    with pytest.raises(ConfigError, match=r"model\.revision is for hub ids"):
        resolve_base(str(tmp_path), "main")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="is the file"):
        resolve_base(str(tmp_path / "file"))


def test_offline_and_not_cached(tmp_path: Path) -> None:
    """In a process of its own: the hub library reads HF_HUB_OFFLINE when it is imported."""
    code = (
        "from frugal.models.resolve import resolve_base\nfrom frugal.errors import ModelError\n"
        "try:\n    resolve_base('org/some-model')\nexcept ModelError as error:\n    print(error)"
    )
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "HF_HUB_OFFLINE is set" in done.stdout
    assert "hf download org/some-model" in done.stdout


def test_a_hub_that_cannot_be_reached_is_asked_once(tmp_path: Path) -> None:
    """A download by the hub library would try for half a minute and print every failure."""
    code = (
        "from frugal.models.resolve import resolve_base\nfrom frugal.errors import ModelError\n"
        "try:\n    resolve_base('org/some-model')\nexcept ModelError as error:\n    print(error)"
    )
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    environment.pop("HF_HUB_OFFLINE", None)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert "the hub cannot be reached" in done.stdout
    assert "Retry" not in done.stdout + done.stderr


def http(kind: type[Exception]) -> Exception:
    """A hub error as raised, without the HTTP response that its constructor wants."""
    return kind.__new__(kind, "from the hub")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (http(hub.GatedRepoError), "accept its licence"),
        (http(hub.RepositoryNotFoundError), "no model of this name"),
        (http(hub.RevisionNotFoundError), "no revision 'v2'"),
        (http(hub.RemoteEntryNotFoundError), "no config.json"),
        (hub.LocalEntryNotFoundError("no network"), "the hub cannot be reached"),
    ],
)
def test_hub_errors_say_what_to_do(error: Exception, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(source, "reachable", lambda: True)
    with pytest.raises(ModelError, match=message):
        resolve_base("org/model", "v2")


def test_a_hub_model_config_first_then_safetensors_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def one(name: str, file: str, **options: Any) -> str:
        calls.append(file)
        return str(folder / file)

    def all_of_it(name: str, **options: Any) -> str:
        calls.append(options["allow_patterns"])
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", one)
    monkeypatch.setattr(source, "reachable", lambda: True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", all_of_it)
    found = resolve_base("org/model")
    assert calls[0] == "config.json"
    assert not any("bin" in pattern or "py" in pattern for pattern in calls[1])
    assert (found.kind, found.reference) == ("hub", "org/model")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="no safetensors weights"):
        resolve_base("org/model")


def test_fingerprint(folder: Path, make_tiny_llama: Callable[..., Path]) -> None:
    first = base_fingerprint(folder)
    assert base_fingerprint(folder) == first
    assert base_fingerprint(make_tiny_llama()) == first
    assert base_fingerprint(make_tiny_llama(seed=2)) != first
    assert base_fingerprint(make_tiny_llama(num_hidden_layers=3)) != first
