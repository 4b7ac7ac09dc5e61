"""LoRA adapters through PEFT: which layers, which dtype, which start, and the files."""

from frugal.adapters.apply import Applied, adapter_state, apply_adapters, inject, masters_float32
from frugal.adapters.files import load_adapter, save_adapter
from frugal.adapters.patterns import PatternRow
from frugal.adapters.targets import Scale, resolve_targets

__all__ = [
    "Applied",
    "PatternRow",
    "Scale",
    "adapter_state",
    "apply_adapters",
    "inject",
    "load_adapter",
    "masters_float32",
    "resolve_targets",
    "save_adapter",
]
