"""May this run start in this folder, and from where: the states of an output folder, and what may differ on resume."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel

from frugal.checkpoints.complete import ADAPTER_FILE, find_latest, why_incomplete
from frugal.checkpoints.rotation import list_checkpoints
from frugal.config import Config
from frugal.errors import CheckpointError
from frugal.files import read_json
from frugal.manifest import FILE_NAME

if TYPE_CHECKING:  # imports torch: a command asks this module before anything heavy is imported
    from frugal.data import TokenDataset

HARMLESS = (
    "data.cache",
    "data.num_proc",
    "distributed",
    "memory",
    "model.trust_remote_code",
    "output",
    "train.eval_steps",
    "train.gradient_accumulation_steps",
    "train.logging_steps",
    "train.per_device_eval_batch_size",
    "train.per_device_train_batch_size",
    "train.report_to",
)
"""Keys (or whole sections) that may differ between a checkpoint and the run that goes on with it.

They change neither rows, nor losses, nor rates. The batch sizes are here because only their product, the global batch,
matters, and that is compared on its own.
"""

_ABSENT = "(not set)"


def config_hash(config: dict[str, Any]) -> str:
    """SHA-256 of a resolved config without its harmless keys: equal hashes may resume one another."""
    kept = {key: value for key, value in flatten(config).items() if not _is_harmless(key)}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def data_fingerprint(rows: TokenDataset) -> str:
    """SHA-256 of tokenised rows: ids, targets, document limits and verdicts, in order."""
    digest = hashlib.sha256()
    for array in (rows.input_ids, rows.trained, rows.doc_starts, rows.row_docs):
        digest.update(np.ascontiguousarray(array).data)
    if not rows.good.all():
        digest.update(np.ascontiguousarray(rows.good).data)
    return digest.hexdigest()


def run_identity(
    config: dict[str, Any], plan: dict[str, Any], data_fingerprint: str, *, clock: str | None = None
) -> dict[str, Any]:
    """What a checkpoint keeps of its run (the resolved configuration, the plan's steps, the rows), and `check_config`
    and `check_plan` compare. ``clock``: the time in its rows, for a template that prints it (`run_clock`)."""
    return {
        "config": config,
        "config_sha256": config_hash(config),
        "plan": plan,
        "data_fingerprint": data_fingerprint,
        "clock": clock,
    }


def run_clock(state: dict[str, Any] | None) -> datetime:
    """The time for templates that print it: the checkpoint's, so that its rows are made again, else now."""
    saved = state.get("clock") if state is not None else None
    return datetime.fromisoformat(saved) if saved else datetime.now().replace(microsecond=0)


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys; lists stay values."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """`key: saved -> current` for every key that differs and matters.

    A key that the version of frugal that saved did not have counts as its default, which changes nothing.
    """
    before, now = flatten(saved), flatten(current)
    before = {**{key: value for key, value in _defaults(Config) if key in now}, **before} if saved else before
    return [
        f"{key}: {before.get(key, _ABSENT)} -> {now.get(key, _ABSENT)}"
        for key in sorted(before.keys() | now.keys())
        if not _is_harmless(key) and before.get(key, _ABSENT) != now.get(key, _ABSENT)
    ]


def starting_point(
    run_dir: Path,
    config: dict[str, Any],
    resume: bool | str | Path | None,
    say: Callable[[str], None] = print,
    *,
    hashes: bool = True,
) -> Path | None:
    """The checkpoint to go on from, None for a fresh start.

    ``resume`` None or False starts fresh, and refuses a folder that already holds a run. True (or "auto", "latest")
    takes the newest complete checkpoint of the folder, and starts fresh with a message when it holds none, so that one
    command serves a machine that is restarted at any time. A path names one checkpoint. What is chosen was compared
    with its hashes, unless ``hashes`` is false.
    """
    run_dir = Path(run_dir)
    try:
        run_dir.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass  # a new folder, or one that the lock cannot make
    except (OSError, ValueError) as error:  # too long, not to be entered
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"output.dir {str(run_dir)[:120]!r} cannot be a folder: {reason}. Name another."
        ) from error
    if run_dir.exists() and not run_dir.is_dir():
        raise CheckpointError(f"output.dir {run_dir} is a file. Set output.dir to a folder.")
    if resume is None or resume is False:
        _refuse_used(run_dir, config)
        return None
    if resume is True or resume in ("auto", "latest"):
        latest = find_latest(run_dir, say, hashes=hashes)
        if latest is None:
            say(f"{run_dir} holds no complete checkpoint: starting from the beginning")
        else:
            check_config(latest, config)
            say(f"going on from {latest}")
        return latest
    folder = Path(resume)
    if not folder.is_dir() and (run_dir / folder).is_dir():
        folder = run_dir / folder
    reason = why_incomplete(folder, hashes=hashes) if folder.is_dir() else "there is no such folder"
    if reason is not None:
        have = ", ".join(path.name for _, path in list_checkpoints(run_dir)) or "none"
        raise CheckpointError(f"cannot resume from {folder}: {reason}. Checkpoints in {run_dir}: {have}.")
    check_config(folder, config)
    say(f"going on from {folder}")
    return folder


def finished(run_dir: Path, start: Path | None) -> dict[str, Any] | None:
    """The state of the checkpoint to go on from when it is the run's last and the run has ended, else None."""
    if start is None or start.parent != run_dir or not (run_dir / ADAPTER_FILE).is_file():
        return None
    path = start / "trainer_state.json"
    try:
        state = read_json(path)
        done = int(state["step"]) >= int(state["plan"]["total_steps"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return state if done else None


def check_config(folder: Path, config: dict[str, Any]) -> None:
    """Raise CheckpointError, with the differences, when a checkpoint is of another configuration."""
    changed = differences(_saved_config(folder), _as_asked(folder, config))
    if changed:
        raise CheckpointError(
            f"{folder} was written with another configuration (saved -> now):\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nSet these back to resume, or set another output.dir to start a new run."
        )


def check_plan(folder: Path, state: dict[str, Any], plan: dict[str, Any], data_fingerprint: str) -> None:
    """Raise CheckpointError when rows, global batch or the number of steps are not those of the checkpoint.

    The schedule would jump, and rows would be seen twice or never: that is never done silently.
    """
    saved = state.get("plan", {})
    changed = [f"{key}: {saved.get(key)} -> {plan[key]}" for key in plan if saved.get(key) != plan[key]]
    if state.get("data_fingerprint") != data_fingerprint:
        changed.append("the tokenised training rows are not the same (a data file, the template or the tokenizer)")
    if changed:
        raise CheckpointError(
            f"{folder} does not fit this run (saved -> now):\n"
            + "\n".join(f"  {line}" for line in changed)
            + "\nThe row order and the learning rate would not go on where they stopped. Put the data and the global "
            "batch (per_device_train_batch_size x gradient_accumulation_steps x processes) back, or set another "
            "output.dir to start a new run."
        )


def _refuse_used(run_dir: Path, config: dict[str, Any]) -> None:
    complete = [folder for _, folder in list_checkpoints(run_dir) if why_incomplete(folder, hashes=False) is None]
    finished = (run_dir / "adapter_model.safetensors").is_file()
    if not complete and not finished:
        return
    what = f"{len(complete)} checkpoint(s), the newest {complete[-1].name}" if complete else "a finished adapter"
    message = f"{run_dir} already holds {what}.\n"
    if complete:
        changed = differences(_saved_config(complete[-1]), _as_asked(complete[-1], config))
        if changed:
            message += "They are of another configuration (saved -> now):\n"
            message += "\n".join(f"  {line}" for line in changed)
            message += "\nSet another output.dir for a new run, or set these back and use --resume."
            raise CheckpointError(message)
        message += "Use --resume to go on with it, or set another output.dir (or move the folder away) for a new run."
    else:
        message += "Set another output.dir, or move the folder away."
    raise CheckpointError(message)


def _as_asked(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """``config`` with `auto` where it has the value that the checkpoint's run gave an `auto`.

    The run's own config.yaml holds these values, and may resume it.
    """
    manifest = folder.parent / FILE_NAME
    decisions = read_json(manifest).get("decisions", {}) if manifest.is_file() else {}
    found = {name: dict(section) if isinstance(section, dict) else section for name, section in config.items()}
    for key, entry in decisions.items():
        section, _, name = key.partition(".")
        if entry.get("asked") == "auto" and found.get(section, {}).get(name) == entry.get("chosen"):
            found[section][name] = "auto"
    return found


def _saved_config(folder: Path) -> dict[str, Any]:
    path = folder / "trainer_state.json"
    try:
        saved = read_json(path)["config"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(saved, dict):
        raise CheckpointError(f"{path}: `config` is not a mapping")
    return saved


def _defaults(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, default) of every key of the configuration that has one."""
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _defaults(field.annotation, f"{prefix}{name}.")
        elif not field.is_required():
            yield f"{prefix}{name}", field.get_default(call_default_factory=True)


def _is_harmless(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in HARMLESS)
