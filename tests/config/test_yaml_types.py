"""C01: YAML 1.1 reads 1e-4 as text, `no` as false and 12:30 as 750; a text stands where a list is meant."""

import pathlib

import pytest

from frugal.config import Config, load_config
from frugal.errors import ConfigError

BASE = "model: {base: m}\ndata: {train: rows.jsonl}\noutput: {dir: out}\n"


def load(tmp_path: pathlib.Path, text: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(BASE + text, encoding="utf-8")
    return load_config(path)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1e-4", 1e-4),
        ("2e-4", 2e-4),
        ("1.0e-4", 1e-4),
        ("1.0e+4", 1e4),
        ("3.0e4", 3e4),
        ("1e4", 1e4),
        ('"2e-4"', 2e-4),
        ("'0.0002'", 2e-4),
        ("1E-4", 1e-4),
        (".5", 0.5),
        ("+1e-4", 1e-4),
    ],
)
def test_numbers_are_numbers(tmp_path: pathlib.Path, written: str, meant: float) -> None:
    rate = load(tmp_path, f"train: {{learning_rate: {written}}}\n").train.learning_rate
    assert isinstance(rate, float)
    assert rate == meant
    from_override = load_config(tmp_path / "config.yaml", [f"train.learning_rate={written}"]).train.learning_rate
    assert from_override == meant
    sections = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}
    from_dict = load_config({**sections, "train": {"learning_rate": written.strip("\"'")}}).train.learning_rate
    assert from_dict == meant


def test_whole_numbers(tmp_path: pathlib.Path) -> None:
    train = load(tmp_path, 'train: {num_train_epochs: 1e0, max_steps: 1e3, seed: "7", logging_steps: 0x10}\n').train
    assert (train.num_train_epochs, train.max_steps, train.seed, train.logging_steps) == (1.0, 1000, 7, 16)
    assert isinstance(train.max_steps, int)


def test_every_bad_value_is_named_with_key_value_and_line(tmp_path: pathlib.Path) -> None:
    text = """\
train:
  learning_rate: 0.0002x
  seed: 010
  warmup_steps: 12:30
  max_steps: 2.5
  weight_decay: .inf
  adam_beta2: 1_0
lora:
  target_modules: q_proj,v_proj
  use_dora: no
"""
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("config.yaml: 8 faults")
    wanted = [
        "line 5: train.learning_rate: must be a number > 0, got '0.0002x'",
        "line 6: train.seed: must not start with a zero, got '010': write 10",
        "line 7: train.warmup_steps: must be a whole number >= 0, got '12:30'",
        "line 8: train.max_steps: must be a whole number >= 1, got 2.5",
        "line 9: train.weight_decay: must be a finite number, got '.inf'",
        "line 10: train.adam_beta2: must be a number >= 0 and < 1, got '1_0': write 10",
        "line 12: lora.target_modules: must be a list, got 'q_proj,v_proj': write [q_proj, v_proj]",
        "line 13: lora.use_dora: must be true or false, got 'no': write false",
    ]
    assert [line.strip() for line in lines[1:]] == wanted


def test_false_in_quotes_is_false(tmp_path: pathlib.Path) -> None:
    config = load(tmp_path, 'lora: {use_dora: "false", use_rslora: "true"}\n')
    assert config.lora.use_dora is False
    assert config.lora.use_rslora is True


@pytest.mark.parametrize("word", ["no", "off", "yes", "on", "12:30", "010", "1e5", "1.10", "2024-01-01"])
def test_plain_words_stay_text_in_text_fields(tmp_path: pathlib.Path, word: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"model: {{base: m, revision: {word}}}\ndata: {{train: rows.jsonl}}\noutput: {{dir: {word}}}\n")
    config = load_config(path)
    assert config.model.revision == word
    assert config.output.dir == word


def test_one_name_becomes_a_list_of_one(tmp_path: pathlib.Path) -> None:
    config = load(tmp_path, "lora: {target_modules: q_proj, modules_to_save: lm_head}\n")
    assert config.lora.target_modules == ["q_proj"]
    assert config.lora.modules_to_save == ["lm_head"]
    assert load_config(config, ["lora.target_modules=[q_proj, v_proj]"]).lora.target_modules == ["q_proj", "v_proj"]
    assert load_config(config, ["lora.target_modules=all-linear"]).lora.target_modules == "all-linear"
    pattern = r"model\.layers\.\d{1,2}\.self_attn\.(q|v)_proj"
    assert load_config(config, [f"lora.target_modules={pattern}"]).lora.target_modules == pattern
