"""N11: ids outside the embedding table are refused with row and id; ids whose row is all zero are named."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from frugal.data import build, collate
from frugal.errors import DataError
from tests.support.rows import section, write_rows

WORDS = ["<eos>", *(f"w{number}" for number in range(1, 32))]  # 32 ids


def _tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>")


def _rows(tmp_path: Path, *texts: str) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [{"text": text} for text in texts])


def test_padding_never_needs_an_id_of_its_own(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    assert tokenizer.pad_token_id is None
    data = build(section(_rows(tmp_path, "w1 w2 w3", "w4")), tokenizer, seed=0, vocab_size=32)
    batch = collate(list(data.train), pad_id=tokenizer.eos_token_id, flat=False)
    assert batch["input_ids"].max() < 32
    assert batch["labels"].tolist() == [[-100, 2, 3, 0], [-100, 0, -100, -100]]


def test_an_id_outside_the_table_is_refused_with_row_and_id(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    tokenizer.add_tokens([AddedToken("<new>", special=True)], special_tokens=True)
    assert tokenizer.convert_tokens_to_ids("<new>") == 32
    rows = _rows(tmp_path, "w1 w2", "w3 <new> w4", "<new>")
    with pytest.raises(DataError) as refused:
        build(section(rows), tokenizer, seed=0, vocab_size=32)
    message = str(refused.value)
    assert "rows.jsonl:2" in message
    assert "token id 32 (<new>)" in message
    assert "32 rows" in message
    assert "add_tokens" in message
    assert len(build(section(rows), tokenizer, seed=0, vocab_size=33).train) == 3


def test_text_that_the_tokenizer_has_no_tokens_for_is_counted(tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(["<eos>", "<unk>", "w1", "w2"])}
    core = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", unk_token="<unk>")
    data = build(section(_rows(tmp_path, "w1 w2", "w1 x w2 y")), tokenizer, seed=0, vocab_size=4)
    notes = [note for note in data.report.notes if "<unk>" in note]
    assert len(notes) == 1
    assert notes[0].startswith("train: 2 of 8 tokens are <unk>: text that the tokenizer has no tokens for")
    assert notes[0].endswith("rows.jsonl:2)")
    assert not build(section(_rows(tmp_path, "w1")), tokenizer, seed=0, vocab_size=4).report.notes


def test_ids_with_an_all_zero_row_are_named_with_the_rows_that_have_them(tmp_path: Path) -> None:
    rows = _rows(tmp_path, "w1 w2", "w3 w7", "w7 w9")
    data = build(section(rows), _tokenizer(), seed=0, vocab_size=32, zero_rows=[7, 9, 31])
    warnings = [warning for warning in data.template_report.warnings if "never trained" in warning]
    assert len(warnings) == 2
    assert "w7 (id 7, first in" in warnings[0]
    assert "rows.jsonl:2)" in warnings[0]
    assert "w9 (id 9, first in" in warnings[1]
    assert "rows.jsonl:3)" in warnings[1]
    later = build(section(rows), _tokenizer(), seed=0, vocab_size=32)
    assert later.untrained_token_warnings(_tokenizer(), [7, 9, 31]) == warnings


def test_the_check_holds_for_data_from_the_cache(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    settings = section(_rows(tmp_path, "w1 w30"), cache=True)
    build(settings, tokenizer, seed=0, vocab_size=32, cache_dir=tmp_path / "cache")
    with pytest.raises(DataError, match="token id 30"):
        build(settings, tokenizer, seed=0, vocab_size=30, cache_dir=tmp_path / "cache")
