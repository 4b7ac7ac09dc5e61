"""Memory-frugal LoRA and QLoRA fine-tuning. The names below are the Python API; each is imported when first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "frugal.config",
    "load_config": "frugal.config",
    "config_schema": "frugal.config",
    "dump_yaml": "frugal.config",
    "preview": "frugal.run.preview",
    "plan": "frugal.planning",
    "train": "frugal.run.train",
    "evaluate": "frugal.run.evaluate",
    "load": "frugal.inference.load",
    "chat": "frugal.inference.chat",
    "load_run": "frugal.inference.load",
    "get_peft_model": "frugal.adapters.apply",
    "merge": "frugal.exports.registry",
    "export": "frugal.exports.registry",
    "verify": "frugal.run.verify",
    "fetch": "frugal.assets",
    "FrugalError": "frugal.errors",
    "ConfigError": "frugal.errors",
    "DataError": "frugal.errors",
    "ModelError": "frugal.errors",
    "UnsupportedError": "frugal.errors",
    "CheckpointError": "frugal.errors",
    "MemoryBudgetError": "frugal.errors",
    "Interrupted": "frugal.errors",
}
"""Public name -> the module that defines it."""

__all__ = ["__version__", *_PUBLIC]

if TYPE_CHECKING:
    from frugal.config import Config as Config
    from frugal.config import config_schema as config_schema
    from frugal.config import dump_yaml as dump_yaml
    from frugal.config import load_config as load_config
    from frugal.errors import CheckpointError as CheckpointError
    from frugal.errors import ConfigError as ConfigError
    from frugal.errors import DataError as DataError
    from frugal.errors import FrugalError as FrugalError
    from frugal.errors import Interrupted as Interrupted
    from frugal.errors import MemoryBudgetError as MemoryBudgetError
    from frugal.errors import ModelError as ModelError
    from frugal.errors import UnsupportedError as UnsupportedError


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
