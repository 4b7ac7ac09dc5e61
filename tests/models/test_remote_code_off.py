"""X03: remote code is off unless asked for. (Datasets and template sandboxing are tested with data preparation.)"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from frugal.errors import ModelError, UnsupportedError
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base
from frugal.models.tokenizer import load_tokenizer

CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
Path({marker!r}).write_text("ran")
class MarkerConfig(LlamaConfig):
    model_type = "marker_model"
class MarkerModel(LlamaForCausalLM):
    config_class = MarkerConfig
"""


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "marker"


@pytest.fixture
def folder(tiny_llama_folder: Path, tmp_path: Path, marker: Path) -> Path:
    """A model folder that brings a configuration and a model class of its own."""
    new = tmp_path / "marker_model_folder"
    shutil.copytree(tiny_llama_folder, new)
    (new / "marker_code.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((new / "config.json").read_text())
    config["model_type"] = "marker_model"
    config["architectures"] = ["MarkerModel"]
    config["auto_map"] = {"AutoConfig": "marker_code.MarkerConfig", "AutoModelForCausalLM": "marker_code.MarkerModel"}
    (new / "config.json").write_text(json.dumps(config))
    return new


def test_absent_and_false_refuse(folder: Path, marker: Path) -> None:
    for options in ({}, {"trust_remote_code": False}):
        with pytest.raises(UnsupportedError, match=r"its own Python code.*model\.trust_remote_code: true"):
            resolve_base(str(folder), **options)
    assert not marker.exists()


def test_an_explicit_true_runs_it_and_says_so(folder: Path, marker: Path) -> None:
    source = resolve_base(str(folder), trust_remote_code=True)
    assert source.trust_remote_code
    assert not marker.exists()  # finding the folder runs nothing
    loaded = load_base(source, trust_remote_code=True)
    assert marker.exists()
    assert loaded.report.remote_code
    assert any("trust_remote_code: true" in line for line in loaded.report.lines())
    assert loaded.report.as_dict()["remote_code"] is True


def test_code_beside_a_known_model_is_never_looked_at(tiny_llama_folder: Path, tmp_path: Path, marker: Path) -> None:
    """A folder may carry old code for a model that transformers has today: its own class is used."""
    new = tmp_path / "known"
    shutil.copytree(tiny_llama_folder, new)
    (new / "marker_code.py").write_text(CODE.format(marker=str(marker)))
    config = json.loads((new / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "marker_code.MarkerModel"}
    (new / "config.json").write_text(json.dumps(config))
    loaded = load_base(resolve_base(str(new)))
    assert type(loaded.model).__module__.startswith("transformers.")
    assert not loaded.report.remote_code
    assert not marker.exists()


def test_tokenizer_code(tiny_llama_folder: Path, tmp_path: Path, marker: Path) -> None:
    new = tmp_path / "tokenizer"
    shutil.copytree(tiny_llama_folder, new)
    code = f"from pathlib import Path\nPath({str(marker)!r}).write_text('ran')\n"
    (new / "marker_tokenizer.py").write_text(code + "class MarkerTokenizer:\n    pass\n")
    config = json.loads((new / "tokenizer_config.json").read_text())
    config["tokenizer_class"] = "MarkerTokenizer"
    config["auto_map"] = {"AutoTokenizer": [None, "marker_tokenizer.MarkerTokenizer"]}
    (new / "tokenizer_config.json").write_text(json.dumps(config))
    source = resolve_base(str(new))
    with pytest.raises((UnsupportedError, ModelError), match=r"Python code|cannot be loaded"):
        load_tokenizer(source, trust_remote_code=False)
    assert not marker.exists()


def test_pickles_are_never_read(tiny_llama_folder: Path, tmp_path: Path) -> None:
    new = tmp_path / "pickled"
    shutil.copytree(tiny_llama_folder, new)
    (new / "model.safetensors").rename(new / "pytorch_model.bin")
    with pytest.raises(UnsupportedError, match=r"pickles \(pytorch_model\.bin\)"):
        resolve_base(str(new))
