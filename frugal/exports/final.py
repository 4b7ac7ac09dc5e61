"""The end of a run: the adapter in the run's own folder, with everything that others need to use it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors import SafetensorError
from torch import Tensor

from frugal.adapters import save_adapter
from frugal.checkpoints.rotation import aside
from frugal.checkpoints.side_files import save_side_files
from frugal.errors import CheckpointError
from frugal.files import fsync_file, fsync_folder


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
