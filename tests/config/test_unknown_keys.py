"""C02: unknown, misplaced, hyphenated and duplicate keys are refused, all at once, before anything is loaded."""

import pathlib
import subprocess
import sys

import pytest

from frugal.config import Config, load_config
from frugal.errors import ConfigError

BASE = "model: {base: m}\ndata: {train: rows.jsonl}\noutput: {dir: out}\n"
WRONG = """\
learning_rate: 1e-4
train:
  num-epochs: 3
  lora_r: 8
  micro_batch_size: 4
  max_steps: 10
  max_steps: 20
lora:
  lora_ranl: 16
outptu: {}
"""


def load(tmp_path: pathlib.Path, text: str) -> Config:
    path = tmp_path / "config.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path)


def refused(tmp_path: pathlib.Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, text)
    return str(caught.value)


def test_every_bad_key_at_once_with_line_and_nearest_key(tmp_path: pathlib.Path) -> None:
    assert [line.strip() for line in refused(tmp_path, BASE + WRONG).splitlines()[1:]] == [
        "line 4: learning_rate: unknown key at the top level; it belongs in train: train.learning_rate",
        "line 6: train.num-epochs: unknown key in train; here it is called train.num_train_epochs",
        "line 7: train.lora_r: unknown key in train; here it is called lora.r",
        "line 8: train.micro_batch_size: unknown key in train; here it is called train.per_device_train_batch_size",
        "line 10: train.max_steps: given twice: in line 9 and again in line 10; keep one",
        "line 12: lora.lora_ranl: unknown key in lora; did you mean lora_rank? Here that is called lora.r",
        "line 13: outptu: unknown key at the top level; did you mean output?",
    ]


def test_the_command_leaves_with_2_before_anything_heavy_or_written(tmp_path: pathlib.Path) -> None:
    (tmp_path / "config.yaml").write_text(BASE + WRONG, encoding="utf-8")
    code = "import sys; sys.argv = ['frugal', 'train', 'config.yaml']\nfrom frugal.cli.main import main\n" + (
        "try:\n    main()\nfinally:\n    assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: config.yaml: 7 faults\n")
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_a_merge_anchor_may_repeat_keys(tmp_path: pathlib.Path) -> None:
    text = """\
x-small: &small {r: 4, lora_alpha: 8}
x-dropout: &dropout {r: 99, lora_dropout: 0.1}
lora:
  <<: [*small, *dropout]
  lora_alpha: 64
"""
    lora = load(tmp_path, BASE + text).lora
    assert (lora.r, lora.lora_alpha, lora.lora_dropout) == (4, 64, 0.1)


def test_a_wrong_key_of_an_anchor_is_named_at_its_own_line(tmp_path: pathlib.Path) -> None:
    message = refused(tmp_path, BASE + "x-small: &small\n  r: 4\n  lora_aplha: 5\nlora:\n  <<: *small\n")
    assert message.endswith("line 6: lora.lora_aplha: unknown key in lora; did you mean lora_alpha?")


def test_tabs(tmp_path: pathlib.Path) -> None:
    message = refused(tmp_path, "model:\n\tbase: m\n")
    assert message.endswith("config.yaml: line 2: indented with a tab; YAML wants spaces (two per level)")
    message = refused(tmp_path, "model:\n  base: m\n\tquantize: nf4\n")
    assert "line 3: indented with a tab" in message


def test_a_list_at_the_top(tmp_path: pathlib.Path) -> None:
    message = refused(tmp_path, "- model\n- data\n")
    sections = "model, lora, data, objective, train, memory, distributed, output"
    assert f"line 1: expected sections ({sections}), got a list at the top" in message


def test_keys_of_your_own_start_with_x(tmp_path: pathlib.Path) -> None:
    assert load(tmp_path, BASE + "x-notes:\n  anything: [1, two]\n").model.base == "m"
    assert "model.x-note: unknown key" in refused(tmp_path, BASE.replace("{base: m}", "{base: m, x-note: 1}"))


@pytest.mark.parametrize(
    ("key", "counterpart"),
    [
        ("micro_batch_size", "train.per_device_train_batch_size"),
        ("sequence_len", "data.max_length"),
        ("cutoff_len", "data.max_length"),
        ("max_seq_length", "data.max_length"),
        ("finetuning_type", "model.quantize"),
        ("num_epochs", "train.num_train_epochs"),
        ("lora_rank", "lora.r"),
        ("lora_target", "lora.target_modules"),
        ("load_in_4bit", "model.quantize: nf4"),
        ("per_device_batch_size", "train.per_device_train_batch_size"),
        ("base_model", "model.base"),
        ("model_name_or_path", "model.base"),
        ("gradient_checkpointing", "memory.checkpoint"),
        ("flash_attention", "memory.attention"),
        ("val_set_size", "data.eval_split"),
        ("sample_packing", "data.packing"),
        ("output_dir", "output.dir"),
        ("datasets", "data.train"),
        ("resume_from_checkpoint", "--resume"),
        ("bf16", "model.dtype: bfloat16"),
    ],
)
def test_keys_of_other_tools_name_their_counterpart(tmp_path: pathlib.Path, key: str, counterpart: str) -> None:
    message = refused(tmp_path, BASE + f"{key}: 1\n")
    assert f"line 4: {key}: unknown key at the top level" in message
    assert counterpart in message


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("stage: dpo", "write objective.name: sft, the default, dpo, orpo, simpo or kto. Do not drop rm or ppo"),
        ("lora_rank: 8", "here it is called lora.r (lora.lora_alpha stays at its default of 32 unless you set it"),
        ("finetuning_type: lora", "plain `lora` of other tools (16-bit weights) is model.quantize: none"),
        ("lora_target: all", "lora.target_modules (all of LLaMA-Factory is all-linear here)"),
        ("quantization_bit: 8", "8-bit storage is not built"),
        ("train: {report_to: none}", "train.report_to: must be a list of trackers, got 'none': write [] for none"),
        ("train: {report_to: [none]}", "write [] for none"),
        ("lora: {target_modules: all}", "got 'all': write all-linear"),
        ("lora: {target_modules: [all-linear]}", "write all-linear"),
    ],
)
def test_keys_whose_meaning_differs_say_how(tmp_path: pathlib.Path, line: str, said: str) -> None:
    """U09: a key that is renamed or dropped as told must not change what is trained."""
    assert said in refused(tmp_path, BASE + line + "\n")


def test_the_default_alpha_is_the_one_named() -> None:
    config = load_config({"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}})
    assert config.lora.lora_alpha == 32
