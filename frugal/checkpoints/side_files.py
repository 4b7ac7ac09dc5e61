"""The adapter as others use it: beside its weights the tokenizer, chat template, stop ids and a model card.

A tokenizer that was changed in training (added tokens, another template) travels with the adapter, and so do the ids
at which an answer ends: a base model's own generation settings often stop at its eos alone, not at the chat's end
of turn.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from frugal.errors import CheckpointError
from frugal.files import fsync_file, fsync_folder, read_json, write_json, write_text

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
)
_MARK = "frugalanswer"


def end_of_turn_ids(tokenizer: Any, chat_template: str | None = None) -> list[int]:
    """Ids of the special tokens that the chat template puts right behind an assistant's answer; [] when there are none.

    Found by rendering a conversation and reading what follows the answer, so no list of markers decides it.
    """
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        return []
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": _MARK}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, chat_template=chat_template)
    tail = text.rpartition(_MARK)[2]
    ids = tokenizer(tail.lstrip(), add_special_tokens=False)["input_ids"] if tail.strip() else []
    special = set(tokenizer.all_special_ids) | {
        index for index, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    return [ids[0]] if ids and ids[0] in special else []


def stop_ids(tokenizer: Any, generation: dict[str, Any] | None = None) -> list[int]:
    """Ids that end an answer: the template's end of turn, the tokenizer's eos, the base's own eos ids; each once."""
    ids = end_of_turn_ids(tokenizer)
    if tokenizer.eos_token_id is not None:
        ids.append(int(tokenizer.eos_token_id))
    own = (generation or {}).get("eos_token_id")
    ids += [own] if isinstance(own, int) else list(own or [])
    return list(dict.fromkeys(ids))


def generation_settings(tokenizer: Any, base: Path | None = None) -> dict[str, Any]:
    """Content of ``generation_config.json``: the base's own settings, with every stop id and the padding id."""
    file = base / "generation_config.json" if base is not None else None
    settings: dict[str, Any] = dict(read_json(file)) if file is not None and file.is_file() else {}
    for key in ("transformers_version", "_from_model_config"):  # written by another version, or built from config.json
        settings.pop(key, None)
    if ids := stop_ids(tokenizer, settings):
        settings["eos_token_id"] = ids
    if tokenizer.pad_token_id is not None:
        settings["pad_token_id"] = int(tokenizer.pad_token_id)
    if tokenizer.bos_token_id is not None:
        settings.setdefault("bos_token_id", int(tokenizer.bos_token_id))
    return settings


def save_side_files(folder: Path, tokenizer: Any, *, base: Path | None = None, card: str | None = None) -> None:
    """Write tokenizer files, ``chat_template.jinja``, ``generation_config.json`` and ``README.md`` into ``folder``.

    Each file is written beside and renamed, so a reader of the folder sees whole files only.

    Args:
        base: the base model's folder, whose generation settings are kept.
        card: the model card's text; no README.md without it.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    beside = folder / f".tokenizer.{os.getpid()}.tmp"
    try:
        shutil.rmtree(beside, ignore_errors=True)
        beside.mkdir()
        _save_tokenizer(tokenizer, beside)
        for file in sorted(beside.iterdir()):
            if file.is_file():
                fsync_file(file)
                file.replace(folder / file.name)
        template = getattr(tokenizer, "chat_template", None)
        if isinstance(template, str) and not (folder / "chat_template.jinja").is_file():
            write_text(folder / "chat_template.jinja", template)
        write_json(folder / "generation_config.json", generation_settings(tokenizer, base))
        if card is not None:
            write_text(folder / "README.md", card)
        fsync_folder(folder)
    except OSError as error:
        raise CheckpointError(f"Cannot write into {folder}: {error}. Free space or choose another folder.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def _save_tokenizer(tokenizer: Any, folder: Path) -> None:
    try:
        tokenizer.save_pretrained(str(folder))
    except OSError:
        raise
    except Exception as error:  # tokenizers' own writer reports a full disk as a plain Exception
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), str(error)) from error


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a tokenizer's files and chat templates as they are."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)
            fsync_file(target / name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", target / "additional_chat_templates")


def highest_token_id(folder: Path) -> int:
    """Highest id in ``tokenizer.json`` (vocabulary and added tokens).

    Raises:
        CheckpointError: no tokenizer.json there: the tokenizer was not saved by a fast tokenizer.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise CheckpointError(f"{folder} holds no tokenizer.json; a merged model needs one to be usable.")
    content = read_json(file)
    vocabulary = content["model"].get("vocab", {})
    highest = max(vocabulary.values(), default=-1) if isinstance(vocabulary, dict) else len(vocabulary) - 1
    return max([highest, *(int(token["id"]) for token in content.get("added_tokens", []))])
