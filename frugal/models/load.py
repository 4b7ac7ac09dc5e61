"""Loading a base model, quantised while it is read.

The model is built on the meta device, its linear layers are replaced by empty NF4 layers, and the checkpoint is read
tensor by tensor: each is quantised (or cast) and dropped before the next. Host memory stays at the 4-bit size plus one
tensor.

Dtypes. NF4 codes come from the checkpoint's own numbers. What is dense and 16-bit in the checkpoint stays 16-bit: cast
to the compute dtype where that is a 16-bit one, else (float32 compute) embeddings, head and unquantised linear layers
keep their bytes and are widened while used (`frugal.codecs.dense`), and only vectors (norms, biases) become
float32. A float32 checkpoint is cast to the compute dtype.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel

from frugal.codecs import NF4Codec, NF4Linear
from frugal.codecs.dense import upcast_on_use
from frugal.errors import ModelError, UnsupportedError
from frugal.model_structure import decoder_layers, inside, is_tied, table_names
from frugal.models.materialize import (
    NO_LAYERS,
    DeferredLayers,
    LoadedTensor,
    Place,
    defer,
    keeps_float32,
    materialize,
    not_by_layer,
    pending,
    resident_dtype,
    set_resident_dtypes,
    set_tensor,
)
from frugal.models.modules.experts import NF4Experts
from frugal.models.modules.host_embedding import put_on_host
from frugal.models.report import (
    LoadReport,
    count_bytes,
    count_parameters,
    dtype_name,
    share_of_encoded_experts,
    shares_left_dense,
)
from frugal.models.resolve import ResolvedModel, stored_tensors
from frugal.models.skeleton import (
    KeyMap,
    build_meta,
    expert_kinds,
    fill_buffers,
    ignorable,
    insert_nf4,
    linear_kinds,
    map_keys,
)
from frugal.models.stock import load_stock

Weights = Literal["files", "layerwise", "meta"]
"""Where weights come from. files: all are read. layerwise: those of decoder layers later, one layer at a time. meta:
nowhere, tensors have dtypes and shapes alone."""


@dataclass
class LoadedBase:
    """A frozen base model and the account of how it was loaded."""

    model: PreTrainedModel
    report: LoadReport
    deferred: DeferredLayers | None = None
    """The decoder layers that wait for their weights; None when everything is loaded."""
    tensors: list[LoadedTensor] = field(default_factory=list)
    """With weights "meta": what loading would read to the device, in the model's order."""


def load_base(
    source: ResolvedModel,
    *,
    quantize: Literal["nf4", "none"] = "nf4",
    double_quant: bool = True,
    quantize_experts: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    weights: Weights = "files",
    host_embedding: bool = False,
    skeleton: PreTrainedModel | None = None,
) -> LoadedBase:
    """Load ``source`` frozen, in eval mode, on ``device``, computing in ``dtype``.

    ``vocab_size``: rows that the embedding table must have at least (`frugal.models.tokenizer.rows_needed`); new rows
    start as the mean of the old ones. A table that is larger already stays as it is. ``quantize_experts``: "nf4" holds
    for stacks of experts too.

    With ``weights`` "layerwise" embeddings, norms and head are loaded, and the decoder layers stay on the meta device,
    each to be filled by itself: `LoadedBase.deferred`. The report counts them as if they were there.

    ``host_embedding`` leaves the embedding table on the host (`frugal.models.modules.host_embedding`), where it is read
    to. ``skeleton`` is what `build_meta` gives for ``source``, where the caller has it already; it becomes the model.

    Raises:
        ModelError: the checkpoint is damaged, or weights are missing (all of them named).
        UnsupportedError: it is quantised already, transformers has no class for it, or its layers cannot be deferred.
    """
    start, device = time.monotonic(), torch.device(device)
    config = source.config() if skeleton is None else skeleton.config
    model = build_meta(config, trust_remote_code=trust_remote_code) if skeleton is None else skeleton
    report = LoadReport(
        base=source.reference,
        architecture=type(model).__name__,
        quantize=quantize,
        double_quant=double_quant and quantize == "nf4",
        compute_dtype=dtype_name(dtype),
        remote_code=trust_remote_code and "auto_map" in config.to_dict(),
    )
    linears, report.kept = linear_kinds(model)
    report.quantized = linears if quantize == "nf4" else []
    if quantize == "nf4" and quantize_experts:
        stacks, whole = expert_kinds(model)
        report.quantized = [*linears, *stacks]
        report.kept = {name: why for name, why in report.kept.items() if name.rpartition(".")[0] not in stacks} | whole
    loaded, later = LoadedBase(model, report), list[Place]()
    if weights == "meta":
        loaded.tensors = _without_memory(model, report, double_quant, dtype, host_embedding)
    else:
        later = _read_weights(
            loaded,
            source,
            double_quant=double_quant,
            dtype=dtype,
            device=device,
            trust_remote_code=trust_remote_code,
            layerwise=weights == "layerwise",
            host_embedding=host_embedding,
        )
    model = loaded.model
    model.requires_grad_(False)
    if vocab_size is not None:
        report.resized_rows = _grow(model, vocab_size)
    report.stored = upcast_on_use(model, dtype)
    if (source.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    model.config._name_or_path = model.name_or_path = source.reference
    model.eval()
    report.tied_head = is_tied(model)
    report.parameters, report.bytes_by_kind = count_parameters(model), count_bytes(model)
    report.expert_share, report.other_share = shares_left_dense(model, report.kept)
    report.encoded_expert_share = share_of_encoded_experts(model)
    if host_embedding:
        report.keeps_on_host(put_on_host(model, device, dtype).weight)
    if weights == "layerwise":  # now: modules were replaced up to here
        loaded.deferred = DeferredLayers(model, later, dtype, device)
    report.seconds = time.monotonic() - start
    return loaded


def _without_memory(
    model: PreTrainedModel, report: LoadReport, double_quant: bool, dtype: torch.dtype, host_embedding: bool
) -> list[LoadedTensor]:
    """Layers and dtypes as loading leaves them, on the meta device; what it would read to the device."""
    found = getattr(model.config, "dtype", None)
    stored = found if isinstance(found, torch.dtype) else torch.bfloat16  # where the configuration does not say
    dense = {name: parameter.numel() * stored.itemsize for name, parameter in model.named_parameters()}
    insert_nf4(model, report.quantized, double_quant)
    tensors = set_resident_dtypes(model, dense, stored, dtype)
    on_host = f"{table_names(model)[0]}.weight" if host_embedding else ""
    return [tensor for tensor in tensors if tensor.name != on_host]


def _read_weights(
    loaded: LoadedBase,
    source: ResolvedModel,
    *,
    double_quant: bool,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool,
    layerwise: bool,
    host_embedding: bool,
) -> list[Place]:
    """Fill ``loaded`` from files, tensor by tensor, or through transformers where names do not map one to one.

    Returns where the tensors go that wait.
    """
    model, report = loaded.model, loaded.report
    entries = stored_tensors(source.path)
    keys = map_keys(model, entries)
    report.route_reason = keys.conversion
    if not report.route_reason:
        insert_nf4(model, report.quantized, double_quant)
        unset = fill_buffers(model, device)
        if unset:
            report.route_reason = f"buffers that the model does not initialise itself: {', '.join(unset[:3])}"
    layers = decoder_layers(model) if layerwise else {}
    if layerwise and (reason := report.route_reason or (not layers and NO_LAYERS)):
        raise UnsupportedError(not_by_layer(reason))
    if report.route_reason:
        report.route = "transformers"
        loaded.model = _through_transformers(source, report, trust_remote_code, double_quant, dtype, device)
        return []
    found = [Place(target, entries[name]) for name, target in keys.targets.items()]
    found += [Place(target, entries[name], piece) for name, (target, piece) in keys.pieces.items()]
    later = [place for place in found if inside(place.name, layers)]
    table = f"{table_names(model)[0]}.weight" if host_embedding else ""
    on_host = [place for place in found if place.name == table]
    now = [place for place in found if place.name != table and not inside(place.name, layers)]
    materialize(pending(model, now), dtype, device)
    materialize(pending(model, on_host), dtype, torch.device("cpu"))
    expected = defer(model, later, dtype)
    _tie(model, keys)
    _refuse_missing(model, source, expected)
    report.unexpected = ignorable(model, keys.unexpected, missing=False)
    return later


def _tie(model: PreTrainedModel, keys: KeyMap) -> None:
    """Share tied weights, in whichever direction the checkpoint has them, as transformers' own loading does."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.tie_weights(missing_keys={name for name in keys.missing if name in names}, recompute_mapping=False)


def _refuse_missing(model: PreTrainedModel, source: ResolvedModel, expected: set[str]) -> None:
    """Raise ModelError for weights that nothing gave, and that are not ``expected`` later."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_meta and name not in expected}
    if missing := ignorable(model, tensors, missing=True):
        raise _incomplete(model, source, missing)
    for name, tensor in tensors.items():  # harmless when missing, by the class's own word, but not without memory
        owner, _, part = name.rpartition(".")
        set_tensor(model.get_submodule(owner), part, torch.zeros(tensor.shape, dtype=tensor.dtype))


def _incomplete(model: PreTrainedModel, source: ResolvedModel, missing: list[str]) -> ModelError:
    shown = ", ".join(missing[:12]) + (f" and {len(missing) - 12} more" if len(missing) > 12 else "")
    return ModelError(
        f"{source.path} does not hold all weights of {type(model).__name__}; missing: {shown}. A model with random "
        "weights in their place would be useless: get the whole checkpoint, or correct its config.json."
    )


def _through_transformers(
    source: ResolvedModel,
    report: LoadReport,
    trust_remote_code: bool,
    double_quant: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Whole model on the CPU in the checkpoint's dtype, then quantised layer by layer. Needs its 16-bit size."""
    model, info = load_stock(source.path, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True)
    bad = ignorable(model, info["missing_keys"], missing=True) + [str(key) for key in info["mismatched_keys"]]
    if bad:
        raise _incomplete(model, source, bad)
    report.unexpected = ignorable(model, info["unexpected_keys"], missing=False)
    for name in report.quantized:
        old = model.get_submodule(name).to(device)
        new = NF4Linear.from_linear(old, double_quant) if isinstance(old, nn.Linear) else _encoded(old, double_quant)
        model.set_submodule(name, new)
    tables = {id(module) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for owner, module in model.named_modules():
        for part, parameter in module.named_parameters(recurse=False):
            ndim = parameter.ndim if id(module) in tables else 0
            wide = keeps_float32(model, f"{owner}.{part}") and parameter.is_floating_point()
            parameter.data = parameter.data.to(torch.float32 if wide else resident_dtype(parameter.dtype, ndim, dtype))
    return model.to(device)


def _encoded(old: nn.Module, double_quant: bool) -> NF4Experts:
    stacks = {part: old.get_parameter(part).detach() for part in NF4Experts.encoded_parts}
    new = NF4Experts(old, NF4Codec(double_quant))
    for part, stack in stacks.items():
        new.encode_(part, stack)
    return new


@torch.no_grad()
def _grow(model: PreTrainedModel, rows: int) -> tuple[int, int] | None:
    """Give the embedding table (and an untied head) ``rows`` rows. New ones are the mean of the old, each time."""
    before = int(model.get_input_embeddings().weight.shape[0])
    if rows <= before:
        return None
    model.resize_token_embeddings(rows, mean_resizing=False)
    tables: list[Any] = [model.get_input_embeddings(), model.get_output_embeddings()]
    for table in tables:
        if table is not None:
            table.weight[before:] = _mean_row(table.weight[:before])
            table.weight.requires_grad_(False)
    return before, rows


def _mean_row(weight: torch.Tensor, chunk_rows: int = 8192) -> torch.Tensor:
    total = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for start in range(0, weight.shape[0], chunk_rows):
        total += weight[start : start + chunk_rows].sum(dim=0, dtype=torch.float64)
    return (total / weight.shape[0]).to(weight.dtype)
