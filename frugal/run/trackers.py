"""Trackers (`train.report_to`) through accelerate."""

from __future__ import annotations

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

    def __init__(self, accelerator: Accelerator, report_to: list[str], run_dir: Path, config: dict[str, Any]) -> None:
        self._accelerator = accelerator
        self._on = bool(report_to)
        if self._on:
            settings = {"tensorboard": {}, "wandb": {"wandb": {"name": run_dir.name}}}
            chosen: dict[str, Any] = {}
            for name in report_to:
                chosen.update(settings.get(name, {}))
            accelerator.init_trackers("frugal", config=flatten(config), init_kwargs=chosen)

    def log(self, record: dict[str, Any]) -> None:
        """Send one record of `train_log.jsonl`."""
        if self._on:
            values = {key: value for key, value in record.items() if isinstance(value, (int, float))}
            self._accelerator.log(values, step=int(record["step"]))

    def close(self) -> None:
        """End the trackers' runs. `Accelerator.end_training` is not used: it also ends the process group."""
        if self._on:
            for tracker in self._accelerator.trackers:
                tracker.finish()
            self._on = False


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
