"""P01, data part: positions restart, a document's first token is no target, documents' limits travel with the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from frugal.data import TokenDataset, build, collate
from frugal.data.dataset import pack
from tests.support.rows import byte_tokenizer, section, write_rows


def _packed(*lengths: int) -> TokenDataset:
    ids = [np.arange(10 * number, 10 * number + length, dtype=np.int32) for number, length in enumerate(lengths, 1)]
    data = TokenDataset.from_documents(ids, [np.ones(length, bool) for length in lengths], list(range(len(lengths))))
    return data.grouped([list(range(len(lengths)))])


def test_rows_of_three_and_two_tokens() -> None:
    batch = collate(list(_packed(3, 2)), pad_id=0, flat=True)
    assert batch["input_ids"].tolist() == [[10, 11, 12, 20, 21]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]
    assert batch["labels"].tolist() == [[-100, 11, 12, -100, 21]]
    assert batch["cu_seq_lens_q"].tolist() == batch["cu_seq_lens_k"].tolist() == [0, 3, 5]
    assert batch["cu_seq_lens_q"].dtype == torch.int32
    assert (batch["max_length_q"], batch["max_length_k"]) == (3, 3)


def test_documents_of_one_token_have_no_target() -> None:
    batch = collate(list(_packed(1, 1, 2)), pad_id=0, flat=True)
    assert batch["position_ids"].tolist() == [[0, 0, 0, 1]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 31]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 1, 2, 4]


def test_several_packed_rows_make_one_line_of_tokens() -> None:
    row = _packed(3, 2)[0]
    batch = collate([row, row], pad_id=0, flat=False)  # packed rows are always flat: padding would hide the limits
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 5, 8, 10]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1] * 2]


def test_padded_and_flat_batches_hold_the_same_targets() -> None:
    data = TokenDataset.from_documents(
        [np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)], [np.ones(3, bool), np.ones(2, bool)], [0, 1]
    )
    flat, padded = collate(list(data), 0, flat=True), collate(list(data), 0, flat=False)
    for batch in (flat, padded):
        assert batch["labels"][batch["labels"] != -100].tolist() == [2, 3, 5]
    assert padded["position_ids"][:, :2].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("seed", range(5))
def test_packing_splits_nothing_and_loses_nothing(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 65, 500)
    rows = pack(lengths, 64)
    assert sorted(document for row in rows for document in row) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= 64
    # Best-fit decreasing uses at most 11/9 of the best possible number of rows, plus one.
    assert len(rows) <= 11 / 9 * np.ceil(lengths.sum() / 64) + 1
    assert rows == pack(lengths, 64)


def test_packed_data_of_a_run(tmp_path) -> None:
    rows = [{"prompt": "a" * size, "completion": "b"} for size in (5, 9, 3, 14, 6)]
    plain = section(write_rows(tmp_path / "rows.jsonl", rows), max_length=16)
    tokenizer = byte_tokenizer(None)
    loose = build(plain, tokenizer, seed=0, vocab_size=300)
    packed = build(plain.model_copy(update={"packing": True}), tokenizer, seed=0, vocab_size=300)
    assert loose.train.lengths.tolist() == [7, 11, 5, 16, 8]
    assert packed.train.lengths.tolist() == [15, 16, 16]
    assert [row.origin.tolist() for row in packed.train] == [[0, 4], [1, 2], [3]]
    assert packed.train.num_targets.sum() == loose.train.num_targets.sum() == 10
    for row in packed.train:
        for number, (begin, end) in enumerate(zip(row.doc_starts[:-1], row.doc_starts[1:], strict=True)):
            alone = loose.train[int(row.origin[number])]
            assert row.input_ids[begin:end].tolist() == alone.input_ids.tolist()
            assert row.trained[begin:end].tolist() == alone.trained.tolist()
    assert packed.report.figures["train"]["packed_rows"] == 3
    assert any("97.9 % full" in note for note in packed.report.notes)
