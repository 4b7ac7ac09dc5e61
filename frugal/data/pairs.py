"""Preference rows to pairs of documents: checked, shortened without losing an answer, two documents a row.

A pair that is too long loses its prompt first, from the left: whole turns of a conversation (never its system text, nor
the last question), tokens of a plain text. Both answers keep the same prompt. What is still too long is cut at the
end of the answers; a pair of which nothing is left to compare is dropped and counted.

A single answer with a verdict goes the same way; its row holds its own document and one of its prompt with the answer
of another row, from which KTO estimates how far the adapter has gone from the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from frugal.config import DataSection
from frugal.data.dataset import (
    EMPTY,
    EMPTY_BY_LENGTH,
    TOO_LONG,
    DatasetCounts,
    TokenDataset,
    check_balance,
    fit,
)
from frugal.data.encode import EncodedRow, RowEncoder
from frugal.data.rows import Example, Message

SAME = "chosen and rejected are the same"


@dataclass(slots=True)
class EncodedPair:
    """Both answers of a row as tokens, each behind the prompt."""

    chosen: EncodedRow
    rejected: EncodedRow
    tokens: int
    """Of both, before the prompt was shortened."""
    fault: str = ""
    """Why the pair cannot be used; empty for a good one."""

    @property
    def both(self) -> tuple[EncodedRow, EncodedRow]:
        """Chosen, rejected."""
        return self.chosen, self.rejected

    @property
    def longest(self) -> int:
        """Tokens of the longer one."""
        return max(len(row.ids) for row in self.both)


def encode_pairs(encoder: RowEncoder, examples: Sequence[Example], data: DataSection) -> list[EncodedPair]:
    """Pairs in the order of the examples, their prompts short enough for `data.max_length` where that can be."""
    found = []
    for example, (chosen, rejected) in zip(examples, encoder.preferences(examples), strict=True):
        pair = EncodedPair(chosen, rejected, len(chosen.ids) + len(rejected.ids))
        pair.fault = chosen.fault or rejected.fault or _fault(example, pair)
        if not pair.fault and pair.longest > data.max_length and data.on_overflow == "truncate":
            _shorten_prompt(pair, encoder, example, data.max_length)
        found.append(pair)
    return found


def build_pairs(pairs: Sequence[EncodedPair], data: DataSection) -> tuple[TokenDataset, DatasetCounts]:
    """One row a pair, of two documents: chosen, rejected. Counts are of pairs, and of the tokens of both."""
    count = DatasetCounts(rows=len(pairs))
    ids: list[np.ndarray] = []
    trained: list[np.ndarray] = []
    origins: list[int] = []
    for index, pair in enumerate(pairs):
        if pair.fault:
            count.lose(pair.fault, index, 0)
            continue
        count.tokens_in += pair.tokens
        fitted = [fit(row.ids, row.trained, data.max_length, data.on_overflow, split=False) for row in pair.both]
        too_long = any(one.too_long for one in fitted)
        if too_long and data.on_overflow != "truncate":
            count.lose(TOO_LONG, index, pair.tokens)
            continue
        pieces = [piece for one in fitted for piece in one.pieces]
        if len(pieces) < 2 or np.array_equal(pieces[0][0], pieces[1][0]):
            shortened = too_long or sum(len(row.ids) for row in pair.both) < pair.tokens
            count.lose(EMPTY_BY_LENGTH if shortened else EMPTY, index, pair.tokens)
            continue
        kept = sum(len(piece) for piece, _ in pieces)
        if kept < pair.tokens:
            count.truncated_rows += 1
            count.truncated_tokens += pair.tokens - kept
        if any(row.literals for row in pair.both):
            count.literal_first = count.literal_first if count.literal_rows else index
            count.literal_rows += 1
        for row, (piece, mask) in zip(pair.both, pieces, strict=True):
            count.ends.add(row)
            ids.append(piece)
            trained.append(mask)
            origins.append(index)
    documents = TokenDataset.from_documents(ids, trained, origins)
    count.documents = len(documents)
    check_balance(count, documents)
    return documents.grouped([(at, at + 1) for at in range(0, len(documents), 2)]), count


def build_judged(
    pairs: Sequence[EncodedPair], good: Sequence[bool], data: DataSection
) -> tuple[TokenDataset, DatasetCounts]:
    """One row a judged answer, of two documents: its own, and its prompt with the answer of another row.

    The other is the nearest row before it (before the first stands the last) with another prompt: TRL's rotation, over
    all rows instead of a micro-batch, so that no batch size changes it. Counts are of the rows' own documents.
    """
    count = DatasetCounts(rows=len(pairs))
    own: list[tuple[np.ndarray, np.ndarray, int]] = []
    for index, pair in enumerate(pairs):
        row = pair.chosen
        if pair.fault:
            count.lose(pair.fault, index, 0)
            continue
        tokens = pair.tokens // 2
        count.tokens_in += tokens
        fitted = fit(row.ids, row.trained, data.max_length, data.on_overflow, split=False)
        if fitted.too_long and data.on_overflow != "truncate":
            count.lose(TOO_LONG, index, tokens)
            continue
        if not fitted.pieces:
            count.lose(EMPTY_BY_LENGTH if fitted.too_long or len(row.ids) < tokens else EMPTY, index, tokens)
            continue
        ids, mask = fitted.pieces[0]
        if len(ids) < tokens:
            count.truncated_rows += 1
            count.truncated_tokens += tokens - len(ids)
        if row.literals:
            count.literal_first = count.literal_first if count.literal_rows else index
            count.literal_rows += 1
        count.ends.add(row)
        own.append((ids, mask, index))
    check_balance(count, TokenDataset.from_documents([o[0] for o in own], [o[1] for o in own], [o[2] for o in own]))
    begins = [int(np.argmax(mask)) for _, mask, _ in own]
    prompts = [ids[:begin].tobytes() for (ids, _, _), begin in zip(own, begins, strict=True)]
    documents = []
    for at, (ids, mask, index) in enumerate(own):
        other = next((at - back for back in range(1, len(own)) if prompts[at - back] != prompts[at]), at - 1)
        answer, answer_mask = own[other][0][begins[other] :], own[other][1][begins[other] :]
        begin, room = begins[at], data.max_length - begins[at]
        mixed = np.concatenate([ids[:begin], answer[:room]]), np.concatenate([mask[:begin], answer_mask[:room]])
        documents += [(ids, mask, index), (*mixed, own[other][2])]
    found = TokenDataset.from_documents(
        [one[0] for one in documents],
        [one[1] for one in documents],
        [one[2] for one in documents],
        [good[index] for _, _, index in own for _ in range(2)],
    )
    count.documents = len(own)
    return found.grouped([(at, at + 1) for at in range(0, len(found), 2)]), count


def _fault(example: Example, pair: EncodedPair) -> str:
    for name, answer in (("chosen", example.chosen), ("rejected", example.rejected)):
        if not any(_says_something(message) for message in answer):
            return f"`{name if example.good is None else 'completion'}` is empty"
    if example.good is not None:
        return ""
    return SAME if np.array_equal(pair.chosen.ids, pair.rejected.ids) else ""


def _says_something(message: Message) -> bool:
    return bool(message.tool_calls or (message.content or "").strip() or (message.reasoning_content or "").strip())


def _shorten_prompt(pair: EncodedPair, encoder: RowEncoder, example: Example, max_length: int) -> None:
    if encoder.as_turns(example):
        head = example.messages[:1] if example.messages[0].role == "system" else []
        questions = [at for at, message in enumerate(example.messages) if message.role == "user"]
        for start in questions[1:]:
            shorter = replace(example, messages=[*head, *example.messages[start:]])
            chosen, rejected = encoder.preferences([shorter])[0]
            if chosen.fault or rejected.fault:  # a template may ask for the first turns: then the answers are cut
                return
            pair.chosen, pair.rejected = chosen, rejected
            if pair.longest <= max_length:
                return
    elif encoder.renderer is None:  # else the text spells a template's tokens, which a cut would tear
        begin = 1 if int(pair.chosen.ids[0]) == encoder.encoder.bos_id else 0
        prompt = min(int(np.argmax(row.trained)) for row in pair.both)
        end = begin + max(0, min(pair.longest - max_length, prompt - begin - 1))
        for row in pair.both:
            row.ids, row.trained = np.delete(row.ids, slice(begin, end)), np.delete(row.trained, slice(begin, end))
            if row.starts is not None and row.ends is not None:
                row.starts = np.delete(row.starts, slice(begin, end))
                row.ends = np.delete(row.ends, slice(begin, end))
