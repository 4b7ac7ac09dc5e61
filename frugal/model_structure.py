"""The structure of transformers models: decoder layers, routers, tables, and where an input belongs."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Last parts of names of linear layers that choose experts or score: tiny, and a wrong choice costs more than the bytes.
_ROUTERS = re.compile(r"(^|\.)(gate|router|wg|shared_expert_gate|classifier|score)$")


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> decoder layer (transformers' `GradientCheckpointingLayer`), the outermost where they are nested."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not inside(name, found):
            found[name] = module
    return found


def inside(name: str, layers: Iterable[str]) -> bool:
    """Whether the module or parameter ``name`` is one of ``layers`` or in one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def is_router(name: str) -> bool:
    """Whether a linear layer's name says that it chooses experts or scores: neither quantised nor in `all-linear`."""
    return _ROUTERS.search(name) is not None


def input_device(model: Any) -> torch.device:
    """The device of what the model's embedding gives out (a table on the host names it): where an input belongs."""
    embedding = model.get_input_embeddings()
    device: torch.device = getattr(embedding, "device", None) or embedding.weight.device
    return device


def table_names(model: Any) -> list[str]:
    """Names of the embedding table and, where there is one, of the head."""
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    return [name for table in tables for name, module in model.named_modules() if module is table and table is not None]


def is_tied(model: Any) -> bool:
    """Whether the head is the embedding table."""
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    return head is not None and head.weight is embedding.weight
