"""Format `adapter`: PEFT's two files with tokenizer, chat template, stop ids and model card, whole or absent."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from frugal.adapters import save_adapter
from frugal.adapters.peft_model import WEIGHTS
from frugal.checkpoints.rotation import aside
from frugal.checkpoints.run_folder import ADAPTER_CONFIG
from frugal.checkpoints.side_files import copy_tokenizer, save_side_files
from frugal.errors import CheckpointError
from frugal.exports.base import Export, check_space, new_folder
from frugal.files import fsync_file, fsync_folder
from frugal.units import disk_size

_BESIDE = ("generation_config.json", "README.md")


@dataclass(slots=True)
class AdapterReport:
    """What was written."""

    out: str
    base: str
    n_bytes: int
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text for the terminal."""
        first = f"wrote the adapter for {self.base} into {self.out}: {disk_size(self.n_bytes)}"
        return [first, *(f"warning: {warning}" for warning in self.warnings)]


def write_adapter(export: Export, options: None = None) -> AdapterReport:
    """Copy a run's or a checkpoint's adapter into a folder of its own, as stock PEFT loads it."""
    run = export.run
    names = [WEIGHTS, ADAPTER_CONFIG]
    n_bytes = sum((run.adapter / name).stat().st_size for name in names)
    check_space(export.out, n_bytes)
    with new_folder(export.out) as folder:
        for name in names:
            _copy(run.adapter / name, folder / name)
        copy_tokenizer(run.tokenizer_folder or export.base.path, folder)
        for name in _BESIDE:
            found = next((home / name for home in (run.adapter, run.root) if (home / name).is_file()), None)
            if found is not None:
                _copy(found, folder / name)
    return AdapterReport(str(export.out), export.base.name, n_bytes, export.warnings)


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)
    fsync_file(target)


def save_final(
    run_dir: Path,
    model: PeftModel,
    adapter: dict[str, Tensor],
    tokenizer: Any,
    *,
    base: Path,
    card: str,
    base_fingerprint: str | None,
) -> None:
    """Write the adapter (PEFT's two files), tokenizer, chat template, stop ids and model card into ``run_dir``.

    ``adapter``: the model's, whole (`Strategy.full_adapter`).

    The adapter is written beside and moved in, its configuration last: a folder with adapter_config.json is whole.
    Raises CheckpointError when the disk refuses; the checkpoints are as they were.
    """
    beside = aside(run_dir, 0, "tmp")
    try:
        beside.mkdir(parents=True)
        save_adapter(model, beside, tensors=adapter, base_fingerprint=base_fingerprint, plain=True)
        files = sorted(
            (path for path in beside.iterdir() if path.is_file()), key=lambda path: path.name == "adapter_config.json"
        )
        for path in files:
            fsync_file(path)
            path.replace(run_dir / path.name)
        fsync_folder(run_dir)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the adapter into {run_dir}: {error}. The last checkpoint holds the same adapter; free some "
            "space and use --resume to finish."
        ) from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    save_side_files(run_dir, tokenizer, base=base, card=card)
