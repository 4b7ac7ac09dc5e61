"""What a command can refuse before torch and transformers are imported, which takes seconds.

The command itself asks all of it again.
"""

from __future__ import annotations

import os
from pathlib import Path

from frugal.assets import CATALOGUE, is_known
from frugal.checkpoints.resume import finished, starting_point
from frugal.config import Config, load_config
from frugal.data.sources.find import find
from frugal.errors import CheckpointError, ConfigError, ModelError
from frugal.files import run_folder
from frugal.models.resolve import check_name, hub_configuration, may_be_hub_id


def before_rows(config: Config) -> None:
    """Refuse a base or a source of rows that is not there."""
    base = config.model.base
    if not check_name(base, config.model.revision).is_dir() and not is_known(base):
        hub_configuration(base, config.model.revision)
    for source in (*config.data.train, *config.data.eval):
        find(source)


def before_training(config: Config, resume: str | Path | None) -> bool:
    """Refuse what `before_rows` does, and an output folder that is in use or does not fit. Returns whether there is
    anything to train: False for a finished run that was to be resumed, which is said."""
    before_rows(config)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:  # the first process may have begun to write there already
        return True
    run_dir = Path(config.output.dir)
    start = starting_point(run_dir, config.model_dump(mode="json"), resume, lambda _: None, hashes=False)
    done = finished(run_dir, start)
    if done is None:
        return True
    print(
        f"{run_dir} is finished: all {done['step']} steps are done and the adapter is saved. Nothing is left to train."
    )
    return False


def is_base(path: Path) -> bool:
    """Whether what a user named as a run is a base model instead: a name that fetch knows, a model's folder, a hub id.

    Raises CheckpointError for what is neither, saying what it is and what was probably meant.
    """
    name = str(path)
    if path.suffix.lower() in (".yaml", ".yml") and path.is_file():
        raise CheckpointError(_of_configuration(path))
    if path.exists():
        names = {entry.name for entry in run_folder(path).iterdir()}
        return "config.json" in names and not names & {"adapter_config.json", "config.yaml"}
    if is_known(name) and CATALOGUE[name].kind == "model":
        return True
    if "/" in name and may_be_hub_id(name) and not path.parent.is_dir():
        try:
            hub_configuration(name, None)
        except ModelError as error:
            raise CheckpointError(f"{name} is no folder of a run here, and no base model either: {error}") from error
        return True
    run_folder(path)  # raises
    return False


def refuse_base(path: Path, what: str) -> None:
    """Raise CheckpointError where a run is needed and a base model or a configuration was named."""
    if is_base(path):
        raise CheckpointError(
            f"{path} is a base model, not a run: {what}. Give the folder of a run (output.dir) or of an adapter. "
            f"(`frugal chat {path}` talks to a base.)"
        )


def run_or_configuration(path: Path) -> None:
    """Raise ConfigError or CheckpointError where a configuration or a run is needed and neither was named."""
    if path.is_file():
        return
    try:
        base = is_base(path)
    except CheckpointError:
        if path.exists():
            raise
        raise ConfigError(
            f"{path} does not exist. Give a configuration, or the folder of a run or an adapter."
        ) from None
    if base:
        raise ConfigError(
            f"{path} is a base model: there is nothing to compare with it. Give a configuration with model.base: "
            f"{path}, or the folder of a run or an adapter."
        )


def _of_configuration(path: Path) -> str:
    try:
        config = load_config(path)
    except ConfigError:
        return f"{path} is a YAML file, not a run. Give the folder of a run (output.dir in a configuration)."
    run_dir, base = config.output.dir, config.model.base
    if Path(run_dir).expanduser().is_dir():
        return f"{path} is a configuration, not a run. Its run is in {run_dir}: give that folder."
    return (
        f"{path} is a configuration, not a run, and its run {run_dir} does not exist. Train it first "
        f"(`frugal train {path}`), or talk to its base: `frugal chat {base}`."
    )
