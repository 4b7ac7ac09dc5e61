"""T06: the end-of-turn token: trained or not is said before training; an untrained embedding is named with a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from frugal.data import PreparedData, build
from frugal.files import read_json
from frugal.run.train import train
from tests.support.rows import byte_tokenizer, section, write_rows
from tests.support.tiny_models import tiny_model

SPECIALS = ("<pad>", "<eos>", "<user>", "<bot>", "<end>")
HEAD = "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot>"
TAIL = "{% else %}<user>{{ m['content'] }}<end>{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
INSIDE = HEAD + "{% generation %}{{ m['content'] }}<end>{% endgeneration %}" + TAIL
OUTSIDE = HEAD + "{% generation %}{{ m['content'] }}{% endgeneration %}<end>" + TAIL
UNMARKED = HEAD + "{{ m['content'] }}<end>" + TAIL
NO_END = HEAD + "{{ m['content'] }}\n\n" + TAIL


def _prepared(tmp_path: Path, template: str, **options) -> tuple[PreparedData, object]:
    tokenizer = byte_tokenizer(template, specials=SPECIALS, eos="<eos>", pad="<pad>")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": [*turns, *turns]}])
    return build(section(rows), tokenizer, seed=0, vocab_size=300, **options), tokenizer


@pytest.mark.parametrize("template", [INSIDE, UNMARKED])
def test_the_end_token_is_trained_and_the_line_says_so(tmp_path: Path, template: str) -> None:
    data, tokenizer = _prepared(tmp_path, template)
    report = data.template_report
    assert report.line == "answers end with <end>: trained yes"
    end = tokenizer.convert_tokens_to_ids("<end>")
    for row in data.train:
        assert row.input_ids[row.trained].tolist().count(end) == row.trained.sum() // 3  # y, o, <end>
    assert not any("NOT TRAINED" in warning for warning in report.warnings)


def test_an_end_token_outside_the_marks_warns_loudly(tmp_path: Path) -> None:
    data, tokenizer = _prepared(tmp_path, OUTSIDE)
    report = data.template_report
    assert report.line == "answers end with <end>: trained no"
    (loud,) = [warning for warning in report.warnings if "NOT TRAINED" in warning]
    assert "3 of 3 answers end with <end>" in loud
    assert "endgeneration" in loud
    assert tokenizer.convert_tokens_to_ids("<end>") not in data.train[0].input_ids[data.train[0].trained]


def test_a_template_without_an_end_token_warns_loudly(tmp_path: Path) -> None:
    data, _ = _prepared(tmp_path, NO_END)
    assert data.template_report.line == "answers end with no token: trained no"
    assert any("NOT TRAINED" in warning and "3 of 3" in warning for warning in data.template_report.warnings)


def test_both_end_tokens_are_stop_tokens(tmp_path: Path) -> None:
    data, tokenizer = _prepared(tmp_path, UNMARKED)
    report = data.template_report
    assert report.stop_tokens == ["<end>", "<eos>"]
    assert report.stop_ids == [tokenizer.convert_tokens_to_ids("<end>"), tokenizer.eos_token_id]
    assert any("<end>" in warning and "<eos>" in warning for warning in report.warnings)


def test_an_end_token_whose_embedding_was_never_trained_is_named_with_the_remedy(tmp_path: Path) -> None:
    end = SPECIALS.index("<end>")
    data, _ = _prepared(tmp_path, UNMARKED, zero_rows={end, 0})
    (warning,) = [warning for warning in data.template_report.warnings if "never trained" in warning]
    assert f"<end> (id {end}, first in " in warning
    assert "rows.jsonl:1)" in warning
    assert "modules_to_save" in warning
    assert not any("never trained" in warning for warning in _prepared(tmp_path, UNMARKED)[0].template_report.warnings)


def test_a_run_says_it_before_training_and_saves_the_stop_ids(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A base whose eos is another token than the template's end, with a row for that end that was never trained."""
    tokenizer = byte_tokenizer(UNMARKED, specials=SPECIALS, eos="<eos>", pad="<pad>")
    end = tokenizer.convert_tokens_to_ids("<end>")
    model = tiny_model("llama", vocab_size=len(tokenizer))
    with torch.no_grad():
        model.get_input_embeddings().weight[end] = 0
    model.save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}] * 4)
    train(
        {
            "model": {"base": str(tmp_path / "base")},
            "data": {"train": str(rows), "cache": False},
            "train": {"max_steps": 1},
            "output": {"dir": str(tmp_path / "run")},
        }
    )
    told = capsys.readouterr()
    lines = (told.out + told.err).splitlines()
    first_step = next(index for index, line in enumerate(lines) if line.startswith("step 1/1"))
    before = " ".join(lines[:first_step])
    assert "answers end with <end>: trained yes" in before
    assert f"<end> (id {end}, first in" in before
    assert "never trained" in before
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-1"):
        assert read_json(folder / "generation_config.json")["eos_token_id"][:2] == [end, tokenizer.eos_token_id]
