"""Trackers (`train.report_to`) through accelerate."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from frugal.errors import ConfigError

_PACKAGES = {"tensorboard": ("tensorboard", "tensorboardX"), "wandb": ("wandb",), "mlflow": ("mlflow",)}


def check_trackers(report_to: list[str]) -> None:
    """Stop before anything is loaded when a tracker's package is missing."""
    missing = [name for name in report_to if not any(find_spec(package) for package in _PACKAGES.get(name, (name,)))]
    if missing:
        raise ConfigError(
            f"train.report_to names {', '.join(missing)}, which is not installed here. "
            f"Install it (pip install {' '.join(missing)}) or take it out of train.report_to."
        )


class Trackers:
    """Sends each record's numbers to the chosen trackers; does nothing when none is chosen."""

    def __init__(
        self,
        accelerator: Accelerator,
        report_to: list[str],
        run_dir: Path,
        config: dict[str, Any],
        warn: Callable[[str], None],
    ) -> None:
        """Start the trackers; ConfigError when one cannot be started."""
        self._accelerator, self._warn = accelerator, warn
        self._names, self._told = ", ".join(report_to), False
        self._on = bool(report_to)
        if self._on:
            settings = {"tensorboard": {}, "wandb": {"wandb": {"name": run_dir.name}}}
            chosen: dict[str, Any] = {}
            for name in report_to:
                chosen.update(settings.get(name, {}))
            try:
                accelerator.init_trackers("frugal", config=flatten(config), init_kwargs=chosen)
            except Exception as error:  # a tracker's package may raise anything
                raise ConfigError(
                    f"train.report_to: {', '.join(report_to)} could not be started ({_short(error)}). Put that right, "
                    "or take it out of train.report_to."
                ) from error

    def log(self, record: dict[str, Any]) -> None:
        """Send one record of `train_log.jsonl`. A tracker that fails is named once, and tried again with the next."""
        if not self._on:
            return
        values = {key: value for key, value in record.items() if isinstance(value, (int, float))}
        try:
            self._accelerator.log(values, step=int(record["step"]))
        except Exception as error:  # a side matter: the run and its checkpoints go on
            self._failed(error)

    def close(self) -> None:
        """End the trackers' runs. `Accelerator.end_training` is not used: it also ends the process group."""
        if self._on:
            self._on = False
            for tracker in self._accelerator.trackers:
                try:
                    tracker.finish()
                except Exception as error:  # nor may it hide a finished run, or what ended one
                    self._failed(error)

    def _failed(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            self._warn(f"train.report_to: {self._names} failed ({_short(error)}); training goes on")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys with values that every tracker takes (numbers, strings, booleans)."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
