"""Toy tokenizers and short ways to prepared rows, for the tests of the data part."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from frugal.config import DataSection, SourceSection
from frugal.data.chat.render import ChatRenderer
from frugal.data.encode import EncodedRow, RowEncoder, chat_renderer
from frugal.data.rows import Example, Message
from frugal.data.tokenizer import TextEncoder
from tests.conftest import CHATML, make_tokenizer

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def byte_tokenizer(
    template: str | None = CHATML,
    *,
    specials: Sequence[str] = SPECIALS,
    bos: str | None = None,
    eos: str | None = "<|im_end|>",
    adds_bos: bool = False,
    pad: str | None = None,
    merges: Sequence[tuple[str, str]] = (),
) -> PreTrainedTokenizerFast:
    """Every character of ASCII text is one token (bytes as byte-level BPE spells them), special tokens come first."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*specials, *alphabet, *(left + right for left, right in merges)]
    core = Tokenizer(models.BPE(vocab={name: index for index, name in enumerate(names)}, merges=list(merges)))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    if adds_bos and bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, names.index(bos))]
        )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=pad)
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str, tools: list[dict[str, Any]] | None = None) -> Example:
    """`chat("u: a", "a: X")` is a conversation; s, u, a, t are the roles."""
    roles: dict[str, Any] = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    messages = [Message(roles[turn[0]], turn[3:]) for turn in turns]
    return Example("messages", "rows.jsonl", 1, messages=messages, tools=tools)


def prepare(tokenizer: Any, *examples: Example, template: str | None = None, **options: Any) -> list[EncodedRow]:
    """Rows as `build` prepares them, with their text."""
    renderer: ChatRenderer | None = None
    if any(example.kind == "messages" for example in examples):
        renderer = chat_renderer(tokenizer, template)
    row_encoder = RowEncoder(TextEncoder.from_tokenizer(tokenizer), renderer, keep_text=True, **options)
    return row_encoder.encode(examples)


def trained_texts(tokenizer: Any, row: EncodedRow) -> list[str]:
    """The text of each run of trained tokens, special tokens included."""
    runs: list[list[int]] = []
    before = False
    for token_id, on in zip(row.ids.tolist(), row.trained.tolist(), strict=True):
        if on and not before:
            runs.append([])
        if on:
            runs[-1].append(token_id)
        before = on
    return [tokenizer.decode(run, skip_special_tokens=False) for run in runs]


def write_rows(path: Path, rows: Sequence[Any]) -> Path:
    """Rows as a JSONL file."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def section(*paths: Path, **settings: Any) -> DataSection:
    """A `data` section without the cache."""
    return DataSection(train=[SourceSection(path=str(path)) for path in paths], **{"cache": False, **settings})


__all__ = [
    "CHATML",
    "byte_tokenizer",
    "chat",
    "make_tokenizer",
    "prepare",
    "section",
    "trained_texts",
    "write_rows",
]
