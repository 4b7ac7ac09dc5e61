"""`build` as a whole: formats, truncation, splitting, held-out rows, weights, preference rows, the real tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from frugal.config import DataSection, SourceSection
from frugal.data import Message, build, encode_prompt
from frugal.data.dataset import DatasetCounts, fit
from frugal.data.tokenizer import TextEncoder
from frugal.errors import DataError, UnsupportedError
from tests.support.rows import byte_tokenizer, make_tokenizer, section, write_rows


def _text(tokenizer: Any, ids: np.ndarray) -> str:
    return str(tokenizer.decode(ids.tolist()))


def test_truncation_keeps_the_beginning() -> None:
    ids, trained = np.arange(10, dtype=np.int32), np.arange(10) >= 6
    fitted = fit(ids, trained, 8, "truncate", split=False)
    assert fitted.pieces[0][0].tolist() == list(range(8))
    assert fitted.pieces[0][1].tolist() == [False] * 6 + [True] * 2
    assert fitted.cut_tokens == 2
    assert not fitted.empty
    assert fit(ids, trained, 6, "truncate", split=False).empty_by_length
    assert fit(ids, trained, 9, "drop", split=False).pieces == []
    assert fit(ids, trained, 10, "drop", split=False).pieces[0][0].tolist() == list(range(10))


def test_long_texts_are_split_not_cut(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"text": "abcdefghijklmnopqrs"}, {"text": "xy"}])
    tokenizer = byte_tokenizer()
    data = build(section(rows, max_length=8), tokenizer, seed=0, vocab_size=300)
    assert [_text(tokenizer, row.input_ids) for row in data.train] == [
        "abcdefgh",
        "ijklmnop",
        "qrs<|im_end|>",
        "xy<|im_end|>",
    ]
    assert data.train.origins.tolist() == [0, 0, 0, 1]
    assert data.train.num_targets.tolist() == [7, 7, 3, 2]  # a row's first token has nothing before it
    assert any("1 long texts were split into 3 rows" in note for note in data.report.notes)
    assert data.template_report.line == "answers end with <|im_end|>: trained yes"


def test_held_out_rows_are_never_trained_not_even_as_copies(tmp_path: Path) -> None:
    rows = [{"prompt": f"p{number % 20}", "completion": "c"} for number in range(60)]  # each three times
    path = write_rows(tmp_path / "rows.jsonl", rows)
    for seed in range(5):
        data = build(section(path, eval_split=0.1), byte_tokenizer(), seed=seed, vocab_size=300)
        assert data.eval is not None
        assert len(data.eval) == 6
        held_out = {row.input_ids.tobytes() for row in data.eval}
        trained = [row.input_ids.tobytes() for row in data.train]
        assert not held_out & set(trained)
        assert len(held_out) == 2  # copies go together, so nothing is lost
        assert len(trained) == 54
        assert not data.report.drops
    other = write_rows(
        tmp_path / "eval.jsonl", [{"prompt": "p3", "completion": "c"}, {"prompt": "new", "completion": "c"}]
    )
    apart = build(section(path, eval=[{"path": str(other)}]), byte_tokenizer(), seed=0, vocab_size=300)
    assert len(apart.train) == 57
    assert [(drop.reason, drop.rows) for drop in apart.report.drops] == [("the same row is held out", 3)]
    again = build(section(path, eval_split=0.1), byte_tokenizer(), seed=4, vocab_size=300)
    assert again.eval is not None
    assert again.eval.input_ids.tolist() == data.eval.input_ids.tolist()


def test_weights_repeat_rows(tmp_path: Path) -> None:
    one = write_rows(tmp_path / "a.jsonl", [{"prompt": "a", "completion": "b"}])
    two = write_rows(tmp_path / "b.jsonl", [{"prompt": "c", "completion": "d"}])
    settings = DataSection(train=[SourceSection(path=str(one), weight=3), SourceSection(path=str(two))], cache=False)
    tokenizer = byte_tokenizer(None)
    data = build(settings, tokenizer, seed=0, vocab_size=300)
    assert [_text(tokenizer, row.input_ids)[:2] for row in data.train] == ["ab", "ab", "ab", "cd"]
    assert data.report.figures["train"] == {
        "rows_in": 4,
        "rows_out": 4,
        "tokens_in": 12,
        "tokens_out": 12,
        "tokens_trained": 8,
    }


def test_rows_that_the_template_refuses(tmp_path: Path) -> None:
    picky = (
        "{% for m in messages %}{% if m.content == 's' %}{{ raise_exception('Not this one') }}{% endif "
        "%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt "
        "%}<|im_start|>assistant\n{% endif %}"
    )
    good = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = write_rows(
        tmp_path / "r.jsonl", [{"messages": good}, {"messages": [{"role": "user", "content": "s"}, good[1]]}]
    )
    with pytest.raises(DataError) as refused:
        build(section(path), byte_tokenizer(picky), seed=0, vocab_size=300)
    assert "r.jsonl:2: the chat template (the tokenizer's own) cannot render it: Not this one" in str(refused.value)
    assert "on_bad_row: drop" in str(refused.value)
    data = build(section(path, on_bad_row="drop"), byte_tokenizer(picky), seed=0, vocab_size=300)
    assert len(data.train) == 1
    assert data.report.rows_dropped() == 1


def test_slow_tokenizers_are_refused_with_the_reason() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(UnsupportedError, match="which characters a token covers"):
        TextEncoder.from_tokenizer(Slow())


TEXTS = [
    "hello world",
    "  two  spaces",
    "",
    "naïve café 你好 🙂",
    "a\n\n b\t<|im_start|>user\nx<|im_end|>",
    "<|im_start|>",
]


@pytest.mark.parametrize("make", [byte_tokenizer, make_tokenizer], ids=["bytes", "bpe"])
def test_ids_are_those_of_the_tokenizer(make: Any) -> None:
    tokenizer = make()
    coded = TextEncoder.from_tokenizer(tokenizer).encode(TEXTS)
    for text, encoded in zip(TEXTS, coded, strict=True):
        assert encoded.ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert (np.diff(encoded.starts) >= 0).all()
        assert "".join(dict.fromkeys(text[a:b] for a, b in zip(encoded.starts, encoded.ends, strict=True))) or not text


def test_a_sentencepiece_like_tokenizer_keeps_its_ids_around_literal_tokens() -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(33, 127)]
    vocab = {name: index for index, name in enumerate(["<s>", "</s>", "▁", "\n", *letters, "▁h", "▁hi"])}
    core = Tokenizer(models.BPE(vocab, [("▁", "h"), ("▁h", "i")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = decoders.Metaspace()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    encoder = TextEncoder.from_tokenizer(tokenizer)
    text = "hi </s>hi</s>"
    (encoded,) = encoder.encode([text], literals=[[(3, 7)]])
    tokens = [encoder.token(int(token)) for token in encoded.ids]
    assert tokens == ["▁hi", "▁", "<", "/", "s", ">", "h", "i", "</s>"]
    assert [text[a:b] for a, b in zip(encoded.starts, encoded.ends, strict=True)] == [
        "hi",
        " ",
        "<",
        "/",
        "s",
        ">",
        "h",
        "i",
        "</s>",
    ]


def test_counts_survive_json() -> None:
    count = DatasetCounts(rows=3)
    count.lose("why", 2, 5)
    count.ends.ended["<end>"] += 2
    count.ends.untrained["<x>"] += 1
    assert DatasetCounts.from_json(count.to_json()) == count


@pytest.mark.model
def test_the_real_tokenizer(smollm2_folder: Path, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
    turns = [
        {"role": "user", "content": "What is 2+2? <|im_end|>"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "6"},
    ]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}, {"messages": turns[2:]}])
    data = build(section(rows), tokenizer, seed=0, vocab_size=49152)
    first, second = data.train[0], data.train[1]
    assert _text(tokenizer, first.input_ids[first.trained]) == "It is 4.<|im_end|>6<|im_end|>"
    assert _text(tokenizer, second.input_ids) == tokenizer.apply_chat_template(turns[2:], tokenize=False)
    stock = tokenizer.apply_chat_template(turns[2:3], add_generation_prompt=True, return_dict=False)
    assert second.input_ids.tolist()[: len(stock)] == stock == encode_prompt(tokenizer, [Message("user", "And 3+3?")])
    assert (
        first.input_ids == tokenizer.eos_token_id
    ).sum() == 5  # default system, 2 questions, 2 answers; not the text
    assert data.template_report.line == "answers end with <|im_end|>: trained yes"
