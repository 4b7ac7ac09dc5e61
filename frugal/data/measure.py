"""Prepared rows to documents of training, and the counts of everything that was left out on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

import numpy as np

from frugal.config import DataSection
from frugal.data.account import Account
from frugal.data.dataset import TokenDataset
from frugal.data.pack import fill_rate, pack
from frugal.data.preflight import EndCount
from frugal.data.prepare import PreparedRow
from frugal.data.truncate import fit
from frugal.data.types import Example
from frugal.errors import DataError

TOO_LONG = "longer than data.max_length"
EMPTY_BY_LENGTH = "nothing left to train after truncation"
EMPTY = "nothing to train"


@dataclass(slots=True)
class Loss:
    """Rows left out for one reason."""

    rows: int = 0
    first: int = 0
    """Index of the first one's example."""
    tokens: int = 0


@dataclass(slots=True)
class SetCount:
    """What happened to the rows of one part. Plain values: goes into the cache beside the tokens."""

    rows: int = 0
    tokens_in: int = 0
    losses: dict[str, Loss] = field(default_factory=dict)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    split_rows: int = 0
    split_pieces: int = 0
    literal_rows: int = 0
    literal_first: int = 0
    documents: int = 0
    fill: float = 0.0
    """Part of the packed rows' room that holds tokens; 0 when not packing."""
    ends: EndCount = field(default_factory=EndCount)

    def lose(self, reason: str, index: int, tokens: int) -> None:
        """Count one row."""
        loss = self.losses.setdefault(reason, Loss(first=index))
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
    def from_json(cls, value: dict[str, Any]) -> SetCount:
        """The counts that ``to_json`` wrote."""
        ends = value["ends"]
        losses = {reason: Loss(**loss) for reason, loss in value["losses"].items()}
        count = EndCount(ends["answers"], Counter(ends["ended"]), Counter(ends["untrained"]))
        return cls(**{**value, "losses": losses, "ends": count})


def to_dataset(rows: Sequence[PreparedRow], kinds: Sequence[str], data: DataSection) -> tuple[TokenDataset, SetCount]:
    """Documents of all rows under `max_length`, `on_overflow` and `packing`, and the counts.

    ``rows[i]`` and ``kinds[i]`` belong to example i; a row that is repeated by a weight is the same object.
    """
    count = SetCount(rows=len(rows))
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
    if data.packing and len(dataset):
        lengths = dataset.lengths
        groups = pack(lengths, data.max_length)
        count.fill = fill_rate(lengths, len(groups), data.max_length)
        dataset = dataset.grouped(groups)
    return dataset, count


def enter_account(
    count: SetCount,
    dataset: TokenDataset,
    examples: Sequence[Example],
    account: Account,
    data: DataSection,
    part: Literal["train", "eval"],
) -> None:
    """Write the counts into the account. Raises DataError where the policy says stop, or when no row is left."""
    _stop_where_asked(count, examples, data, part)
    for reason, loss in count.losses.items():
        account.drop(reason, where(examples[loss.first]), part=part, rows=loss.rows, tokens=loss.tokens)
    account.set(part, rows_in=count.rows, rows_out=len(dataset), tokens_in=count.tokens_in, tokens_out=dataset.tokens)
    account.set(part, tokens_trained=int(np.count_nonzero(dataset.trained)))
    if count.truncated_rows:
        account.set(part, rows_truncated=count.truncated_rows, tokens_truncated=count.truncated_tokens)
    if count.split_rows:
        account.note(f"{part}: {count.split_rows:,} long texts were split into {count.split_pieces:,} rows")
    if data.packing:
        account.set(part, documents=count.documents, packed_rows=len(dataset))
        account.note(f"{part}: packed rows are {100 * count.fill:.1f} % full")
    if count.literal_rows:
        account.note(
            f"{part}: {count.literal_rows:,} rows spell a special token of the template inside a message "
            f"(first: {where(examples[count.literal_first])}); it is tokenised as plain text there"
        )


def where(example: Example) -> str:
    """`file:line` of an example."""
    return f"{example.source}:{example.line}"


def _stop_where_asked(count: SetCount, examples: Sequence[Example], data: DataSection, part: str) -> None:
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
                f"{head} ({loss.rows:,} of {count.rows:,} rows). {_cause(reason, data)} data.on_empty: drop "
                f"leaves such "
                "rows out and counts them."
            )
        if reason not in (TOO_LONG, EMPTY, EMPTY_BY_LENGTH) and data.on_bad_row == "error":
            raise DataError(
                f"{head} ({loss.rows:,} of {count.rows:,} rows). Correct the rows, set data.chat_template to a "
                f"template "
                "that takes them, or set data.on_bad_row: drop to leave them out and count them."
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
            "The cause is the mask: no text of these rows is an answer to train (conversations without an "
            "assistant turn, "
            "turns switched off, or a chat template whose {% generation %} block encloses nothing)."
        )
    return "The cause is the chat template: set data.chat_template to one that takes these rows."
