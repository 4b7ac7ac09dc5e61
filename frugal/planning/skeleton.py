"""A run's model without memory: the real classes on fake tensors, with few layers, and how their number scales."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frugal.config import LoraSection, MemorySection, ModelSection, ObjectiveSection
from frugal.models.attention import join_rows
from frugal.models.build import ModelSpec, build
from frugal.models.materialize import LoadedTensor
from frugal.models.modules.host_embedding import HostEmbedding
from frugal.models.resolve import ResolvedModel
from frugal.objectives import LossModule, configured_objective

SHORTEST = 3
"""Layers of the smaller of the two models that are run: first, last and one in between."""


@dataclass
class FakeRun:
    """What training works on, without memory."""

    module: LossModule
    base: Any
    parts: list[LoadedTensor]
    """Tensors in the order of the model."""
    flat: bool
    attention: str
    parameters: int
    """Of the base, as its checkpoint counts them."""
    host_embedding_bytes: int = 0
    """Of a table that waits on the host."""


def layer_count(config: Any) -> int:
    """Number of decoder layers."""
    return int(config.get_text_config().num_hidden_layers)


def _per_layer(config: Any) -> dict[str, list[Any]]:
    text = config.get_text_config()
    count = layer_count(config)
    return {k: list(v) for k, v in vars(text).items() if isinstance(v, list | tuple) and len(v) == count}


def layer_counts(config: Any) -> tuple[int, int] | None:
    """Two small numbers of layers from which every larger one follows linearly; None: run the model whole.

    Layers may alternate (sliding and full attention): both numbers then end like the whole model does.
    """
    count, lists = layer_count(config), list(_per_layer(config).values())
    kinds = [tuple(str(values[i]) for values in lists) for i in range(count)]
    period = next(p for p in range(1, count + 1) if all(kinds[i] == kinds[i % p] for i in range(count)))
    short = count % period
    while short < max(SHORTEST, period):  # every kind of layer is there
        short += period
    return (short, short + period) if short + period < count else None


def with_layers(config: Any, count: int) -> Any:
    """A copy of a transformers configuration with the first ``count`` layers."""
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    for key, values in _per_layer(config).items():
        setattr(text, key, values[:count])
    text.num_hidden_layers = count
    return changed


def build_fake(
    config: Any,
    *,
    model: ModelSection,
    lora: LoraSection,
    memory: MemorySection,
    compute: torch.dtype,
    device: str,
    mode: Any,
    vocab_size: int | None = None,
    packed: bool = False,
    objective: ObjectiveSection | None = None,
) -> FakeRun:
    """The model of ``config`` with adapter and fused modules on fake tensors of ``device`` ("cpu", "meta").

    Built by the run's own builder, with weights from nowhere.
    """
    config = copy.deepcopy(config)
    if vocab_size is not None and config.get_text_config().vocab_size < vocab_size:
        config.get_text_config().vocab_size = vocab_size
    tokens = [config.get_text_config().vocab_size - 1 - i for i in range(len(model.add_tokens))]
    spec = ModelSpec(
        source=ResolvedModel(
            model.base, Path(model.base), "configuration", None, model.trust_remote_code, configuration=config
        ),
        quantize=model.quantize,
        double_quant=model.bnb_4bit_use_double_quant,
        dtype=compute,
        device=torch.device(device),
        embedding=memory.embedding,
        lora=lora,
        new_token_ids=tokens,
        fused=memory.fused,
        mlp_tile_tokens=memory.mlp_chunk_tokens,
    )
    built = build(spec, "meta")
    flat = join_rows(built.base, built.attention.value, packing=packed).value
    trained_for = configured_objective(objective or ObjectiveSection(), flat=flat)
    module = LossModule(built.model, trained_for, chunk_tokens=memory.loss_chunk_tokens, head=built.head)
    with mode:
        _materialise(module, torch.device(device))
    table = built.base.get_input_embeddings()
    return FakeRun(
        module,
        built.base,
        built.tensors,
        flat=flat,
        attention=built.attention.value,
        parameters=built.report.parameters,
        host_embedding_bytes=table.weight.nbytes if isinstance(table, HostEmbedding) else 0,
    )


def _materialise(module: nn.Module, device: torch.device) -> None:
    """Put a fake tensor in the place of every parameter, buffer and tensor attribute, shared ones shared."""
    made: dict[int, Any] = {}

    def fake(old: torch.Tensor) -> Any:
        if id(old) not in made:
            fresh = torch.empty(old.shape, dtype=old.dtype, device=device)
            kind = isinstance(old, nn.Parameter)
            made[id(old)] = (old, nn.Parameter(fresh, requires_grad=old.requires_grad) if kind else fresh)
        return made[id(old)][1]

    for inner in module.modules():
        if isinstance(inner, HostEmbedding):
            continue
        for table in (inner._parameters, inner._buffers, vars(inner)):
            for name, old in list(table.items()):
                if isinstance(old, torch.Tensor):
                    table[name] = fake(old)
