"""What is asked has the form that was trained: pairs on a chat base (F04), templates without a system turn (F11),
templates that print the time (F14), and the check of a run before it trains (kind 3)."""

from __future__ import annotations

import itertools
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from frugal.checkpoints.resume import run_clock, run_identity
from frugal.data import Message, PreparedData, build, encode_prompt
from frugal.data.dataset import DatasetCounts, check_balance
from frugal.errors import DataError
from frugal.inference.generate import as_messages, prompt_ids
from frugal.run.samples import asked_otherwise
from tests.support.rows import CHATML, byte_tokenizer, section, write_rows

ANSWERS = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
HEADER = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
REFUSES = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
SKIPS = ANSWERS.replace("in messages %}", "in messages if m['role'] != 'system' %}")
DATED = "<|system|>Today is {{ strftime_now('%Y-%m-%d %H:%M') }}{{ eos_token }}" + ANSWERS + HEADER
PAIR = {"prompt": "What is it?", "completion": "A lutz."}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]
NOON, LATER = datetime(2026, 11, 30, 12, 0), datetime(2026, 12, 1, 9, 30)


def prepared(
    folder: Path, rows: list[dict[str, Any]], template: str | None, **settings: Any
) -> tuple[PreparedData, Any]:
    """Rows as a run prepares them, and the tokenizer as it answers with it afterwards."""
    clock = settings.pop("clock", None)
    tokenizer = byte_tokenizer(template)
    path = write_rows(folder / "rows.jsonl", rows)
    data = build(section(path, max_length=4096, **settings), tokenizer, seed=0, vocab_size=300, clock=clock)
    if data.chat_template is not None:
        tokenizer.chat_template = data.chat_template
    return data, tokenizer


def is_prefix(asked: list[int], data: PreparedData, row: int = 0) -> bool:
    trained = data.train[row]
    answer = trained.input_ids[trained.trained].tolist()
    return [*asked, *answer] == trained.input_ids.tolist()[: len(asked) + len(answer)] and bool(answer)


@pytest.mark.parametrize("template", [CHATML, REFUSES + ANSWERS + HEADER, None])
@pytest.mark.parametrize("named", [None, "plain", "zephyr"])
def test_pairs_are_trained_as_chat_asks(tmp_path: Path, template: str | None, named: str | None) -> None:
    """F04: the ids that chat and samples send are a prefix of the trained ids, whatever the template is."""
    data, tokenizer = prepared(tmp_path, [PAIR], template, chat_template=named)
    assert is_prefix(prompt_ids(tokenizer, as_messages(PAIR["prompt"])), data)
    assert asked_otherwise(data, tokenizer, system_prompt=None, clock=None) == []
    told = " ".join(data.report.notes)
    assert ("turns of the chat template" in told) == (named == "zephyr" or (named is None and template is not None))
    assert ("no white space between" in told) == (named == "plain" or (named is None and template is None))


def test_pairs_with_system_text_and_tools(tmp_path: Path) -> None:
    """F04: `system` and `tools` of a pair are used with a template; without one the row is refused."""
    row = {**PAIR, "system": "Be brief.", "tools": TOOLS}
    data, tokenizer = prepared(tmp_path, [row], CHATML)
    assert is_prefix(
        encode_prompt(tokenizer, [Message("system", "Be brief."), Message("user", PAIR["prompt"])], TOOLS), data
    )
    with pytest.raises(DataError, match="need a chat template"):
        prepared(tmp_path, [row], None)


def test_a_rendered_prompt_stays_as_it_is(tmp_path: Path) -> None:
    """F04: a prompt that spells the template's own tokens is rendered already."""
    row = {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", "completion": "ho<|im_end|>"}
    data, tokenizer = prepared(tmp_path, [row, PAIR], CHATML)
    assert is_prefix(prompt_ids(tokenizer, as_messages("hi")), data)
    assert is_prefix(prompt_ids(tokenizer, as_messages(PAIR["prompt"])), data, 1)


@pytest.mark.parametrize("template", [REFUSES + ANSWERS + HEADER, SKIPS + HEADER])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_templates_without_a_system_turn(tmp_path: Path, template: str, own: bool, tools: Any) -> None:
    """F11: system text and tools stand before the first question, in training as when asking."""
    system = [{"role": "system", "content": "Be brief."}] if own else []
    turns = [*system, {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    data, tokenizer = prepared(
        tmp_path, [{"messages": turns, "tools": tools}], template, system_prompt=None if own else "Be brief."
    )
    asked = encode_prompt(tokenizer, [Message("user", "hi")], tools, system_prompt="Be brief.")
    assert is_prefix(asked, data)
    text = tokenizer.decode(asked)
    assert text.startswith("<|user|>Be brief.")
    assert text.endswith("\n\nhi<|im_end|><|assistant|>")
    assert ('"name": "f"' in text) == (tools is not None)
    assert any("no system turn" in note for note in data.report.notes)


def test_switches_count_the_turns_of_the_row(tmp_path: Path) -> None:
    """F11: a folded system turn does not shift which answers are trained."""
    turns = [
        {"role": "system", "content": "s"},
        *({"role": "user", "content": "q1"}, {"role": "assistant", "content": "one", "weight": 0}),
        *({"role": "user", "content": "q2"}, {"role": "assistant", "content": "two"}),
    ]
    data, tokenizer = prepared(tmp_path, [{"messages": turns}], REFUSES + ANSWERS + HEADER)
    row = data.train[0]
    assert tokenizer.decode(row.input_ids[row.trained].tolist()) == "two<|im_end|>"


def test_the_time_of_a_run_is_fixed(tmp_path: Path) -> None:
    """F14: the same clock makes the same rows at any time, and questions hold it; another clock makes others."""
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}]
    first, tokenizer = prepared(tmp_path, rows, DATED, clock=NOON)
    again, _ = prepared(tmp_path, rows, DATED, clock=NOON)
    other, _ = prepared(tmp_path, rows, DATED, clock=LATER)
    assert first.train[0].input_ids.tolist() == again.train[0].input_ids.tolist() != other.train[0].input_ids.tolist()
    assert "2026-11-30 12:00" in tokenizer.decode(first.train[0].input_ids.tolist())
    assert is_prefix(prompt_ids(tokenizer, as_messages("hi"), clock=NOON), first)
    assert any("2026-11-30 12:00" in note for note in first.report.notes)
    assert first.clock == NOON.isoformat()
    kept = run_identity({}, {}, "", clock=first.clock)
    assert run_clock(kept) == NOON  # what `--resume` prepares its rows with
    undated, _ = prepared(tmp_path, rows, CHATML, clock=NOON)
    assert undated.clock is None


def test_the_cache_knows_the_time_where_it_is_printed(tmp_path: Path) -> None:
    """F14: a year-old date is never read from the cache; a template without one is read at any time."""
    path = write_rows(tmp_path / "rows.jsonl", [PAIR])
    hits = []
    for template, clock in ((DATED, NOON), (DATED, LATER), (DATED, NOON), (CHATML, NOON), (CHATML, LATER)):
        settings = section(path, cache=True)
        data = build(
            settings, byte_tokenizer(template), seed=0, vocab_size=300, cache_dir=tmp_path / "cache", clock=clock
        )
        hits.append(data.cache_hits)
    assert hits == [0, 0, 1, 0, 1]


def test_another_form_is_said_before_training(tmp_path: Path) -> None:
    """Kind 3: a template whose question opens the answer with text that trained answers do not have."""
    opens = ANSWERS + "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
    data, tokenizer = prepared(tmp_path, [PAIR], opens)
    (said,) = asked_otherwise(data, tokenizer, system_prompt=None, clock=None)
    assert "another form" in said
    assert "<think>" in said


def test_a_tail_of_one_token_is_counted(tmp_path: Path) -> None:
    """U19: in = out + counted losses, for split texts, truncated pairs and packing; a lost token stops the run."""
    rows = [{"text": "abcdefgh"}, {"text": "abc"}, {"text": "a" * 40}, {"text": ""}]
    pairs = [{"prompt": "p", "completion": "c" * 20}, {"prompt": "p" * 20, "completion": "c"}]
    for length, packing, of_kind in itertools.product((8, 9, 10, 11, 16), (False, True), (rows, pairs)):
        path = write_rows(tmp_path / "rows.jsonl", of_kind)
        data = build(section(path, max_length=length, packing=packing), byte_tokenizer(None), seed=0, vocab_size=300)
        figures = data.report.figures["train"]
        lost = sum(figures.get(name, 0) for name in ("tokens_truncated", "tokens_in_tails"))
        assert figures["tokens_in"] == figures["tokens_out"] + lost + sum(drop.tokens for drop in data.report.drops)
        assert figures["rows_in"] == len(set(data.train.origins.tolist())) + data.report.rows_dropped()
    path = write_rows(tmp_path / "rows.jsonl", [{"text": "abcdefgh"}])
    data = build(section(path, max_length=8), byte_tokenizer(None), seed=0, vocab_size=300)
    assert data.report.figures["train"]["tokens_in_tails"] == 1
    with pytest.raises(DataError, match="9 tokens came in, 8 are in the rows"):
        check_balance(DatasetCounts(rows=1, tokens_in=9), data.train)
