"""Memory-frugal LoRA and QLoRA fine-tuning. The names below are the Python API; each is imported when first used.

`frugal.train`, `frugal.chat` and `frugal.fetch` are also modules: the module can be called, so that both
`frugal.train(config)` and `from frugal.train import ...` work whatever was imported first
(docs/decisions/0002-public-names.md).
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "frugal.config",
    "load_config": "frugal.config",
    "config_schema": "frugal.config",
    "dump_yaml": "frugal.config",
    "preview": "frugal.run",
    "plan": "frugal.plan",
    "train": "frugal.run",
    "evaluate": "frugal.run",
    "load": "frugal.chat",
    "chat": "frugal.chat",
    "load_run": "frugal.chat",
    "merge": "frugal.save.merge",
    "fetch": "frugal.fetch",
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

_CALLABLE = ("train", "chat", "fetch", "plan")
"""Public functions whose name is a module's too."""

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


class _CallableModule(ModuleType):
    """One of our own modules that shares its name with a public function: calling it calls the function."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        name = self.__name__.rpartition(".")[2]
        return getattr(import_module(_PUBLIC[name]), name)(*args, **kwargs)


class _Package(ModuleType):
    """This package. The import system binds submodules here; those in `_CALLABLE` become callable at that moment."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _CALLABLE and type(value) is ModuleType:
            value.__class__ = _CallableModule
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __getattr__(name: str) -> Any:
    if name in _CALLABLE:
        return import_module(f"{__name__}.{name}")
    if name in _PUBLIC:
        return getattr(import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})
