"""E01: bf16 asked for on a GPU that has none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import frugal.run.train
from frugal.device import Device, needs_loss_scaling, resolve_dtype
from frugal.errors import UnsupportedError
from frugal.files import read_json
from tests.support import runs

T4 = Device("cuda", 0, "Tesla T4", 16 << 30, (7, 5))
A100 = Device("cuda", 0, "A100", 40 << 30, (8, 0))
CPU = Device("cpu", 0, "CPU", 16 << 30, None)


@pytest.mark.parametrize(
    ("device", "dtype", "scaling"),
    [(T4, torch.float16, True), (A100, torch.bfloat16, False), (CPU, torch.float32, False)],
)
def test_auto(device: Device, dtype: torch.dtype, scaling: bool) -> None:
    choice = resolve_dtype("auto", device)
    assert (choice.value, needs_loss_scaling(choice.value)) == (dtype, scaling)
    assert choice.reason


def test_explicit_bf16_on_a_t4_stops_with_the_line_to_change() -> None:
    with pytest.raises(UnsupportedError, match=r"Tesla T4 \(compute capability 7\.5\)") as caught:
        resolve_dtype("bfloat16", T4)
    assert "model.dtype: auto" in str(caught.value)
    assert "model.dtype: float32" in str(caught.value)


def test_explicit_choices_are_kept() -> None:
    assert resolve_dtype("bfloat16", A100).value is torch.bfloat16
    assert resolve_dtype("float16", A100).value is torch.float16
    assert resolve_dtype("float32", T4).value is torch.float32


def test_the_run_stops_before_anything_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A base that would have to be downloaded, on a T4: the dtype is refused first, and nothing is written."""
    monkeypatch.setattr("frugal.run.setup.device_of", lambda accelerator: T4)

    def looked(*args: object, **kwargs: object) -> None:
        raise AssertionError("the base was looked for")

    monkeypatch.setattr("frugal.run.train.open_base", looked)
    sections = {"data": {"train": "rows.jsonl"}, "output": {"dir": str(tmp_path / "run")}}
    with pytest.raises(UnsupportedError, match=r"model\.dtype: bfloat16"):
        frugal.run.train.train({"model": {"base": "someone/model", "dtype": "bfloat16"}, **sections})
    assert not (tmp_path / "run").exists()
    with pytest.raises(AssertionError, match="looked for"):  # auto goes on to the base
        frugal.run.train.train({"model": {"base": "someone/model"}, **sections})


def test_what_is_computed_in_is_said_and_kept(
    tiny_llama_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl", 4), tmp_path / "run")
    config["train"]["max_steps"] = 1
    frugal.run.train.train(config)
    text = "".join(capsys.readouterr())
    assert "compute float32 (CPU: " in text
    assert "adapters float32" in text
    chosen = read_json(tmp_path / "run" / "manifest.json")["implementations"]["compute dtype"]
    assert chosen["chosen"] == "float32"
    assert "CPU" in chosen["why"]
