"""`frugal.plan(...)`: from a configuration, or only a model's name, to a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from frugal.config import Config, load_config
from frugal.plan.inputs import planned_device
from frugal.plan.plan import Plan, Planner

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


def make_planner(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    vram: str | None = None,
    host_ram: str | None = None,
    tokens: int | None = None,
) -> Planner:
    """A planner for ``source``: a configuration (object, mapping, YAML file), a model's folder, or a name."""
    config = as_config(source, overrides)
    if tokens is not None:
        config = config.model_copy(update={"data": config.data.model_copy(update={"max_length": tokens})})
    return Planner.of(config, planned_device(config.model.dtype, gpu=gpu, vram=vram, host_ram=host_ram))


def plan(
    source: Source,
    overrides: Sequence[str] = (),
    *,
    gpu: str | None = None,
    vram: str | None = None,
    host_ram: str | None = None,
    tokens: int | None = None,
    confirm: bool = True,
) -> Plan:
    """Forecast memory of a run, of which no weight is downloaded and no tensor allocated.

    Args:
        source: a configuration (object, mapping, YAML file), a model's folder, a public model's name, or a hub id.
        gpu: a GPU's name; vram: its memory ("12GB"), alone or instead of the table's; neither: the device found here.
        host_ram: memory of the machine, for plans made elsewhere.
        tokens: length of a row instead of data.max_length.
        confirm: run the longest sequence that fits once more directly.
    """
    planner = make_planner(source, overrides, gpu=gpu, vram=vram, host_ram=host_ram, tokens=tokens)
    return planner.plan(confirm=confirm)
