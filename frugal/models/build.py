"""Build a model, whatever it is for: skeleton, weights, attention, adapters, replaced modules, head.

The only builder: training, `frugal.load` and chat, layer-by-layer loading for sharding, and the planner call `build`,
which differ in where weights come from. Layer by layer, each decoder layer is filled, its modules are replaced, it is
handed over, and only then the next is read: a process holds its shards, one whole layer and one tensor as stored,
beside embeddings and head, never the whole base. Every process reads all tensors: double quantisation takes a mean over
a whole matrix, so a process cannot quantise its rows alone and get the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from frugal.adapters.apply import Applied, apply_adapters, needs_weights, start_magnitudes
from frugal.adapters.files import load_adapter
from frugal.adapters.peft_model import FrugalPeftModel, base_record, compute_in
from frugal.adapters.targets import resolve_targets
from frugal.config import LoraSection
from frugal.errors import UnsupportedError
from frugal.model_structure import decoder_layers
from frugal.models.attention import AttentionDecision, use_attention
from frugal.models.head import HeadSpec, split_head
from frugal.models.load import LoadedBase, Weights, load_base
from frugal.models.materialize import NO_LAYERS, LoadedTensor, not_by_layer
from frugal.models.modules.experts import NF4Experts
from frugal.models.modules.host_embedding import decide_embedding
from frugal.models.quantizer import EncodedBase
from frugal.models.replacement import ReplacementReport, replace_modules
from frugal.models.report import LoadReport
from frugal.models.resolve import ResolvedModel, stored_tensors
from frugal.models.skeleton import build_meta, map_keys

OnLayer = Callable[[str, nn.Module], object]
"""What takes over a filled layer: (its name in the adapted model, the layer). It may change parameters in place."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a model is built from, and for what."""

    source: ResolvedModel
    quantize: Literal["nf4", "none"] = "nf4"
    double_quant: bool = True
    quantize_experts: bool = True
    """Whether "nf4" holds for stacks of experts too: not in runs of frugal 0.1.0."""
    dtype: torch.dtype = torch.float32
    """Of the computation."""
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    """Without memory "meta" stands for a GPU."""
    vocab_size: int | None = None
    """Rows that the embedding table must have at least."""
    embedding: Literal["auto", "device", "host"] = "device"
    """`memory.embedding`."""
    lora: LoraSection | None = None
    """A fresh adapter; None: no adapter, or the one of ``adapter``."""
    seed: int = 0
    new_token_ids: Sequence[int] = ()
    """Rows of the embedding table to train with a fresh adapter."""
    adapter: Path | None = None
    """Folder of a trained adapter."""
    trainable: bool = True
    """Whether the adapter of ``adapter`` is trained on."""
    attention: str | None = "auto"
    """`memory.attention`; None: transformers' own, whatever it is."""
    fused: bool = True
    """Whether modules that are proven equal are replaced by frugal's."""
    mlp_tile_tokens: int | None = None
    split_head: bool = True
    """Whether the head is proven apart from the decoder, for a loss without all logits."""


@dataclass
class BuiltModel:
    """A model and how it came to be."""

    model: Any
    """`peft.PeftModel`; without an adapter the base."""
    base: PreTrainedModel
    report: LoadReport
    attention: AttentionDecision
    applied: Applied | None
    """What a fresh adapter was put on."""
    replacements: ReplacementReport | None
    """None where no module was to be replaced."""
    head: HeadSpec | None
    """For `LossModule`: proven while the model could still be run by itself."""
    tensors: list[LoadedTensor]
    """With weights "meta": what loading would read to the device, in the model's order."""

    @property
    def adapter_lines(self) -> list[str]:
        """Lines about what was adapted."""
        return [] if self.applied is None else self.applied.lines()


def build(spec: ModelSpec, weights: Weights = "files", on_layer: OnLayer | None = None) -> BuiltModel:
    """Build the model of ``spec``; parameter for parameter the same with weights from "files" and "layerwise".

    With ``weights`` "layerwise" each decoder layer is given to ``on_layer`` when it is filled and its modules are
    replaced, after all else of the model is there; ``on_layer`` may free most of it (FSDP2's `fully_shard`). With
    "meta" no tensor has memory and nothing is proven, since there are no numbers: modules are replaced by structure.

    Raises:
        UnsupportedError: the base is not supported, or, layer by layer, base or adapter need the whole model at once
            (`needs_whole_base`); before any weight is read.
        ModelError: weights are missing or damaged, or the adapter in a folder does not fit.
        ConfigError: the configuration names layers that the model does not have.
    """
    prove, lora = weights != "meta", spec.lora
    if weights == "layerwise" and lora is not None and (reason := needs_whole_base(spec.source, lora)):
        raise UnsupportedError(not_by_layer(reason))
    if lora is not None and not prove:  # PiSSA and LoftQ need numbers; their adapters have the sizes of any other
        lora = lora.model_copy(update={"init_lora_weights": "default"})
    loaded = _load(spec, weights)
    base, deferred = loaded.model, loaded.deferred
    if spec.attention is None:
        own = base.config._attn_implementation
        attention = AttentionDecision("attention", own, "transformers' own, as the model has it")
    else:
        attention = use_attention(base, spec.attention, prove=prove, deferred=deferred)
    model, applied = base, None
    if lora is not None:
        applied = apply_adapters(base, lora, seed=spec.seed, quantize=spec.quantize, new_token_ids=spec.new_token_ids)
        model = applied.model
    elif spec.adapter is not None:
        model = load_adapter(base, spec.adapter, trainable=spec.trainable)
    if isinstance(model, FrugalPeftModel):
        compute_in(model, spec.dtype)
        experts = any(isinstance(module, NF4Experts) for module in base.modules())
        model.base_record = base_record(spec.quantize, double_quant=spec.double_quant, experts=experts)
    if prove and spec.quantize != "none":
        base.hf_quantizer = EncodedBase()
    replace = partial(
        replace_modules, model, compute_dtype=spec.dtype, mlp_tile_tokens=spec.mlp_tile_tokens, prove=prove
    )
    layers: dict[str, str] = {}  # name in the adapted model -> name in the base
    if deferred is not None:
        names = {module: name for name, module in model.named_modules()}
        layers = {names[layer]: waiting for waiting, layer in deferred.layers.items()}
        del names  # modules that are replaced must go, and their parameters with them
    replacements = replace(leave=layers) if spec.fused else None
    head = None
    if spec.split_head:
        with nullcontext() if deferred is None else deferred.only(deferred.waiting[0]):
            head = split_head(model, prove=prove)
    for name, waiting in layers.items():
        assert deferred is not None
        layer = deferred.fill(waiting)
        if lora is not None and lora.use_dora:
            start_magnitudes(layer, model.peft_config["default"])
        if replacements is not None:
            replacements.extend(replace(only=name))
        if on_layer is not None:
            on_layer(name, layer)
    return BuiltModel(model, base, loaded.report, attention, applied, replacements, head, loaded.tensors)


def _load(spec: ModelSpec, weights: Weights) -> LoadedBase:
    """The base, with its embedding table where it belongs."""
    trusted = spec.source.trust_remote_code
    skeleton = build_meta(spec.source.config(), trust_remote_code=trusted)
    embedding = decide_embedding(
        spec.embedding,
        skeleton,
        spec.lora,
        kind=spec.device.type,
        adds_tokens=bool(spec.new_token_ids),
    )
    loaded = load_base(
        spec.source,
        quantize=spec.quantize,
        double_quant=spec.double_quant,
        quantize_experts=spec.quantize_experts,
        dtype=spec.dtype,
        device=spec.device,
        trust_remote_code=trusted,
        vocab_size=spec.vocab_size,
        weights=weights,
        host_embedding=embedding.value == "host",
        skeleton=skeleton,
    )
    loaded.report.embedding = embedding.reason
    return loaded


def needs_whole_base(source: ResolvedModel, lora: LoraSection) -> str | None:
    """Why ``source`` with this adapter cannot be loaded layer by layer; None when it can. Reads headers alone."""
    model = build_meta(source.config(), trust_remote_code=source.trust_remote_code)
    layers = decoder_layers(model)
    if not layers:
        return NO_LAYERS
    keys = map_keys(model, stored_tensors(source.path))
    return keys.conversion or needs_weights(lora, resolve_targets(model, lora), layers)
