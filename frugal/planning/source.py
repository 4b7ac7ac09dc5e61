"""What is to be planned: a configuration or a model's name, and where its config.json is. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub import errors as hub

from frugal.assets import is_known
from frugal.config import Config, load_config
from frugal.errors import ModelError
from frugal.files import read_json
from frugal.hub import reachable
from frugal.models.quantised_base import refuse_quantised, refuse_said_quantised
from frugal.models.resolve import may_be_hub_id
from frugal.planning.architectures import architectures, known_name

Source = Config | Mapping[str, object] | str | Path


def as_config(source: Source, overrides: Sequence[str] = ()) -> Config:
    """A configuration; a model's name becomes QLoRA over it with one row a micro-batch and everything else as usual."""
    if isinstance(source, Config):
        return source
    text = str(source)
    is_model = not isinstance(source, Mapping) and (
        Path(text).is_dir() or not (Path(text).exists() or text.endswith((".yaml", ".yml")))
    )
    if is_model:
        source = {
            "model": {"base": text},
            "data": {"train": "train.jsonl"},
            "train": {"per_device_train_batch_size": 1},
            "output": {"dir": "runs/plan"},
        }
    return load_config(source, overrides)


def configuration_folder(base: str, revision: str | None = None) -> Path | None:
    """The folder with ``base``'s config.json, of a hub id that file alone; None for a name of the shipped table.

    Raises ModelError naming the ways to say it.
    """
    folder = Path(base).expanduser()
    if (folder / "config.json").is_file():
        config = read_json(folder / "config.json")
        refuse_quantised(base, folder, config, sorted(folder.glob("*.safetensors")))
        return folder
    if folder.is_dir():
        raise ModelError(f"{folder} has no config.json: give a model's folder.")
    if known_name(base) is not None:
        return None
    shown = f"Without a network these are known: {', '.join(architectures())}."
    if is_known(base) or "/" not in base or not may_be_hub_id(base):
        raise ModelError(f"{base!r} is neither a model's folder nor a hub id (owner/name). {shown}")
    try:
        file = huggingface_hub.hf_hub_download(base, "config.json", revision=revision, local_files_only=not reachable())
    except (hub.HfHubHTTPError, hub.LocalEntryNotFoundError, hub.OfflineModeIsEnabled, ValueError, OSError) as error:
        raise ModelError(
            f"The config.json of {base!r} cannot be had ({type(error).__name__}): gated, misspelt, or no network. "
            f"A folder with its config.json does as well. {shown}"
        ) from error
    refuse_said_quantised(base, read_json(Path(file)))
    return Path(file).parent
