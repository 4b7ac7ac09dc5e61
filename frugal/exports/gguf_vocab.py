"""The tokenizer of a GGUF file: tokens, merges, how text is cut before merging, special ids, chat template, stop ids.

llama.cpp knows ways to cut text by name. The name follows here from what the tokenizer does, so tokenizers that were
extended or trained anew are named right too; one that cuts in a way llama.cpp has no name for is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
from transformers import AutoTokenizer

from frugal.errors import CheckpointError, UnsupportedError
from frugal.files import read_json

_LETTERS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_CAPITALS = r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLITS = {
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _REST: "llama3",
    _SHORT + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _REST: "qwen2",
    _LETTERS + _CAPITALS + r"|\p{N}" + _REST_SLASH: "tekken",
    _LETTERS + _SHORT + "?" + _CAPITALS + _SHORT + r"?|\p{N}{1,3}" + _REST_SLASH: "gpt-4o",
}
_KINDS = gguf.TokenType


def write_vocab(writer: gguf.GGUFWriter, folder: Path, tokenizer: Any, rows: int, stops: list[int]) -> list[str]:
    """Write the tokenizer in ``folder`` for a token table of ``rows`` rows. Returns what the user should know.

    Args:
        tokenizer: the same one, loaded.
        stops: ids at which an answer ends, the most important one first.

    Raises:
        CheckpointError: no tokenizer.json, or a stop id without a token.
        UnsupportedError: llama.cpp has no such tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no tokenizer.json; a GGUF file needs the tokenizer in it.")
    content = read_json(file)
    model = content["model"]
    tokens, kinds = _tokens(content, rows)
    if model.get("type") == "BPE" and model.get("byte_fallback"):
        _sentencepiece(writer, content, tokens, kinds)
    elif model.get("type") == "BPE":
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(cut_name(content))
        writer.add_token_merges(_merges(model))
    else:
        raise UnsupportedError(f"llama.cpp has no tokenizer of type {model.get('type')}; it has BPE. Use --to merged.")
    writer.add_token_list(tokens)
    writer.add_token_types([int(kind) for kind in kinds])
    return _special(writer, tokenizer, tokens, kinds, stops)


def _tokens(content: dict[str, Any], rows: int) -> tuple[list[str], list[int]]:
    tokens, kinds = [f"[PAD{index}]" for index in range(rows)], [int(_KINDS.UNUSED)] * rows
    unknown = content["model"].get("unk_token")
    found = [(text, index, int(_KINDS.NORMAL)) for text, index in content["model"]["vocab"].items()]
    for added in content.get("added_tokens", []):
        kind = _KINDS.CONTROL if added.get("special") else _KINDS.USER_DEFINED
        found.append((added["content"], int(added["id"]), int(kind)))
    for text, index, kind in found:
        if index >= rows:
            raise CheckpointError(f"The tokenizer has the id {index}, the model's token table has {rows} rows.")
        tokens[index], kinds[index] = text, kind
        if content["model"].get("byte_fallback"):
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                kinds[index] = int(_KINDS.BYTE)
            elif text == unknown:
                kinds[index] = int(_KINDS.UNKNOWN)
    return tokens, kinds


def _pairs(model: dict[str, Any]) -> list[tuple[str, str]]:
    parts = (pair.split(" ", 1) if isinstance(pair, str) else pair for pair in model["merges"])
    return [(left, right) for left, right in parts]


def _merges(model: dict[str, Any]) -> list[str]:
    return [f"{left} {right}" for left, right in _pairs(model)]


def _sentencepiece(writer: gguf.GGUFWriter, content: dict[str, Any], tokens: list[str], kinds: list[int]) -> None:
    """llama.cpp merges the pair whose result has the highest score; here the first pair of the list wins."""
    rank: dict[str, float] = {}
    for index, (left, right) in enumerate(_pairs(content["model"])):
        rank.setdefault(left + right, float(-index - 1))
    least = -float(len(content["model"]["merges"])) - 1.0
    normal = (int(_KINDS.NORMAL), int(_KINDS.USER_DEFINED))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_scores(
        [rank.get(text, least) if kind in normal else 0.0 for text, kind in zip(tokens, kinds, strict=True)]
    )
    steps = [content.get("normalizer") or {}, content.get("pre_tokenizer") or {}]
    flat = [part for step in steps for part in [step, *step.get("normalizers", []), *step.get("pretokenizers", [])]]
    before = any(
        part.get("type") == "Prepend" or (part.get("type") == "Metaspace" and part.get("prepend_scheme") != "never")
        for part in flat
    )
    writer.add_add_space_prefix(before)


def cut_name(content: dict[str, Any]) -> str:
    """llama.cpp's name for the way in which a byte-level tokenizer cuts text before it merges.

    Raises:
        UnsupportedError: it has none for this one.
    """
    step = content.get("pre_tokenizer") or {}
    parts = step.get("pretokenizers", [step])
    kinds = [part.get("type") for part in parts]
    last = parts[-1]
    if kinds[-1] == "ByteLevel" and not last.get("add_prefix_space"):
        if kinds == ["ByteLevel"] and last.get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and last.get("use_regex", True) and parts[0].get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not last.get("use_regex", True) and not parts[0].get("invert"):
            name = _SPLITS.get((parts[0].get("pattern") or {}).get("Regex", ""))
            whole = bool(content["model"].get("ignore_merges"))
            if name == "llama3":
                return "llama-bpe" if whole else "dbrx"
            if name is not None and whole == (name == "tekken"):
                return name
    shown = ", ".join(str(kind) for kind in kinds)
    raise UnsupportedError(
        f"llama.cpp has no name for the way this tokenizer cuts text ({shown}). Use --to merged, and llama.cpp's "
        "convert_hf_to_gguf.py on the result."
    )


def _special(
    writer: gguf.GGUFWriter, tokenizer: Any, tokens: list[str], kinds: list[int], stops: list[int]
) -> list[str]:
    for stop in stops:
        if stop >= len(tokens) or kinds[stop] == int(_KINDS.UNUSED):
            raise CheckpointError(f"An answer ends at the id {stop}, which is no token of the tokenizer.")
    notes = []
    add = [writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id]
    for index, put in zip(stops, add, strict=False):
        put(index)
    if not stops:
        notes.append("no stop id is known: answers will not end by themselves")
    if len(stops) > len(add):
        names = ", ".join(tokens[index] for index in stops[len(add) :])
        notes.append(f"a GGUF file names three stop ids; give the others to the program that serves it: {names}")
    for name, put in (
        ("bos", writer.add_bos_token_id),
        ("unk", writer.add_unk_token_id),
        ("pad", writer.add_pad_token_id),
    ):
        value = getattr(tokenizer, f"{name}_token_id")
        if value is not None:
            put(value)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(bool(ids) and ids[0] == tokenizer.bos_token_id and tokenizer.bos_token_id is not None)
    writer.add_add_eos_token(bool(ids) and ids[-1] == tokenizer.eos_token_id and tokenizer.eos_token_id is not None)
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if template:
        writer.add_chat_template(template)
    else:
        notes.append("there is no chat template")
    return notes


_READ_ALIKE = ("gpt-2", "llama-bpe", "dbrx", "qwen2", "tekken", "gpt-4o", "default")
"""Ways of cutting that transformers' reader of GGUF files knows too."""
_PROBES = (
    "The quick brown fox, 12345 times!",
    "  two  spaces\n\nand\tlines",
    "Grüße, 你好 — naïve 🙂",
    "I'LL don't x=y+1;",
)


def check_vocab(file: Path, tokenizer: Any, rows: int, stops: list[int]) -> list[str]:
    """Compare what a written file says with the tokenizer. Returns what the user should know.

    Raises:
        CheckpointError: another template, other stop ids, another number of tokens, or other ids for the same text.
    """
    fields = gguf.GGUFReader(file).fields
    keys = gguf.Keys.Tokenizer
    found = {key: fields[key].contents() for key in fields}
    wrong = []
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    if (found.get(keys.CHAT_TEMPLATE) or None) != (template or None):
        wrong.append("the chat template is another")
    ends = [found[key] for key in (keys.EOS_ID, keys.EOT_ID, keys.EOM_ID) if key in found]
    if ends != stops[:3]:
        wrong.append(f"an answer ends at {ends}, in training at {stops[:3]}")
    if len(found[keys.LIST]) != rows:
        wrong.append(f"it has {len(found[keys.LIST])} tokens, the model {rows}")
    notes = []
    pre = found.get(keys.PRE)
    if pre in _READ_ALIKE:
        try:
            other = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        except (ValueError, KeyError, NotImplementedError) as error:
            notes.append(f"transformers cannot read the tokenizer back ({str(error).splitlines()[0]})")
        else:
            plain = {"add_special_tokens": False}
            # of pieces, transformers rebuilds the prefix space in a way that differs for texts that begin with one
            texts = [text.lstrip() if pre == "default" else text for text in _PROBES]
            differ = [
                text for text in texts if other(text, **plain)["input_ids"] != tokenizer(text, **plain)["input_ids"]
            ]
            if differ and pre == "default":
                notes.append(f"transformers reads other ids from the file's tokenizer, for example of {differ[0]!r}")
            elif differ:
                wrong.append(f"its tokenizer gives other ids, for example of {differ[0]!r}")
    if wrong:
        raise CheckpointError(f"The file is not what was trained: {'; '.join(wrong)}. Nothing was written.")
    return notes
