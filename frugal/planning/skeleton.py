"""A run's model without memory: the real classes on fake tensors, with few layers, and how their number scales."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from frugal.adapters import apply_adapters
from frugal.adapters.embedding import place_of_table
from frugal.config import LoraSection, MemorySection, ModelSection
from frugal.models.attention import use_attention
from frugal.models.host_embedding import HostEmbedding, put_on_host
from frugal.models.load import resident_dtype
from frugal.models.replace_modules import swap_modules
from frugal.models.skeleton import build_meta, linear_kinds, put_nf4
from frugal.models.upcast_on_use import keep_stored
from frugal.objectives import LossModule, make_objective

SHORTEST = 3
"""Layers of the smaller of the two models that are run: first, last and one in between."""


@dataclass(frozen=True)
class Part:
    """One loaded tensor: bytes while it is read (in the checkpoint's dtype) and afterwards."""

    name: str
    read_bytes: int
    scratch_bytes: int
    """Temporaries of quantising it."""
    kept_bytes: int


@dataclass
class FakeRun:
    """What training works on, without memory."""

    module: LossModule
    base: Any
    parts: list[Part]
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


def stored_dtype(config: Any) -> torch.dtype:
    """Dtype of the checkpoint, by its configuration; bfloat16 where it does not say."""
    found = getattr(config, "dtype", None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16


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
) -> FakeRun:
    """The model of ``config`` with adapter and fused modules on fake tensors of ``device`` ("cpu", "meta").

    Nothing is proven, since there are no numbers: modules are replaced by structure. Mirrors `load_base` and the hops
    of `run.py` with the same functions.
    """
    config = copy.deepcopy(config)
    if vocab_size is not None and config.get_text_config().vocab_size < vocab_size:
        config.get_text_config().vocab_size = vocab_size
    base = build_meta(config, trust_remote_code=model.trust_remote_code)
    base.config._name_or_path = base.name_or_path = model.base
    stored = stored_dtype(config)
    count = sum(p.numel() for p in base.parameters())
    dense = {name: p.numel() * stored.itemsize for name, p in base.named_parameters()}
    if model.quantize == "nf4":
        put_nf4(base, linear_kinds(base)[0], model.bnb_4bit_use_double_quant)
    tokens = [config.get_text_config().vocab_size - 1 - i for i in range(len(model.add_tokens))]
    kind = "cpu" if device == "cpu" else "cuda"
    on_host = place_of_table(memory.embedding, base, lora, kind=kind, adds_tokens=bool(tokens)).on_host
    table = next(f"{name}.weight" for name, each in base.named_modules() if each is base.get_input_embeddings())
    parts = _set_dtypes(base, dense, stored, compute)
    base.requires_grad_(False)
    keep_stored(base, compute)
    base.eval()
    host_bytes = 0
    if on_host:
        host_bytes = put_on_host(base, torch.device(device), compute).weight.nbytes
        parts = [part for part in parts if part.name != table]  # read to the host and never on the device
    choice = use_attention(base, prove=False)
    # PiSSA and LoftQ need numbers; their adapters have the sizes of any other.
    lora = lora.model_copy(update={"init_lora_weights": "default"})
    applied = apply_adapters(base, lora, seed=0, quantize=model.quantize, new_token_ids=tokens)
    if memory.fused:
        swap_modules(applied.model, compute_dtype=compute, mlp_tile_tokens=memory.mlp_chunk_tokens, prove=False)
    flat = choice.name == "frugal" or packed
    module = LossModule(applied.model, make_objective(flat=flat), chunk_tokens=memory.loss_chunk_tokens, prove=False)
    with mode:
        _materialise(module, torch.device(device))
    return FakeRun(module, base, parts, flat, choice.name, parameters=count, host_embedding_bytes=host_bytes)


def _set_dtypes(base: nn.Module, dense: dict[str, int], stored: torch.dtype, compute: torch.dtype) -> list[Part]:
    """Give every tensor the dtype that `load_base` gives it; returns what loading handles, in the model's order."""
    parts: list[Part] = []
    done: set[int] = set()
    for owner, module in base.named_modules():
        is_table = isinstance(module, nn.Linear | nn.Embedding)
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            if parameter.dtype.is_floating_point:
                dtype = resident_dtype(stored, parameter.ndim if is_table else 0, compute)
                parameter.data = parameter.data.to(dtype)
            read = dense.get(f"{owner}.{name}".removeprefix("."))
            if read is not None:  # the scales of an NF4 layer come with its weight
                scales = _scale_bytes(module) if name == "weight" else 0
                scratch = 3 * (read // stored.itemsize // 64) * 4 if scales else 0
                parts.append(Part(f"{owner}.{name}", read, scratch, parameter.nbytes + scales))
    return parts


def _scale_bytes(module: nn.Module) -> int:
    tensors = [getattr(module, name, None) for name in ("absmax", "nested_absmax", "offset")]
    return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


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
