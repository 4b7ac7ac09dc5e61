"""The formats that a trained adapter can be written in, one row each: what a format is, its options, what writes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frugal.checkpoints.run_folder import check_depth, open_run, other_base
from frugal.errors import CheckpointError, ConfigError
from frugal.exports.adapter import write_adapter
from frugal.exports.base import Export, Report, check_empty
from frugal.exports.gguf_formats import GgufOptions, LoraGgufOptions, write_gguf, write_lora_gguf
from frugal.exports.merged import MergeOptions, MergeReport, Weights, write_merged


@dataclass(frozen=True)
class Format:
    """One row: a format, what it is for, and what writes it."""

    name: str
    about: str
    write: Callable[[Export, Any], Report]
    """Given the export and an object of ``options``."""
    options: type | None = None
    """A dataclass whose fields are the format's own options; its constructor raises ConfigError for what it cannot."""


FORMATS: dict[str, Format] = {
    row.name: row
    for row in (
        Format("adapter", "PEFT's two files with tokenizer, template, stop ids and card", write_adapter),
        Format("merged", "a 16-bit model for stock transformers", write_merged, MergeOptions),
        Format("gguf", "the merged model in one file for llama.cpp, proven", write_gguf, GgufOptions),
        Format("lora-gguf", "the adapter alone for llama.cpp, proven", write_lora_gguf, LoraGgufOptions),
    )
}


def export(
    run: str | Path,
    out: str | Path,
    format: str,
    *,
    base: str | Path | None = None,
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
    **options: Any,
) -> Report:
    """Write the adapter of ``run`` in ``format`` into the new folder ``out``.

    Args:
        run: a run folder, a checkpoint of it, or an adapter folder.
        base: the base model; wins over what the run stored.
        allow_other_base: go on although the base's fingerprint is not that of the run's base.
        options: of the format, by name.

    Raises:
        ConfigError: an unknown format or option.
        CheckpointError: the adapter does not fit its base, ``out`` is not empty, or no space.
    """
    row = FORMATS.get(format)
    if row is None:
        raise ConfigError(f"format must be one of {', '.join(FORMATS)}; got {format!r}.")
    if options and row.options is None:
        raise ConfigError(f"format {format} takes no options; got {', '.join(options)}.")
    try:
        settings = None if row.options is None else row.options(**options)
    except TypeError as error:
        raise ConfigError(f"format {format}: {error}") from error
    folder, opened = check_empty(Path(out)), open_run(run)
    source = opened.base_source(base, trust_remote_code=trust_remote_code)
    check_depth(opened, source)
    warnings = []
    if sentence := other_base(opened, source):
        if not allow_other_base:
            raise CheckpointError(f"{sentence} Go on all the same with --allow-other-base.")
        warnings.append(sentence)
    return row.write(Export(opened, source, folder, warnings, trust_remote_code), settings)


def merge(
    run: str | Path,
    out: str | Path,
    *,
    weights: Weights | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 512 << 20,
    base: str | Path | None = None,
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Write the merged model of ``run`` into the new folder ``out``; stock transformers loads it.

    Arguments and errors as of `export`, and of `MergeOptions`.
    """
    report = export(
        run,
        out,
        "merged",
        base=base,
        allow_other_base=allow_other_base,
        trust_remote_code=trust_remote_code,
        weights=weights,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
    )
    assert isinstance(report, MergeReport)
    return report
