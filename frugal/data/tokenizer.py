"""Text to token ids with character offsets, straight on the tokenizer's Rust core, and the rules for special tokens.

* Begin-of-sequence: exactly one. A text whose first id is already the begin token gets no second; else it gets one
  when the tokenizer's own setting adds one; when neither does, it has none.
* Text of a control token inside a message is tokenised as plain text (the caller says where such text lies).
* A token never straddles the place where an answer begins: inference tokenises the prompt alone, so the text is cut
  there.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from tokenizers import Encoding, Tokenizer

from frugal.errors import UnsupportedError


@dataclass(slots=True)
class Encoded:
    """Ids of one text and where each token lies in it."""

    ids: np.ndarray
    """int32 [tokens]"""
    starts: np.ndarray
    """int32 [tokens]: first character. White space that a tokenizer trims from its offsets belongs to the token after
    it."""
    ends: np.ndarray
    """int32 [tokens]: one past the last character."""


@dataclass(slots=True)
class EncoderState:
    """What ids depend on, as plain values; part of the cache key."""

    backend: str
    bos_id: int | None
    eos_id: int | None
    adds_bos: bool
    special_tokens: list[str]
    special_tokens_map: dict[str, Any]


class TextEncoder:
    """A tokenizer's core with frugal's rules."""

    def __init__(self, state: EncoderState) -> None:
        self.state = state
        self.bos_id, self.eos_id, self.adds_bos = state.bos_id, state.eos_id, state.adds_bos
        self._core: Tokenizer = Tokenizer.from_str(state.backend)
        self._core.no_padding()
        self._core.no_truncation()

    @classmethod
    def from_tokenizer(cls, tokenizer: Any) -> TextEncoder:
        """Take what is needed from a transformers tokenizer. Raises UnsupportedError for one without offsets."""
        if not getattr(tokenizer, "is_fast", False):
            raise UnsupportedError(
                f"The tokenizer {type(tokenizer).__name__} is a slow one: it does not say which characters a token "
                "covers, so answers cannot be told from prompts. Use a model with a fast tokenizer (tokenizer.json)."
            )
        special_map, special = special_tokens_of(tokenizer)
        state = EncoderState(
            backend=tokenizer.backend_tokenizer.to_str(),
            bos_id=tokenizer.bos_token_id,
            eos_id=tokenizer.eos_token_id,
            adds_bos=adds_bos(tokenizer),
            special_tokens=special,
            special_tokens_map=special_map,
        )
        return cls(state)

    @cached_property
    def unknown_id(self) -> int | None:
        """The id that stands for text outside the vocabulary; None where there is none, or where it also ends texts."""
        model = json.loads(self.state.backend)["model"]
        found = model.get("unk_id")  # Unigram
        if found is None and model.get("unk_token") is not None:
            found = self._core.token_to_id(model["unk_token"])
        return None if found in (self.bos_id, self.eos_id) else found

    def token(self, token_id: int) -> str:
        """The token of an id, for messages."""
        return str(self._core.id_to_token(token_id))

    def id_of(self, token: str) -> int | None:
        """The id of a token, or None."""
        found: int | None = self._core.token_to_id(token)
        return found

    def encode(
        self,
        texts: Sequence[str],
        cuts: Sequence[Sequence[int]] | None = None,
        literals: Sequence[Sequence[tuple[int, int]]] | None = None,
        *,
        bos: bool = True,
    ) -> list[Encoded]:
        """Encode texts.

        Args:
            texts: Whole texts.
            cuts: For each text, characters where no token may straddle (answers begin there).
            literals: For each text, spans whose special tokens are plain text.
            bos: Apply the rule of exactly one begin token.
        """
        results: list[Encoded] = []
        for number, coded in enumerate(self._core.encode_batch(list(texts), add_special_tokens=False)):
            text, plain = texts[number], literals[number] if literals else ()
            places = cuts[number] if cuts else ()
            if plain:
                encoded = self._in_pieces(text, places, plain)
            else:
                encoded = _with_gaps(coded.ids, coded.offsets, text)
                straddled = [place for place in places if _straddles(encoded, place)]
                if straddled:
                    encoded = self._in_pieces(text, straddled, ())
            results.append(self._one_bos(encoded) if bos else encoded)
        return results

    def _one_bos(self, encoded: Encoded) -> Encoded:
        missing = bos_missing(encoded.ids[:2].tolist(), self.bos_id, adds_bos=self.adds_bos)
        if missing < 0:
            return Encoded(encoded.ids[1:], encoded.starts[1:], encoded.ends[1:])
        if missing == 0 or self.bos_id is None:
            return encoded
        zero = np.zeros(1, np.int32)
        return Encoded(
            np.concatenate([np.array([self.bos_id], np.int32), encoded.ids]),
            np.concatenate([zero, encoded.starts]),
            np.concatenate([zero, encoded.ends]),
        )

    def _in_pieces(self, text: str, cuts: Sequence[int], literals: Sequence[tuple[int, int]]) -> Encoded:
        """Encode between the cuts one by one; literal pieces with special tokens as plain text."""
        limits = sorted({0, len(text), *cuts, *(limit for span in literals for limit in span)})
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        for begin, end in itertools.pairwise(limits):
            literal = any(low <= begin and end <= high for low, high in literals)
            coded, shift = self._piece(text[begin:end], literal=literal, inside=begin > 0)
            for token_id, (low, high) in coded:
                ids.append(token_id)
                offsets.append((max(begin, begin + low - shift), max(begin, begin + high - shift)))
        return _with_gaps(ids, offsets, text)

    def _piece(self, piece: str, *, literal: bool, inside: bool) -> tuple[list[tuple[int, tuple[int, int]]], int]:
        """(ids with offsets, characters put before). SentencePiece puts a space before a text; not inside one."""
        try:
            self._core.encode_special_tokens = literal
            if inside and self._newline is not None:
                coded = self._core.encode("\n" + piece, add_special_tokens=False)
                count = len(self._newline)
                if coded.ids[:count] == self._newline:
                    return list(zip(coded.ids[count:], coded.offsets[count:], strict=True)), 1
            coded = self._core.encode(piece, add_special_tokens=False)
            return _pairs(coded), 0
        finally:
            self._core.encode_special_tokens = False

    @cached_property
    def _newline(self) -> list[int] | None:
        """Ids of a line break, for tokenizers that put a space mark before a text; None for others."""
        first = self._core.encode("a", add_special_tokens=False).tokens[:1]
        if not first or not first[0].startswith("▁"):
            return None
        return list(self._core.encode("\n", add_special_tokens=False).ids)


def trained_tokens(encoded: Encoded, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """bool [tokens]: a token is trained when its first character lies in a span. Tokens without text never are."""
    trained = np.zeros(len(encoded.ids), dtype=bool)
    for begin, end in spans:
        trained |= (encoded.starts >= begin) & (encoded.starts < end)
    return trained & (encoded.ends > encoded.starts)


def _pairs(coded: Encoding) -> list[tuple[int, tuple[int, int]]]:
    return list(zip(coded.ids, coded.offsets, strict=True))


def _with_gaps(ids: Sequence[int], offsets: Sequence[tuple[int, int]], text: str) -> Encoded:
    """Give white space that offsets leave out (byte-level tokenizers may trim it) to the token that follows it."""
    spans = np.array(offsets, dtype=np.int32).reshape(-1, 2)
    starts, ends = spans[:, 0].copy(), spans[:, 1]
    if len(starts) > 1:
        covered = np.maximum.accumulate(ends)[:-1]
        for place in np.flatnonzero(starts[1:] > covered):
            if not text[covered[place] : starts[place + 1]].strip():
                starts[place + 1] = covered[place]
    return Encoded(np.array(ids, dtype=np.int32), starts, ends.copy())


def _straddles(encoded: Encoded, place: int) -> bool:
    return bool(np.any((encoded.starts < place) & (encoded.ends > place)))


def adds_bos(tokenizer: Any) -> bool:
    """True when the tokenizer's own setting puts its begin token before a text."""
    if tokenizer.bos_token_id is None:
        return False
    with_special = tokenizer("a", add_special_tokens=True)["input_ids"]
    without = tokenizer("a", add_special_tokens=False)["input_ids"]
    return bool(with_special[:1] == [tokenizer.bos_token_id] and without[:1] != [tokenizer.bos_token_id])


def bos_missing(first: Sequence[int], bos_id: int | None, *, adds_bos: bool) -> int:
    """Begin tokens to add (1), to take away (-1), or 0, looking at a text's first two ids."""
    if bos_id is None or not adds_bos:
        return 0
    if list(first[:2]) == [bos_id, bos_id]:
        return -1
    return 0 if list(first[:1]) == [bos_id] else 1


def one_bos(ids: list[int], bos_id: int | None, *, adds_bos: bool) -> list[int]:
    """The ids with exactly one begin token, or none where neither the text nor the tokenizer has one."""
    missing = bos_missing(ids[:2], bos_id, adds_bos=adds_bos)
    if missing > 0 and bos_id is not None:
        return [bos_id, *ids]
    return ids[1:] if missing < 0 else ids


def special_tokens_of(tokenizer: Any) -> tuple[dict[str, Any], list[str]]:
    """(names of the special tokens for templates, texts of all special tokens)."""
    special = [token.content for token in tokenizer.added_tokens_decoder.values() if token.special]
    return {key: value for key, value in tokenizer.special_tokens_map.items() if value}, special
