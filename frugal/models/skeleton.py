"""A model without memory: built on the meta device, NF4 layers in place, and how file names map onto its names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from frugal.codecs import Cut, NF4Codec, NF4Linear, Piece
from frugal.errors import UnsupportedError
from frugal.model_structure import router_names
from frugal.models.modules.experts import NF4Experts, cuts, experts_candidate
from frugal.models.report import NOT_LINEAR
from frugal.tensor_files import StoredTensor


def build_meta(config: Any, *, trust_remote_code: bool) -> PreTrainedModel:
    """The model of ``config`` on the meta device: names and shapes, no memory.

    Raises:
        UnsupportedError: transformers has no causal language model for this configuration.
    """
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    except ValueError as error:
        raise UnsupportedError(
            f"transformers has no causal language model for model_type {config.model_type!r}: {error}"
        ) from error
    return model


def linear_kinds(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """(names of linear layers to quantise, name -> reason of the weights that stay as they are)."""
    head = model.get_output_embeddings()
    chosen: list[str] = []
    kept: dict[str, str] = {}
    routers = router_names(model)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            if module is head:
                kept[name] = "the head stays in 16 bits"
            elif name in routers:
                kept[name] = "a router: tiny, and its choices are sensitive"
            else:
                chosen.append(name)
        else:
            for part, parameter in module.named_parameters(recurse=False):
                if parameter.ndim >= 2 and not isinstance(module, nn.Embedding):
                    kept[f"{name}.{part}"] = f"{NOT_LINEAR} ({type(module).__name__}, {tuple(parameter.shape)})"
    return chosen, kept


def expert_kinds(model: PreTrainedModel) -> tuple[list[str], dict[str, str]]:
    """(names of experts modules whose stacks to quantise, name -> reason of those that stay as they are)."""
    chosen: list[str] = []
    kept: dict[str, str] = {}
    for name, module in model.named_modules():
        candidate = experts_candidate(module, NF4Codec())
        if isinstance(candidate, str):
            kept[name] = candidate
        elif candidate is not None:
            chosen.append(name)
    return chosen, kept


def expert_cuts(model: PreTrainedModel) -> dict[str, Cut]:
    """Name of each parameter that `expert_kinds` has quantised -> how."""
    return {
        f"{name}.{part}": cut
        for name in expert_kinds(model)[0]
        for part, cut in cuts(model.get_submodule(name)).items()
    }


def insert_nf4(model: PreTrainedModel, names: Iterable[str], double_quant: bool) -> None:
    """Replace the modules ``names``, linear layers and experts, by empty NF4 ones of the same names."""
    for name in names:
        old = model.get_submodule(name)
        if not isinstance(old, nn.Linear):
            model.set_submodule(name, NF4Experts(old, NF4Codec(double_quant)))
            continue
        new = NF4Linear(old.in_features, old.out_features, bias=False, double=double_quant, device="meta")
        new.bias = old.bias
        model.set_submodule(name, new.train(old.training))


@dataclass
class KeyMap:
    """How a checkpoint's names map onto a model's."""

    targets: dict[str, str] = field(default_factory=dict)
    """Checkpoint name -> model name."""
    pieces: dict[str, tuple[str, Piece]] = field(default_factory=dict)
    """Checkpoint name -> (name in the model of the stack of experts that it is a matrix of, which one)."""
    unexpected: list[str] = field(default_factory=list)
    """Checkpoint names without a place in the model."""
    missing: set[str] = field(default_factory=set)
    """Model names (tied ones included) that no checkpoint name maps to."""
    conversion: str = ""
    """Why names do not map one to one: tensors must be joined, split or transposed first. Empty: they do."""


def map_keys(model: PreTrainedModel, entries: Mapping[str, StoredTensor]) -> KeyMap:
    """Map the names of a checkpoint's tensors with transformers' own renaming rules."""
    transforms = get_model_conversion_mapping(model)
    renamings = [transform for transform in transforms if isinstance(transform, WeightRenaming)]
    converters = [transform for transform in transforms if isinstance(transform, WeightConverter)]
    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    present = dict.fromkeys(state, True)
    result = KeyMap()
    for name in sorted(entries):
        shape = entries[name].shape
        target, converter = rename_source_key(name, renamings, converters, model.base_model_prefix, present)
        piece = None if converter is None else _piece(name, converter, converters, shape, state.get(target, ()))
        if piece is not None:
            result.pieces[name] = target, piece
        elif converter is not None:
            result.conversion = result.conversion or f"{name} is converted ({converter})"
        elif target not in state:
            result.unexpected.append(name)
        elif state[target] != shape:
            result.conversion = result.conversion or f"{name} is {shape}, the model has {state[target]}"
        elif target in result.targets.values():
            result.conversion = result.conversion or f"two tensors map to {target}"
        else:
            result.targets[name] = target
    _drop_incomplete(result, state)
    result.missing = set(state) - set(result.targets.values()) - {target for target, _ in result.pieces.values()}
    return result


def _piece(
    name: str, pattern: str, converters: list[Any], shape: tuple[int, ...], stack: tuple[int, ...]
) -> Piece | None:
    """Which part of a ``stack`` the matrix ``name`` is; None where it is converted in another way than by stacking.

    transformers joins matrices of experts by their number, and gate's rows with up's in the order of the patterns.
    """
    converter = next(one for one in converters if pattern in one.source_patterns)
    kinds = [(type(one), getattr(one, "dim", None)) for one in converter.operations]
    number = re.search(r"\.experts\.(\d+)\.", name)
    parts = len(converter.source_patterns)
    joined = [(MergeModulelist, 0), (Concatenate, 1)][: 1 if parts == 1 else 2]
    if kinds != joined or number is None or len(converter.target_patterns) != 1 or len(stack) != 3:
        return None
    piece = Piece(int(number[1]), converter.source_patterns.index(pattern), parts)
    fits = shape == (stack[1] // parts, stack[2]) and stack[1] % parts == 0 and piece.expert < stack[0]
    return piece if fits else None


def _drop_incomplete(keys: KeyMap, state: Mapping[str, tuple[int, ...]]) -> None:
    """Take matrices out whose stack lacks others: the stack is then missing as a whole, and is named so."""
    found: dict[str, set[tuple[int, int]]] = {}
    for target, piece in keys.pieces.values():
        found.setdefault(target, set()).add((piece.expert, piece.part))
    wanted = {target: state[target][0] * piece.parts for target, piece in keys.pieces.values()}
    keys.pieces = {
        name: (target, piece)
        for name, (target, piece) in keys.pieces.items()
        if len(found[target]) == wanted[target] and target not in keys.targets.values()
    }


def ignorable(model: PreTrainedModel, names: Iterable[str], *, missing: bool) -> list[str]:
    """``names`` without those that the model's class declares harmless when missing (or unexpected)."""
    patterns = list(
        (model._keys_to_ignore_on_load_missing if missing else model._keys_to_ignore_on_load_unexpected) or []
    )
    if not missing:
        patterns += [r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]  # buffers of old checkpoints, computed today
    return sorted(name for name in names if not any(re.search(pattern, name) for pattern in patterns))


_SENTINEL = 123_454_321.0  # no buffer that a model computes for itself is full of this number


@torch.no_grad()
def fill_buffers(model: PreTrainedModel, device: torch.device) -> list[str]:
    """Compute the buffers that no checkpoint holds (rotary frequencies) with the model's own initialisation.

    Returns the names of those that the initialisation does not set; their model must be loaded another way.
    """
    unset: list[str] = []
    owner = model
    for name, module in model.named_modules():
        owner = _owner(model, name)
        names = [key for key in module._non_persistent_buffers_set if module._buffers.get(key) is not None]
        meta = [
            key for key, buffer in module._buffers.items() if key in names and buffer is not None and buffer.is_meta
        ]
        if not meta:
            continue
        for key in meta:
            buffer = module._buffers[key]
            assert buffer is not None
            fill = _SENTINEL if buffer.is_floating_point() else 0
            module._buffers[key] = torch.full(buffer.shape, fill, dtype=buffer.dtype, device=device)
        owner._init_weights(module)
        for key in meta:
            buffer = module._buffers[key]
            assert buffer is not None
            untouched = bool((buffer == _SENTINEL).all()) if buffer.is_floating_point() else True
            if untouched and buffer.numel():
                unset.append(f"{name}.{key}")
    return unset


def _owner(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost transformers model that holds the module ``name``: its class knows how to initialise it."""
    owner, module = model, model
    for part in name.split(".") if name else []:
        module = getattr(module, part)
        if isinstance(module, PreTrainedModel):
            owner = module
    return owner
