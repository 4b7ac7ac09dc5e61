"""Loading for sharding: each decoder layer is filled, proven, handed over, and only then the next is read.

A process holds its shards, one whole layer and one tensor as stored, beside embeddings and head: never the whole base,
neither in 16 nor in 4 bits. Every process reads all tensors: double quantisation takes a mean over a whole matrix, so
a process cannot quantise its rows alone and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from frugal.adapters import Applied, apply_adapters
from frugal.adapters.held import needs_weights, start_magnitudes
from frugal.adapters.targets import resolve_targets
from frugal.config import LoraSection
from frugal.errors import UnsupportedError
from frugal.models.attention import AttentionChoice, use_attention
from frugal.models.checkpoint_files import StoredTensor, read_header
from frugal.models.deferred_layers import NO_LAYERS, cannot_hold, decoder_layers
from frugal.models.head import HeadSpec, split_head
from frugal.models.load import load_base
from frugal.models.replace_modules import swap_modules
from frugal.models.replacement_report import SwapReport
from frugal.models.report import LoadReport
from frugal.models.resolve import BaseSource, weight_files
from frugal.models.skeleton import build_meta, map_keys

OnLayer = Callable[[str, nn.Module], object]
"""What takes over a filled layer: (its name in the adapted model, the layer). It may change parameters in place."""


@dataclass
class FilledModel:
    """An adapted model whose layers were handed over one at a time, and how it came to be."""

    model: Any
    """`peft.PeftModel`"""
    loaded: LoadReport
    attention: AttentionChoice
    applied: Applied
    swaps: SwapReport | None
    """What was replaced by frugal's fused modules; None with ``fused`` off."""
    head: HeadSpec
    """The head, proven while the model could still be run by itself: for `LossModule`."""


def load_layer_by_layer(
    source: BaseSource,
    lora: LoraSection,
    *,
    on_layer: OnLayer,
    seed: int,
    quantize: Literal["nf4", "none"] = "nf4",
    double_quant: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    new_token_ids: Sequence[int] = (),
    host_embedding: bool = False,
    attention: str = "auto",
    fused: bool = True,
    mlp_tile_tokens: int | None = None,
) -> FilledModel:
    """Load ``source`` with a fresh adapter; parameter for parameter what `load_base`, `apply_adapters` and
    `swap_modules` give one after the other on a whole model.

    After all else of the model is there, for each decoder layer in turn: its tensors are read, its modules replaced
    where they are proven equal, and it is given to ``on_layer``, which may free most of it (FSDP2's `fully_shard`).

    Raises:
        UnsupportedError: the base or the adapter needs the whole model at once (`needs_whole_base`); before any weight
            is read.
    """
    reason = needs_whole_base(source, lora, trust_remote_code=trust_remote_code)
    if reason is not None:
        raise UnsupportedError(cannot_hold(reason))
    loaded = load_base(
        source,
        quantize=quantize,
        double_quant=double_quant,
        dtype=dtype,
        device=device,
        trust_remote_code=trust_remote_code,
        vocab_size=vocab_size,
        hold_layers=True,
        host_embedding=host_embedding,
    )
    assert loaded.held is not None
    held = loaded.held
    choice = use_attention(loaded.model, attention, held=held)
    applied = apply_adapters(loaded.model, lora, seed=seed, quantize=quantize, new_token_ids=new_token_ids)
    swap = partial(swap_modules, applied.model, compute_dtype=dtype, mlp_tile_tokens=mlp_tile_tokens)
    names = {module: name for name, module in applied.model.named_modules()}
    layers = {names[layer]: waiting for waiting, layer in held.layers.items()}
    del names  # modules that are replaced must go, and their parameters with them
    swaps = swap(leave=layers) if fused else None
    with held.only(held.waiting[0]):
        head = split_head(applied.model)
    for name, waiting in layers.items():
        layer = held.fill(waiting)
        if lora.use_dora:
            start_magnitudes(layer, applied.model.peft_config["default"])
        if swaps is not None:
            swaps.extend(swap(only=name))
        on_layer(name, layer)
    return FilledModel(applied.model, loaded.report, choice, applied, swaps, head)


def needs_whole_base(source: BaseSource, lora: LoraSection, *, trust_remote_code: bool = False) -> str | None:
    """Why ``source`` with this adapter cannot be loaded layer by layer; None when it can. Reads headers alone."""
    model = build_meta(source.config(), trust_remote_code=trust_remote_code)
    layers = decoder_layers(model)
    if not layers:
        return NO_LAYERS
    entries: dict[str, StoredTensor] = {}
    for path in weight_files(source.path):
        entries.update(read_header(path))
    keys = map_keys(model, entries, {name: entry.shape for name, entry in entries.items()})
    return keys.conversion or needs_weights(lora, resolve_targets(model, lora), layers)
