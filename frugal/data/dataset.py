"""Tokenised rows in flat arrays: small in memory, mapped from the cache file, picked by number."""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from frugal.config import DataSection
from frugal.data.answer_ends import EndCount
from frugal.data.encode import EncodedRow
from frugal.data.report import DataReport
from frugal.data.rows import Example, TokenRow
from frugal.errors import DataError


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
    good: np.ndarray
    """bool [documents]: False where the row says that its answer is a bad one."""
    reference: np.ndarray | None = None
    """float64 [documents]: log-probabilities of the targets by the base, where a run computed them beforehand."""

    @classmethod
    def from_documents(
        cls,
        ids: Sequence[np.ndarray],
        trained: Sequence[np.ndarray],
        origins: Sequence[int],
        good: Sequence[bool] | None = None,
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
            good=np.ones(len(lengths), bool) if good is None else np.array(good, bool),
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
    def document_lengths(self) -> np.ndarray:
        """int64 [documents]: tokens of each document, whose positions count from 0."""
        return np.diff(self.doc_starts)

    @property
    def num_targets(self) -> np.ndarray:
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
            good=self.good[order],
        )


Overflow = Literal["truncate", "drop", "error"]


@dataclass(slots=True)
class Fitted:
    """What became of one row."""

    pieces: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """(ids, trained) of each document that goes to training."""
    cut_tokens: int = 0
    """Tokens that truncation took away."""
    tail_tokens: int = 0
    """Tokens of pieces that hold no target (a tail of one token has nothing before it to be predicted from)."""
    too_long: bool = False
    """The row was longer than allowed."""
    empty: bool = False
    """Nothing is left to train."""
    empty_by_length: bool = False
    """Nothing is left because truncation took the trained tokens."""


def fit(ids: np.ndarray, trained: np.ndarray, max_length: int, on_overflow: Overflow, *, split: bool) -> Fitted:
    """Apply `data.on_overflow` to one row.

    Args:
        ids: int32 [tokens].
        trained: bool [tokens].
        max_length: most tokens of a document.
        on_overflow: `truncate` keeps the beginning; `drop` and `error` leave the row out (the caller stops or counts).
        split: cut the row into pieces instead of truncating it (plain text: every piece is trained).
    """
    result = Fitted(too_long=len(ids) > max_length)
    if result.too_long and on_overflow != "truncate":
        return result
    step = max_length if split else max(len(ids), 1)
    pieces = [(ids[at : at + step], trained[at : at + step].copy()) for at in range(0, len(ids), step)]
    if result.too_long and not split:
        result.cut_tokens = len(ids) - max_length
        pieces = [(ids[:max_length], trained[:max_length])]
    for _, mask in pieces:
        mask[0] = False
    result.pieces = [(piece, mask) for piece, mask in pieces if mask.any()]
    result.empty = not result.pieces
    if not result.empty:  # a row without any piece is counted as a whole
        result.tail_tokens = sum(len(piece) for piece, mask in pieces if not mask.any())
    result.empty_by_length = result.empty and bool(trained.any()) and result.too_long
    return result


def pack(lengths: np.ndarray, max_length: int) -> list[list[int]]:
    """Rows of document numbers; rows by their first document, documents within a row in the file's order.

    Args:
        lengths: int [documents], each between 0 and ``max_length``.
        max_length: most tokens of a row.
    """
    if len(lengths) and int(np.max(lengths)) > max_length:
        raise ValueError(f"a document of {int(np.max(lengths))} tokens does not fit a row of {max_length}")
    order = np.argsort(-np.asarray(lengths, dtype=np.int64), kind="stable")
    rooms: list[int] = []  # sorted: amounts of room that some row has
    rows_with: dict[int, list[list[int]]] = defaultdict(list)
    rows: list[list[int]] = []
    for document in order.tolist():
        length = int(lengths[document])
        place = bisect.bisect_left(rooms, length)
        if place < len(rooms):
            room = rooms[place]
            row = rows_with[room].pop()
            if not rows_with[room]:
                rooms.pop(place)
        else:
            room, row = max_length, []
            rows.append(row)
        row.append(document)
        left = room - length
        if not rows_with[left]:
            bisect.insort(rooms, left)
        rows_with[left].append(row)
    return sorted(sorted(row) for row in rows)


def fill_rate(lengths: np.ndarray, rows: int, max_length: int) -> float:
    """Part of the packed rows' room that holds tokens."""
    return float(np.sum(lengths)) / (rows * max_length) if rows else 0.0


TOO_LONG = "longer than data.max_length"
EMPTY_BY_LENGTH = "nothing left to train after truncation"
EMPTY = "nothing to train"


@dataclass(slots=True)
class DroppedRows:
    """Rows left out for one reason."""

    rows: int = 0
    first: int = 0
    """Index of the first one's example."""
    tokens: int = 0


@dataclass(slots=True)
class DatasetCounts:
    """What happened to the rows of one part. Plain values: goes into the cache beside the tokens."""

    rows: int = 0
    tokens_in: int = 0
    losses: dict[str, DroppedRows] = field(default_factory=dict)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    split_rows: int = 0
    split_pieces: int = 0
    tail_tokens: int = 0
    literal_rows: int = 0
    literal_first: int = 0
    documents: int = 0
    fill: float = 0.0
    """Part of the packed rows' room that holds tokens; 0 when not packing."""
    ends: EndCount = field(default_factory=EndCount)

    def lose(self, reason: str, index: int, tokens: int) -> None:
        """Count one row."""
        loss = self.losses.setdefault(reason, DroppedRows(first=index))
        loss.rows += 1
        loss.tokens += tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        # Not asdict for all: it builds a Counter from pairs before Python 3.12, which counts the pairs.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        values["losses"] = {reason: asdict(loss) for reason, loss in self.losses.items()}
        ends = self.ends
        values["ends"] = {"answers": ends.answers, "ended": dict(ends.ended), "untrained": dict(ends.untrained)}
        return values

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> DatasetCounts:
        """The counts that ``to_json`` wrote."""
        ends = value["ends"]
        losses = {reason: DroppedRows(**loss) for reason, loss in value["losses"].items()}
        count = EndCount(ends["answers"], Counter(ends["ended"]), Counter(ends["untrained"]))
        return cls(**{**value, "losses": losses, "ends": count})


def build_dataset(
    rows: Sequence[EncodedRow], kinds: Sequence[str], data: DataSection
) -> tuple[TokenDataset, DatasetCounts]:
    """Documents of all rows under `max_length`, `on_overflow` and `packing`, and the counts.

    ``rows[i]`` and ``kinds[i]`` belong to example i; a row that is repeated by a weight is the same object.
    """
    count = DatasetCounts(rows=len(rows))
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    origins: list[int] = []
    for index, row in enumerate(rows):
        if row.fault:
            count.lose(row.fault, index, 0)
            continue
        count.tokens_in += len(row.ids)
        fitted = fit(row.ids, row.trained, data.max_length, data.on_overflow, split=kinds[index] == "text")
        if fitted.too_long and data.on_overflow != "truncate":
            count.lose(TOO_LONG, index, len(row.ids))
            continue
        if fitted.empty:
            count.lose(EMPTY_BY_LENGTH if fitted.empty_by_length else EMPTY, index, len(row.ids))
            continue
        if fitted.cut_tokens:
            count.truncated_rows += 1
            count.truncated_tokens += fitted.cut_tokens
        elif fitted.too_long:
            count.split_rows += 1
            count.split_pieces += len(fitted.pieces)
        count.tail_tokens += fitted.tail_tokens
        if row.literals:
            count.literal_first = count.literal_first if count.literal_rows else index
            count.literal_rows += 1
        count.ends.add(row)
        for piece, mask in fitted.pieces:
            ids.append(piece)
            trained.append(mask)
            origins.append(index)
    dataset = TokenDataset.from_documents(ids, trained, origins)
    count.documents = len(dataset)
    check_balance(count, dataset)
    if data.packing and len(dataset):
        lengths = dataset.lengths
        groups = pack(lengths, data.max_length)
        count.fill = fill_rate(lengths, len(groups), data.max_length)
        dataset = dataset.grouped(groups)
    return dataset, count


def check_balance(count: DatasetCounts, dataset: TokenDataset) -> None:
    """Raise DataError unless what came in is what goes out plus what was counted as left out, in rows and in tokens.

    Checked on every run: a row or token that vanishes uncounted is a fault of frugal, and training goes no further.
    """
    lost = count.losses.values()
    rows = (count.rows, len(set(dataset.origins.tolist())) + sum(loss.rows for loss in lost))
    left_out = count.truncated_tokens + count.tail_tokens + sum(loss.tokens for loss in lost)
    tokens = (count.tokens_in, dataset.tokens + left_out)
    for name, (came, told) in (("rows", rows), ("tokens", tokens)):
        if came != told:
            raise DataError(
                f"data preparation lost count: {came:,} {name} came in, {told:,} are in the rows or counted as left "
                "out. This is a fault of frugal; please report it with the data report."
            )


def report_counts(
    count: DatasetCounts,
    dataset: TokenDataset,
    examples: Sequence[Example],
    report: DataReport,
    data: DataSection,
    part: Literal["train", "eval"],
) -> None:
    """Write the counts into the report. Raises DataError where the policy says stop, or when no row is left."""
    _stop_where_asked(count, examples, data, part)
    for reason, loss in count.losses.items():
        report.drop(reason, where(examples[loss.first]), part=part, rows=loss.rows, tokens=loss.tokens)
    report.set(part, rows_in=count.rows, rows_out=len(dataset), tokens_in=count.tokens_in, tokens_out=dataset.tokens)
    report.set(part, tokens_trained=int(np.count_nonzero(dataset.trained)))
    if count.truncated_rows:
        report.set(part, rows_truncated=count.truncated_rows, tokens_truncated=count.truncated_tokens)
    if count.tail_tokens:
        report.set(part, tokens_in_tails=count.tail_tokens)
    if count.split_rows:
        report.note(f"{part}: {count.split_rows:,} long texts were split into {count.split_pieces:,} rows")
    if data.packing:
        report.set(part, documents=count.documents, packed_rows=len(dataset))
        report.note(f"{part}: packed rows are {100 * count.fill:.1f} % full")
    if count.literal_rows:
        report.note(
            f"{part}: {count.literal_rows:,} rows spell a special token of the template inside a message "
            f"(first: {where(examples[count.literal_first])}); it is tokenised as plain text there"
        )


def where(example: Example) -> str:
    """`file:line` of an example."""
    return f"{example.source}:{example.line}"


def _stop_where_asked(count: DatasetCounts, examples: Sequence[Example], data: DataSection, part: str) -> None:
    losses = count.losses
    for reason, loss in losses.items():
        head = f"{where(examples[loss.first])}: {reason}"
        if reason == TOO_LONG and data.on_overflow == "error":
            raise DataError(
                f"{head}: {loss.rows:,} of {count.rows:,} rows have more than {data.max_length:,} tokens. Raise "
                "data.max_length, or set data.on_overflow to truncate or drop."
            )
        if reason in (EMPTY, EMPTY_BY_LENGTH) and data.on_empty == "error":
            raise DataError(
                f"{head} ({loss.rows:,} of {count.rows:,} rows). {_cause(reason, data)} data.on_empty: drop leaves "
                "such rows out and counts them."
            )
        if reason not in (TOO_LONG, EMPTY, EMPTY_BY_LENGTH) and data.on_bad_row == "error":
            raise DataError(
                f"{head} ({loss.rows:,} of {count.rows:,} rows). Correct the rows, set data.chat_template to a "
                "template that takes them, or set data.on_bad_row: drop to leave them out and count them."
            )
    if count.rows and not count.documents:
        reason, loss = max(losses.items(), key=lambda item: item[1].rows)
        raise DataError(
            f"{part}: no row is left to train on. {loss.rows:,} of {count.rows:,} rows: {reason}, first "
            f"{where(examples[loss.first])}. {_cause(reason, data)}"
        )


def _cause(reason: str, data: DataSection) -> str:
    if reason in (EMPTY_BY_LENGTH, TOO_LONG):
        return f"The cause is the length: data.max_length is {data.max_length:,} tokens. Raise it."
    if reason == EMPTY:
        return (
            "The cause is the mask: no text of these rows is an answer to train (conversations without an assistant "
            "turn, turns switched off, or a chat template whose {% generation %} block encloses nothing)."
        )
    return "The cause is the chat template: set data.chat_template to one that takes these rows."
