"""The structure of transformers models: decoder layers, routers, tables, and where an input belongs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

# Last parts of names of linear layers that choose experts or score: tiny, and a wrong choice costs more than the bytes.
_ROUTERS = re.compile(r"(^|\.)(gate|router|wg|shared_expert_gate|classifier|score)$")
_HOOKED = "frugal_engine_hooks"


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> decoder layer (transformers' `GradientCheckpointingLayer`), the outermost where they are nested."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not inside(name, found):
            found[name] = module
    return found


@dataclass(frozen=True)
class EngineHooks:
    """What an engine that partitions parameters by hooks did to a module. It marks each instance (`mark_hooked`)."""

    count: int
    """Forward hooks, and as many pre-hooks, that the engine has on the module: they gather and give up."""
    gathered: Callable[[], AbstractContextManager[None]]
    """Inside, the module's frozen parameters are whole, though its forward is not called."""


def mark_hooked(module: nn.Module, hooks: EngineHooks | None) -> None:
    """Leave on the module what an engine did to it; None when its hooks are gone."""
    vars(module).pop(_HOOKED, None)
    if hooks is not None:
        vars(module)[_HOOKED] = hooks


def engine_hooks(module: nn.Module) -> EngineHooks | None:
    """What `mark_hooked` left on the module."""
    found: EngineHooks | None = vars(module).get(_HOOKED)
    return found


def inside(name: str, layers: Iterable[str]) -> bool:
    """Whether the module or parameter ``name`` is one of ``layers`` or in one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def stacked_experts(module: nn.Module) -> dict[str, int]:
    """Name -> values of the parameters of ``module`` that stack the matrices of its experts; {} where it has none."""
    found = {name: p for name, p in module.named_parameters(recurse=False) if p.dim() == 3}
    if len(found) < 2 or len({p.shape[0] for p in found.values()}) > 1:  # a convolution has one such parameter
        return {}
    return {name: p.numel() for name, p in found.items()}


def router_names(model: nn.Module) -> set[str]:
    """Names of linear layers that choose experts or score: neither quantised nor in `all-linear`.

    By what they do: beside experts, one output for each of them. By name where a model's experts are not known.
    """
    modules = dict(model.named_modules())
    found = {name for name, module in modules.items() if isinstance(module, nn.Linear) and _ROUTERS.search(name)}
    for name, module in modules.items():
        stacked = [p for p in module.parameters(recurse=False) if p.dim() == 3] if stacked_experts(module) else []
        count = stacked[0].shape[0] if stacked else len(module) if _expert_list(name, module) else 0
        if not count:
            continue
        for child, beside in modules[name.rpartition(".")[0]].named_children():
            linears = [(n, m) for n, m in beside.named_modules() if isinstance(m, nn.Linear)]
            if beside is not module and len(linears) == 1 and linears[0][1].out_features == count:
                found.add(".".join(part for part in (name.rpartition(".")[0], child, linears[0][0]) if part))
    return found


def _expert_list(name: str, module: nn.Module) -> TypeGuard[nn.ModuleList]:
    return isinstance(module, nn.ModuleList) and len(module) > 1 and name.rsplit(".", 1)[-1] == "experts"


def unreached_by_text(model: Any) -> list[str]:
    """Names of modules that a text alone never runs through: towers of other senses, layers that look at their output.

    A model of text alone has none. What is inside a module named here is not reached either.
    """
    text, decoder = model.config.get_text_config(), model.get_decoder()
    kept = next((name for name, module in model.named_modules() if module is decoder), "")
    found: list[str] = []
    if text is not model.config and kept:
        head = model.get_output_embeddings()
        wanted = [kept, *(name for name, module in model.named_modules() if head is not None and module is head)]
        for name, _ in model.named_modules():
            if name and not inside(name, [*wanted, *found]) and not any(inside(one, [name]) for one in wanted):
                found.append(name)
    crossed = getattr(text, "cross_attention_layers", None) or []
    layers = [name for name in decoder_layers(model) if not inside(name, found)]
    return [*found, *(name for name in layers if name.rsplit(".", 1)[-1] in {str(index) for index in crossed})]


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
