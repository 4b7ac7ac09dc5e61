"""T01: pad token = eos token. Masks follow lengths, so the real end token stays a target."""

from __future__ import annotations

import numpy as np

from frugal.data import TokenDataset, TokenRow, build, collate
from tests.support.rows import byte_tokenizer, section, write_rows


def _row(*ids: int) -> TokenRow:
    data = TokenDataset.from_documents([np.array(ids, np.int32)], [np.ones(len(ids), bool)], [0])
    return data[0]


def test_end_tokens_stay_targets_when_they_share_the_pad_id() -> None:
    batch = collate([_row(5, 6, 2), _row(7, 2)], pad_id=2, flat=False)
    assert batch["input_ids"].tolist() == [[5, 6, 2], [7, 2, 2]]
    # Nothing stands before a row's first token, so its label is never looked at: -100.
    assert batch["labels"].tolist() == [[-100, 6, 2], [-100, 2, -100]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_an_end_token_in_the_middle_of_a_row_stays_a_target() -> None:
    batch = collate([_row(5, 2, 6, 2), _row(7, 2)], pad_id=2, flat=False)
    assert batch["labels"].tolist() == [[-100, 2, 6, 2], [-100, 2, -100, -100]]


def test_flat_batches_have_no_padding_at_all() -> None:
    batch = collate([_row(5, 6, 2), _row(7, 2)], pad_id=2, flat=True)
    assert batch["input_ids"].tolist() == [[5, 6, 2, 7, 2]]
    assert batch["labels"].tolist() == [[-100, 6, 2, -100, 2]]


def test_prepared_rows_end_with_a_trained_end_token(tmp_path) -> None:
    tokenizer = byte_tokenizer(pad="<|im_end|>")
    rows = [{"prompt": "ab", "completion": "cd"}, {"prompt": "a", "completion": "b"}]
    data = build(section(write_rows(tmp_path / "rows.jsonl", rows)), tokenizer, seed=0, vocab_size=300)
    batch = collate(list(data.train), pad_id=tokenizer.pad_token_id, flat=False)
    end = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == end
    assert [row[row != -100].tolist()[-1] for row in batch["labels"]] == [end, end]
    assert (batch["labels"] == end).sum().item() == 2
