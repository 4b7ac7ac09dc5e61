"""The dtype of what is trained: float32, whatever the base's dtype."""

from __future__ import annotations

from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn


def masters_float32(model: nn.Module) -> None:
    """Make everything that belongs to an adapter float32, frozen or not. Call it after adding or loading one."""
    for module in model.modules():
        parts: list[Any] = []
        if isinstance(module, BaseTunerLayer):
            parts = [getattr(module, name, None) for name in module.adapter_layer_names]
        elif isinstance(module, ModulesToSaveWrapper):
            parts = [module.modules_to_save]
        for part in parts:
            for parameter in part.parameters() if isinstance(part, nn.Module) else []:
                if parameter.is_floating_point() and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()
