"""Tokenised rows in flat arrays: small in memory, mapped from the cache file, picked by number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from frugal.data.types import TokenRow


@dataclass(slots=True)
class TokenDataset:
    """Rows of token ids. A row is one document, or several packed ones."""

    input_ids: np.ndarray
    """int32 [tokens of all rows]"""
    trained: np.ndarray
    """bool [tokens of all rows]: True where the token itself is a target."""
    doc_starts: np.ndarray
    """int64 [documents + 1]: first token of each document."""
    row_docs: np.ndarray
    """int64 [rows + 1]: first document of each row."""
    origins: np.ndarray
    """int32 [documents]: index of the source example of each document."""

    @classmethod
    def from_documents(
        cls, ids: Sequence[np.ndarray], trained: Sequence[np.ndarray], origins: Sequence[int]
    ) -> TokenDataset:
        """One row a document. The first token of a document is never a target."""
        lengths = np.array([len(one) for one in ids], dtype=np.int64)
        starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        flat = np.concatenate([*trained, np.zeros(0, bool)]).astype(bool)
        flat[starts[:-1][lengths > 0]] = False
        return cls(
            input_ids=np.concatenate([*ids, np.zeros(0, np.int32)]).astype(np.int32),
            trained=flat,
            doc_starts=starts,
            row_docs=np.arange(len(lengths) + 1, dtype=np.int64),
            origins=np.array(origins, dtype=np.int32),
        )

    def __len__(self) -> int:
        return len(self.row_docs) - 1

    def __getitem__(self, row: int) -> TokenRow:
        """Row ``row`` as arrays that do not share memory with the data set."""
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row %= len(self)
        first, last = int(self.row_docs[row]), int(self.row_docs[row + 1])
        starts = self.doc_starts[first : last + 1]
        begin, end = int(starts[0]), int(starts[-1])
        return TokenRow(
            input_ids=np.array(self.input_ids[begin:end]),
            trained=np.array(self.trained[begin:end]),
            doc_starts=(starts - begin).astype(np.int32),
            origin=np.array(self.origins[first:last]),
        )

    def __iter__(self) -> Iterator[TokenRow]:
        return (self[row] for row in range(len(self)))

    @property
    def packed(self) -> bool:
        """True when some row holds several documents."""
        return len(self.origins) > len(self)

    @property
    def lengths(self) -> np.ndarray:
        """int64 [rows]: tokens of each row."""
        return np.diff(self.doc_starts[self.row_docs])

    @property
    def supervised(self) -> np.ndarray:
        """int64 [rows]: targets of each row."""
        total = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.trained, dtype=np.int64)])
        return np.diff(total[self.doc_starts[self.row_docs]])

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return len(self.input_ids)

    def grouped(self, groups: Sequence[Sequence[int]]) -> TokenDataset:
        """The same documents in rows of ``groups`` (document numbers, each once)."""
        order = np.array([document for group in groups for document in group], dtype=np.int64)
        bounds = [(int(self.doc_starts[document]), int(self.doc_starts[document + 1])) for document in order]
        lengths = np.array([end - begin for begin, end in bounds], dtype=np.int64)
        return TokenDataset(
            input_ids=np.concatenate([*(self.input_ids[begin:end] for begin, end in bounds), np.zeros(0, np.int32)]),
            trained=np.concatenate([*(self.trained[begin:end] for begin, end in bounds), np.zeros(0, bool)]),
            doc_starts=np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)]),
            row_docs=np.concatenate(
                [np.zeros(1, np.int64), np.cumsum([len(group) for group in groups], dtype=np.int64)]
            ),
            origins=self.origins[order],
        )
