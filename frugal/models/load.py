"""Loading a base model, quantised while it is read.

The model is built on the meta device, its linear layers are replaced by empty NF4 layers, and the checkpoint is read
tensor by tensor: each is quantised (or cast) and dropped before the next. Host memory stays at the 4-bit size plus one
tensor.

Dtypes. NF4 codes come from the checkpoint's own numbers. What is dense and 16-bit in the checkpoint stays 16-bit: cast
to the compute dtype where that is a 16-bit one, else (float32 compute) embeddings, head and unquantised linear layers
keep their bytes and are widened while used (`frugal.models.upcast_on_use`), and only vectors (norms, biases) become
float32. A float32 checkpoint is cast to the compute dtype.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from frugal.codecs.nf4 import NF4Linear
from frugal.errors import ModelError, UnsupportedError
from frugal.models.checkpoint_files import StoredTensor, read_header
from frugal.models.deferred_layers import NO_LAYERS, HeldLayers, cannot_hold, decoder_layers, hold, inside
from frugal.models.host_embedding import put_on_host
from frugal.models.materialize import Placement, place, put, resident_dtype
from frugal.models.report import LoadReport, count_bytes, count_parameters, dtype_name
from frugal.models.resolve import BaseSource, weight_files
from frugal.models.skeleton import KeyMap, build_meta, fill_buffers, ignorable, linear_kinds, map_keys, put_nf4
from frugal.models.upcast_on_use import keep_stored

__all__ = ["LoadedBase", "load_base", "resident_dtype"]


@dataclass
class LoadedBase:
    """A frozen base model and the account of how it was loaded."""

    model: PreTrainedModel
    report: LoadReport
    held: HeldLayers | None = None
    """The decoder layers that wait for their weights; None when everything is loaded."""


def load_base(
    source: BaseSource,
    *,
    quantize: Literal["nf4", "none"] = "nf4",
    double_quant: bool = True,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    vocab_size: int | None = None,
    hold_layers: bool = False,
    host_embedding: bool = False,
) -> LoadedBase:
    """Load ``source`` frozen, in eval mode, on ``device``, computing in ``dtype``.

    ``vocab_size``: rows that the embedding table must have at least (`frugal.models.tokenizer.rows_needed`); new rows
    start as the mean of the old ones. A table that is larger already stays as it is.

    ``hold_layers`` loads embeddings, norms and head, and leaves the decoder layers on the meta device, each to be
    filled by itself: `LoadedBase.held`. The report counts them as if they were there.

    ``host_embedding`` leaves the embedding table on the host (`frugal.models.host_embedding`), where it is read to.

    Raises:
        ModelError: the checkpoint is damaged, or weights are missing (all of them named).
        UnsupportedError: it is quantised already, transformers has no class for it, or its layers cannot be held.
    """
    start, device = time.monotonic(), torch.device(device)
    config = source.config()
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{source.name} is quantised already (quantization_config in its config.json). Give the original 16-bit "
            "model: frugal quantises while loading."
        )
    model = build_meta(config, trust_remote_code=trust_remote_code)
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
    entries: dict[str, StoredTensor] = {}
    for path in weight_files(source.path):
        entries.update(read_header(path))
    keys = map_keys(model, entries, {name: entry.shape for name, entry in entries.items()})
    report.route_reason = keys.conversion
    if not report.route_reason:
        put_nf4(model, report.quantized, double_quant)
        unset = fill_buffers(model, device)
        if unset:
            report.route_reason = f"buffers that the model does not initialise itself: {', '.join(unset[:3])}"
    waiting = decoder_layers(model) if hold_layers else {}
    if hold_layers and (reason := report.route_reason or (not waiting and NO_LAYERS)):
        raise UnsupportedError(cannot_hold(reason))
    targets: dict[str, StoredTensor] = {}
    if report.route_reason:
        report.route = "transformers"
        model = _through_transformers(source, report, trust_remote_code, double_quant, dtype, device)
    else:
        found = {target: entries[name] for name, target in keys.targets.items()}
        targets = {name: entry for name, entry in found.items() if inside(name, waiting)}
        table = _name_of_table(model) if host_embedding else ""
        now = {name: entry for name, entry in found.items() if name not in targets}
        on_host = {name: now.pop(name) for name in (table,) if name in now}
        place(_places(model, now), dtype, device)
        place(_places(model, on_host), dtype, torch.device("cpu"))
        expected = hold(model, targets, dtype)
        _tie(model, keys)
        _refuse_missing(model, source, expected)
        report.unexpected = ignorable(model, keys.unexpected, missing=False)
    model.requires_grad_(False)
    if vocab_size is not None:
        report.resized_rows = _grow(model, vocab_size)
    report.stored = keep_stored(model, dtype)
    _finish(model, source)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    report.tied_head = head is not None and head.weight is embedding.weight
    report.parameters, report.bytes_by_kind = count_parameters(model), count_bytes(model)
    if host_embedding:
        put_on_host(model, device, dtype)
        report.keeps_on_host(embedding.weight)
    report.seconds = time.monotonic() - start
    return LoadedBase(model, report, HeldLayers(model, targets, dtype, device) if hold_layers else None)


def _name_of_table(model: PreTrainedModel) -> str:
    table = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is table)


def _places(model: PreTrainedModel, targets: dict[str, StoredTensor]) -> list[Placement]:
    return [
        Placement(entry, model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        for name, entry in targets.items()
    ]


def _tie(model: PreTrainedModel, keys: KeyMap) -> None:
    """Share tied weights, in whichever direction the checkpoint has them, as transformers' own loading does."""
    names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    model.tie_weights(missing_keys={name for name in keys.missing if name in names}, recompute_mapping=False)


def _refuse_missing(model: PreTrainedModel, source: BaseSource, expected: set[str]) -> None:
    """Raise ModelError for weights that nothing gave, and that are not ``expected`` later."""
    tensors = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    tensors = {name: tensor for name, tensor in tensors.items() if tensor.is_meta and name not in expected}
    missing = ignorable(model, tensors, missing=True)
    if missing:
        shown = ", ".join(missing[:12]) + (f" and {len(missing) - 12} more" if len(missing) > 12 else "")
        raise ModelError(
            f"{source.path} does not hold all weights of {type(model).__name__}; missing: {shown}. A model with random "
            "weights in their place would be useless: get the whole checkpoint, or correct its config.json."
        )
    for name, tensor in tensors.items():  # harmless when missing, by the class's own word, but not without memory
        owner, _, part = name.rpartition(".")
        put(model.get_submodule(owner), part, torch.zeros(tensor.shape, dtype=tensor.dtype))


def _through_transformers(
    source: BaseSource,
    report: LoadReport,
    trust_remote_code: bool,
    double_quant: bool,
    dtype: torch.dtype,
    device: torch.device,
) -> PreTrainedModel:
    """Whole model on the CPU in the checkpoint's dtype, then quantised layer by layer. Needs its 16-bit size."""
    model, info = AutoModelForCausalLM.from_pretrained(
        source.path, dtype="auto", trust_remote_code=trust_remote_code, output_loading_info=True
    )
    bad = ignorable(model, info["missing_keys"], missing=True) + [str(key) for key in info["mismatched_keys"]]
    if bad:
        raise ModelError(
            f"{source.path} does not hold all weights of {type(model).__name__}; missing: {', '.join(bad[:12])}."
        )
    report.unexpected = ignorable(model, info["unexpected_keys"], missing=False)
    for name in report.quantized:
        linear = model.get_submodule(name)
        model.set_submodule(name, NF4Linear.from_linear(linear.to(device), double_quant))
    tables = {id(module) for module in model.modules() if isinstance(module, nn.Linear | nn.Embedding)}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            ndim = parameter.ndim if id(module) in tables else 0
            parameter.data = parameter.data.to(resident_dtype(parameter.dtype, ndim, dtype))
    return model.to(device)


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


def _finish(model: PreTrainedModel, source: BaseSource) -> None:
    if (source.path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source.path)
    model.config._name_or_path = source.reference
    model.name_or_path = source.reference
    model.eval()
