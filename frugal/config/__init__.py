"""Configuration: YAML or a dict to a checked, frozen `Config`. Imports neither torch nor transformers."""

from frugal.config.load import load_config
from frugal.config.models import (
    Config,
    DataSection,
    DistributedSection,
    LoraSection,
    MemorySection,
    ModelSection,
    OutputSection,
    SourceSection,
    TrainSection,
)
from frugal.config.write import config_schema, dump_yaml

__all__ = [
    "Config",
    "DataSection",
    "DistributedSection",
    "LoraSection",
    "MemorySection",
    "ModelSection",
    "OutputSection",
    "SourceSection",
    "TrainSection",
    "config_schema",
    "dump_yaml",
    "load_config",
]
