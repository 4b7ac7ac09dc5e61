"""The ready configurations: `configs/` of a checkout, the same files inside an installed package."""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from frugal.errors import ConfigError
from frugal.files import write_text

LAUNCH = "accelerate/"


def shipped_configs() -> dict[str, str]:
    """Name (without .yaml) of a run's configuration -> the file's text, sorted by name."""
    return _texts(_folder())


def launch_configs() -> dict[str, str]:
    """The same of the files for `accelerate launch --config_file`: accelerate/ddp, accelerate/fsdp2, ..."""
    return {LAUNCH + name: text for name, text in _texts(_folder() / LAUNCH.rstrip("/")).items()}


def _folder() -> Traversable:
    checkout = Path(__file__).parents[2] / "configs"
    # a wheel carries configs/ as the package frugal.configs (setup.py)
    return checkout if checkout.is_dir() else files("frugal.configs")


def _texts(folder: Traversable) -> dict[str, str]:
    found = {entry.name: entry for entry in folder.iterdir() if entry.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): found[name].read_text(encoding="utf-8") for name in sorted(found)}


def shipped_config(name: str) -> str:
    """The text of one ready configuration; ConfigError names those that exist."""
    configs = {**shipped_configs(), **launch_configs()}
    name = name.removesuffix(".yaml")
    if name not in configs:
        raise ConfigError(f"no ready configuration is called {name!r}; there are {', '.join(configs)}")
    return configs[name]


def summary(text: str) -> str:
    """The first comment line of a configuration."""
    first = text.lstrip().split("\n", 1)[0]
    return first.removeprefix("#").strip() if first.startswith("#") else ""


def copy_config(name: str, destination: Path | None = None) -> Path:
    """Write a ready configuration to a file (default: NAME.yaml here); an existing file is never overwritten."""
    text = shipped_config(name)
    file_name = Path(name).name.removesuffix(".yaml") + ".yaml"
    target = destination or Path(file_name)
    if target.is_dir():
        target = target / file_name
    if target.exists():
        raise ConfigError(f"{target} exists already; give another name: frugal configs copy {name} OTHER.yaml")
    write_text(target, text)
    return target
