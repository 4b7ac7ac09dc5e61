"""Model cards: front matter that the hub reads, nothing of this machine, nothing from a model that becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from frugal.config import load_config
from frugal.exports.card import adapter_card
from frugal.exports.registry import merge
from tests.support.merged import make_run


def front_matter(card: str) -> dict[str, object]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_an_adapters_card(tmp_path: Path) -> None:
    base = tmp_path / "secret-place" / "tiny"
    base.mkdir(parents=True)
    (base / "README.md").write_text("---\nlicense: mit\n---\n# tiny\n")
    config = load_config(
        {"model": {"base": str(base)}, "data": {"train": "/home/me/rows.jsonl"}, "output": {"dir": "runs/mine"}}
    )
    samples = [{"prompt": "a | b", "before": "<img src=x>", "after": "`x`\n# heading"}]
    card = adapter_card(config, base_folder=base, account={"rows": 7}, result={"eval_loss": 1.25}, samples=samples)
    front = front_matter(card)
    assert front["base_model"] == "tiny"
    assert front["library_name"] == "peft"
    assert front["license"] == "mit"
    assert "base_model:adapter:tiny" in front["tags"]  # type: ignore[operator]
    assert "secret-place" not in card
    assert "/home/me" not in card
    assert "rows.jsonl" in card
    assert "| eval_loss | 1.25 |" in card
    assert "<img" not in card
    assert "\n# heading" not in card


@pytest.mark.parametrize(
    ("base", "line"),
    [
        ("smollm2-135m-instruct", 'from_pretrained(fetch("smollm2-135m-instruct"))'),  # no hub id: the hub has none
        ("org/model", 'from_pretrained("org/model")'),
    ],
)
def test_the_lines_of_an_adapters_card_find_the_base(base: str, line: str) -> None:
    config = {"model": {"base": base}, "data": {"train": "r"}, "output": {"dir": "runs/mine"}}
    card = adapter_card(load_config(config))
    (code,) = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    compile(code, "card", "exec")
    assert line in code
    assert ("from frugal import fetch" in code) == (base == "smollm2-135m-instruct")
    assert "bnb_4bit_use_double_quant=True" in card
    assert "BitsAndBytesConfig" not in adapter_card(load_config(config, ["model.quantize=none"]))


def test_a_merged_models_card(tiny_llama_folder: Path, tmp_path: Path) -> None:
    make_run(tmp_path / "run", tiny_llama_folder)
    merge(tmp_path / "run", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert front_matter(card)["library_name"] == "transformers"
    assert "differ by" in card
    assert "Do not quantise it back to 4 bits" in card
    report = json.loads((tmp_path / "out" / "merge_report.json").read_text())
    assert report["weights"] == "dequantized"
    for text in (card, json.dumps(report), (tmp_path / "out" / "config.json").read_text()):
        assert str(tmp_path) not in text
        assert str(tiny_llama_folder.parent) not in text
