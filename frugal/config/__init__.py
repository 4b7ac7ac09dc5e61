"""Configuration: YAML or a dict to a checked, frozen `Config`. Imports neither torch nor transformers."""

from frugal.config.docs import config_schema
from frugal.config.load import dump_yaml, load_config
from frugal.config.schema import (
    Config,
    DataSection,
    DistributedSection,
    LoraSection,
    MemorySection,
    ModelSection,
    ObjectiveSection,
    OutputSection,
    SourceSection,
    TrainSection,
)

__all__ = [
    "Config",
    "DataSection",
    "DistributedSection",
    "LoraSection",
    "MemorySection",
    "ModelSection",
    "ObjectiveSection",
    "OutputSection",
    "SourceSection",
    "TrainSection",
    "config_schema",
    "dump_yaml",
    "load_config",
]
