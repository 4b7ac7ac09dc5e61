"""The tokenizer: a pad token inside the table, added tokens, templates, rows that were never trained."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from frugal.errors import ConfigError
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base
from frugal.models.tokenizer import choose_pad, load_tokenizer, new_token_ids, rows_needed, zero_embedding_rows
from tests.conftest import make_tokenizer


def test_own_pad_is_kept(tiny_llama_folder: Path) -> None:
    tokenizer = load_tokenizer(resolve_base(str(tiny_llama_folder)))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<|endoftext|>", 0)


def test_no_pad_takes_the_end_token(make_tiny_llama: Callable[..., Path]) -> None:
    tokenizer = load_tokenizer(resolve_base(str(make_tiny_llama(pad=False))))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2


def test_a_spare_token_is_preferred_and_padding_names_come_first() -> None:
    tokenizer = make_tokenizer(pad=False)
    tokenizer.add_tokens(["<|reserved_0|>", "<|fim_pad|>"], special_tokens=True)
    choice = choose_pad(tokenizer, 302)
    assert choice.value == "<|fim_pad|>"
    assert choose_pad(tokenizer, 301).value == "<|reserved_0|>"  # the other has no row
    tokenizer.chat_template += "<|fim_pad|>"  # the template needs it: not spare
    assert choose_pad(tokenizer, 302).value == "<|reserved_0|>"


def test_a_pad_token_outside_the_table_is_not_used() -> None:
    """N11 (1): the classic pad id 32000 with 32000 rows."""
    tokenizer = make_tokenizer(pad=False)
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 300
    choice = choose_pad(tokenizer, 300)
    assert tokenizer.convert_tokens_to_ids(choice.value) < 300
    assert "has no row in the table of 300" in choice.reason


@pytest.mark.parametrize("table", [300, 320])
def test_added_tokens_and_rows(make_tiny_llama: Callable[..., Path], table: int) -> None:
    """A padded table has room already; a tight one grows. Old rows stay bit for bit."""
    folder = make_tiny_llama(vocab_size=table)
    source = resolve_base(str(folder))
    tokenizer = load_tokenizer(source, add_tokens=["<|call|>", "<|end|>"])
    assert new_token_ids(tokenizer, ["<|call|>", "<|end|>"]) == [300, 301]
    assert tokenizer("a<|call|>b<|end|>")["input_ids"].count(300) == 1
    rows = rows_needed(tokenizer, source.config())
    assert rows == max(table, 302)
    before = load_base(source).model.get_input_embeddings().weight
    loaded = load_base(source, vocab_size=rows)
    after = loaded.model.get_input_embeddings().weight
    assert after.shape[0] == rows
    assert torch.equal(after[:table], before)
    assert loaded.model.get_output_embeddings().weight is after
    assert loaded.model.config.vocab_size == rows
    assert loaded.report.resized_rows == (None if table == 320 else (300, 302))
    if table == 300:
        torch.testing.assert_close(after[300:], before.mean(dim=0).expand(2, -1))
    with torch.no_grad():
        assert loaded.model(torch.tensor([[5, 300, 301]])).logits.shape[-1] == rows


def test_blank_and_double_tokens_are_refused(tiny_llama_folder: Path) -> None:
    for tokens in ([" "], ["<a>", "<a>"]):
        with pytest.raises(ConfigError, match=r"model\.add_tokens"):
            load_tokenizer(resolve_base(str(tiny_llama_folder)), add_tokens=tokens)


def test_a_template_of_ones_own_is_used_and_saved(tiny_llama_folder: Path, tmp_path: Path) -> None:
    template = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}"
    tokenizer = load_tokenizer(resolve_base(str(tiny_llama_folder)), chat_template=template)
    tokenizer.save_pretrained(tmp_path)
    again = type(tokenizer).from_pretrained(tmp_path)
    assert again.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "[user]hi"


def test_zero_rows_are_found(tiny_llama_folder: Path) -> None:
    """N11 (3): rows that were never trained, named before training."""
    model = load_base(resolve_base(str(tiny_llama_folder))).model
    assert zero_embedding_rows(model) == [0]  # the pad token's row, which transformers starts at zero
    with torch.no_grad():
        weight = model.get_input_embeddings().weight
        weight[[7, 299]] = 0
        weight[40, 3] = float("nan")
    assert zero_embedding_rows(model) == [0, 7, 40, 299]
    assert zero_embedding_rows(model, chunk_rows=16) == [0, 7, 40, 299]
