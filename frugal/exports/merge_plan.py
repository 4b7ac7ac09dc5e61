"""What a merge writes: PEFT's own layers on a model without memory (meta device), matched with the files' tensors.

Building the layers through PEFT means that every rule (`rank_pattern`, `alpha_pattern`, rsLoRA, `layers_to_transform`,
`fan_in_fan_out`, tied `trainable_token_indices`) is PEFT's, and that the adapter's keys can be checked strictly.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftConfig, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import Embedding as LoraEmbedding
from peft.tuners.lora import Linear as LoraLinear
from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import AutoConfig

from frugal.adapters.conversion import layers_as_modules, names_as_given
from frugal.adapters.files import BASE_WEIGHT
from frugal.codecs import Cut
from frugal.errors import CheckpointError, ModelError, UnsupportedError
from frugal.exports.merge_math import LoraUpdate, WeightPlan
from frugal.models.resolve import stored_tensors
from frugal.models.skeleton import KeyMap, build_meta, expert_cuts, linear_kinds, map_keys
from frugal.tensor_files import StoredTensor, read_header

PREFIX = "base_model.model."
NAME = "default"
SHOWN = 8  # keys listed in a message
COMPARED_ROWS = 4096  # read at a time


@dataclass(slots=True)
class MergePlan:
    """Everything to write, in the order of the base's files, and what became of a tied head."""

    weights: dict[str, WeightPlan]
    """Name in the output -> how it is made."""
    adapted: int
    tied: bool
    """The output model shares its head with its embedding."""
    tie_note: str
    vocab_rows: int
    grown: bool
    """Whether training added rows to the token tables."""
    unreached: str
    """Why some weights that the run held in NF4 are not in the base's files one by one; "" when all are."""


def adapter_file(folder: Path) -> Path:
    """The adapter's safetensors file.

    Raises:
        CheckpointError: none there; a pickled `adapter_model.bin` is named and refused.
    """
    file = folder / "adapter_model.safetensors"
    if file.is_file():
        return file
    if (folder / "adapter_model.bin").is_file():
        raise CheckpointError(
            f"{folder / 'adapter_model.bin'} is a pickle: loading it could run code, so it is refused. Convert it "
            "where you trust it: load with PEFT, save_pretrained with safetensors."
        )
    raise CheckpointError(f"{folder} holds no adapter (adapter_model.safetensors). Was the run finished?")


@dataclass(slots=True)
class Fit:
    """A base and an adapter matched on the meta device; every key and shape of the adapter has its place."""

    stored: dict[str, StoredTensor]
    """The base's tensors by their names in its files."""
    tensors: dict[str, StoredTensor]
    """The adapter's."""
    keys: KeyMap
    shapes: dict[str, tuple[int, ...]]
    """Of the base's parameters in training (token tables with the rows that were added)."""
    linears: set[str]
    """Weights of linear layers that an NF4 run holds in 4 bits."""
    cuts: dict[str, Cut]
    """Stacks of experts that it does, and how."""
    embedding: str
    head: str
    tied: bool
    rows: int
    grown: bool
    """Whether training added rows to the token tables."""
    peft_model: nn.Module


def fit_adapter(base: Path, adapter: Path, *, trust_remote_code: bool = False) -> Fit:
    """Match an adapter folder with a base folder; a weight is read only where the adapter has a copy of it.

    Raises:
        CheckpointError: keys or shapes of the adapter do not fit the base; missing and unexpected keys are listed.
    """
    stored, tensors = stored_tensors(base), read_header(adapter_file(adapter))
    config = AutoConfig.from_pretrained(base, trust_remote_code=trust_remote_code)
    peft_config = PeftConfig.from_pretrained(str(adapter))
    _check_type(peft_config, adapter)
    peft_config.inference_mode, init = True, peft_config.init_lora_weights
    peft_config.init_lora_weights = True  # other starts compute with the weights, which are not here
    with torch.device("meta"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns about ties and meta tensors, both are handled here
        model = build_meta(config, trust_remote_code=trust_remote_code)
        keys = map_keys(model, stored)
        with torch.device("cpu"):
            tensors = _without_the_bases(tensors, stored, keys)
        linears = {f"{name}.weight" for name in linear_kinds(model)[0]}
        cuts = expert_cuts(model)
        rows = _vocab_rows(model, peft_config, tensors)
        grown = rows != model.get_input_embeddings().weight.shape[0]
        if grown:
            model.resize_token_embeddings(rows, mean_resizing=False)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        embedding, head = _embedding_and_head(model)
        tied = bool(getattr(model.config.get_text_config(), "tie_word_embeddings", False))
        layers_as_modules(peft_config, model)
        try:
            with names_as_given(model):
                peft_model = get_peft_model(model, peft_config)
        except ValueError as error:
            raise CheckpointError(f"The adapter in {adapter} does not fit the base {base}: {error}") from error
        expected = {
            key: tuple(value.shape)
            for key, value in get_peft_model_state_dict(peft_model, save_embedding_layers=False).items()
        }
    peft_config.init_lora_weights = init
    _check_keys(adapter, base, tensors, expected, {f"{PREFIX}{name}" for name in (embedding, head)}, shapes)
    return Fit(stored, tensors, keys, shapes, linears, cuts, embedding, head, tied, rows, grown, peft_model)


def _without_the_bases(
    tensors: dict[str, StoredTensor], stored: Mapping[str, StoredTensor], keys: KeyMap
) -> dict[str, StoredTensor]:
    """``tensors`` without tables of the base that PEFT wrote beside their adapter (`save_embedding_layers`)."""
    names = {f"{PREFIX}{target.removesuffix('.weight')}{BASE_WEIGHT}": key for key, target in keys.targets.items()}
    return {
        key: tensor
        for key, tensor in tensors.items()
        if key not in names or not _same_values(tensor, stored[names[key]])
    }


def _same_values(tensor: StoredTensor, other: StoredTensor) -> bool:
    if tensor.shape != other.shape:
        return False
    for start in range(0, other.rows, COMPARED_ROWS):
        mine, theirs = (one.read(start, min(start + COMPARED_ROWS, other.rows)) for one in (tensor, other))
        if not torch.equal(mine.to(theirs.dtype), theirs):
            return False
    return True


def plan_merge(
    base: Path, adapter: Path, *, quantized: bool, experts: bool, trust_remote_code: bool = False
) -> MergePlan:
    """Plan the merge of an adapter folder into a base folder.

    Args:
        quantized: the run held its linear layers in NF4.
        experts: and its stacks of experts.

    Raises:
        CheckpointError: as `fit_adapter`.
        UnsupportedError: an adapter that this merge cannot do exactly (convolutions, packed experts, PiSSA residuals).
    """
    config = PeftConfig.from_pretrained(str(adapter))
    _check_type(config, adapter)
    _check_kind(config)
    fit = fit_adapter(base, adapter, trust_remote_code=trust_remote_code)
    names = {target: key for key, target in fit.keys.targets.items()}
    linears = fit.linears if quantized else set()
    weights = _weights(fit.stored, names, adapter_parts(fit.peft_model, fit.tensors), fit.shapes, linears)
    if quantized and experts:
        _mark_experts(weights, fit, names)
    tied, note = _tie(weights, names, fit.embedding, fit.head, fit.tied)
    adapted = sum(plan.touched for plan in weights.values())
    return MergePlan(
        weights, adapted, tied, note, fit.rows, fit.grown, fit.keys.conversion if linears - set(names) else ""
    )


def _check_type(config: Any, adapter: Path) -> None:
    """Refuse what is no LoRA: its configuration has other keys, and its weights another meaning."""
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise UnsupportedError(
            f"The adapter in {adapter} is of type {kind}; chat, verify, eval and exports know LORA. "
            "Load or merge this one with PEFT itself (PeftModel.from_pretrained)."
        )


def _check_kind(config: Any) -> None:
    init = str(config.init_lora_weights).lower()
    if init.startswith(("pissa", "corda", "olora", "lora_ga", "loftq")):
        raise UnsupportedError(
            f"The adapter was saved with init_lora_weights={config.init_lora_weights}: it belongs to a changed base "
            "that is not the one in the base's folder. Save it as plain LoRA (frugal runs do), or merge it with PEFT."
        )
    if any(not name.endswith(".weight") for name in getattr(config, "target_parameters", None) or ()):
        raise UnsupportedError("The adapter targets bare parameters (target_parameters); merge it with PEFT.")


def _vocab_rows(model: nn.Module, config: Any, tensors: dict[str, StoredTensor]) -> int:
    """Rows of the token tables in training, read from the adapter: it holds every row that was added."""
    rows = int(model.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    indices = config.trainable_token_indices
    for ids in indices.values() if isinstance(indices, dict) else [indices or []]:
        rows = max([rows, *(token + 1 for token in ids)])
    embedding, head = _embedding_and_head(model)
    for name in (embedding, head):
        whole = tensors.get(f"{PREFIX}{name}")
        if whole is not None:
            rows = max(rows, whole.shape[0])
    return rows


def _embedding_and_head(model: Any) -> tuple[str, str]:
    """Parameter names of the input embedding and of the head ("" where a model has none)."""
    wanted = [model.get_input_embeddings(), model.get_output_embeddings()]
    found = ["", ""]
    for name, module in model.named_modules():
        for position, module_wanted in enumerate(wanted):
            if module is module_wanted:
                found[position] = f"{name}.weight"
    return found[0], found[1]


def _check_keys(
    adapter: Path,
    base: Path,
    tensors: dict[str, StoredTensor],
    expected: dict[str, tuple[int, ...]],
    optional: set[str],
    shapes: dict[str, tuple[int, ...]],
) -> None:
    missing = sorted(set(expected) - set(tensors))
    unexpected = sorted(set(tensors) - set(expected) - optional)
    wanted = {**{key: shapes[key.removeprefix(PREFIX)] for key in optional & set(tensors)}, **expected}
    wrong = [
        f"{key} is {list(tensors[key].shape)}, the base needs {list(shape)}"
        for key, shape in wanted.items()
        if key in tensors and tensors[key].shape != shape
    ]
    if missing or unexpected or wrong:
        lines = [f"The adapter in {adapter} does not fit the base {base}:"]
        for title, keys in (("missing", missing), ("unexpected", unexpected), ("of another shape", wrong)):
            if keys:
                more = f", and {len(keys) - SHOWN} more" if len(keys) > SHOWN else ""
                lines.append(f"  {len(keys)} keys {title}: {', '.join(keys[:SHOWN])}{more}")
        lines.append("Use the base it was trained on (see base_model_name_or_path in adapter_config.json, or --base).")
        raise CheckpointError("\n".join(lines))


def adapter_parts(peft_model: nn.Module, tensors: dict[str, StoredTensor]) -> dict[str, dict[str, Any]]:
    """Parameter name in the base -> fields of its WeightPlan."""
    parts: dict[str, dict[str, Any]] = {}
    for full_name, module in peft_model.named_modules():
        name = full_name.removeprefix(PREFIX)
        if isinstance(module, LoraLinear):
            if not isinstance(module.get_base_layer(), nn.Linear) and not module.fan_in_fan_out:
                raise UnsupportedError(f"{name}: {type(module.get_base_layer()).__name__} cannot be merged here.")
            key = f"{full_name}.lora_"
            update = LoraUpdate(
                a=tensors[f"{key}A.weight"],
                b=tensors[f"{key}B.weight"],
                scaling=float(module.scaling[NAME]),
                transposed=bool(module.fan_in_fan_out),
                magnitude=tensors.get(f"{key}magnitude_vector"),
            )
            parts.setdefault(f"{name}.weight", {})["update"] = update
            if f"{key}B.bias" in tensors:
                parts.setdefault(f"{name}.bias", {})["bias_update"] = (tensors[f"{key}B.bias"], update.scaling)
        elif isinstance(module, LoraEmbedding):
            key = f"{full_name}.lora_"
            if f"{key}magnitude_vector" in tensors:
                raise UnsupportedError(f"{name}: DoRA on an embedding cannot be merged here.")
            a, b = tensors[f"{key}embedding_A"], tensors[f"{key}embedding_B"]
            parts.setdefault(f"{name}.weight", {})["update"] = LoraUpdate(a, b, float(module.scaling[NAME]), True)
        elif isinstance(module, TrainableTokensWrapper):
            layer = module.token_adapter
            source = full_name if layer.tied_adapter is None else _owner(peft_model, layer.tied_adapter)
            rows = tensors[f"{source}.token_adapter.trainable_tokens_delta"]
            parts.setdefault(f"{name}.weight", {})["rows"] = ([int(i) for i in layer.token_indices[NAME]], rows)
    known = ("lora_A.weight", "lora_B.weight", "lora_B.bias", "lora_embedding_A", "lora_embedding_B")
    for key, tensor in tensors.items():
        if not key.endswith((*known, "lora_magnitude_vector", "trainable_tokens_delta")):
            name = key.removeprefix(PREFIX).replace(".base_layer.", ".")
            parts.setdefault(name, {})["replaced"] = tensor
    return parts


def _owner(peft_model: nn.Module, layer: nn.Module) -> str:
    owner: str = next(
        name
        for name, module in peft_model.named_modules()
        if isinstance(module, TrainableTokensWrapper) and module.token_adapter is layer
    )
    return owner


def _weights(
    stored: dict[str, StoredTensor],
    names: dict[str, str],
    parts: dict[str, dict[str, Any]],
    shapes: dict[str, tuple[int, ...]],
    linears: set[str],
) -> dict[str, WeightPlan]:
    by_key = {key: name for name, key in names.items()}
    weights: dict[str, WeightPlan] = {}
    for key, tensor in stored.items():
        name = by_key.get(key, key)
        fields = parts.pop(name, {})
        shape = shapes[name] if name in shapes and fields else tensor.shape
        weights[key] = WeightPlan(tensor, shape, quantized=name in linears, **fields)
    for name, fields in parts.items():  # what the base's files do not hold: a tied head, or nothing we know of
        if name not in shapes:
            raise CheckpointError(f"The adapter changes {name}, which the base does not have.")
        weights[name] = WeightPlan(None, shapes[name], **fields)
    return weights


def _mark_experts(weights: dict[str, WeightPlan], fit: Fit, names: dict[str, str]) -> None:
    """Note which tensors of the files were stacks of experts in NF4, or matrices of one: those are encoded alone."""
    for target, cut in fit.cuts.items():
        if target in names:
            plan = weights[names[target]]
            plan.quantized, plan.cut = True, cut
    for key, (target, _) in fit.keys.pieces.items():
        weights[key].quantized = target in fit.cuts


def _tie(
    weights: dict[str, WeightPlan], names: dict[str, str], embedding: str, head: str, tied: bool
) -> tuple[bool, str]:
    """Keep a tied head tied when both come out equal, else write both; checks that every weight has a source."""
    embedding_key, head_key = names.get(embedding, embedding), names.get(head, head)
    note = "head and embedding are separate"
    if tied:
        source = weights[embedding_key]
        head_plan = weights.get(head_key)
        if head_plan is None:
            head_plan = WeightPlan(source.stored, source.shape)
        else:
            head_plan.stored, head_plan.quantized = head_plan.stored or source.stored, False
        if source.same_as(head_plan):
            weights.pop(head_key, None)
            note = "head stays tied to the embedding"
        else:
            weights[head_key] = head_plan
            tied, note = False, "head untied: the adapter changes head and embedding differently"
    _check_sources(weights.items())
    return tied, note


def _check_sources(weights: Iterable[tuple[str, WeightPlan]]) -> None:
    for name, plan in weights:
        if plan.stored is None and plan.replaced is None:
            raise ModelError(f"{name} is in neither the base's files nor the adapter.")
        rows = (plan.replaced or plan.stored or plan).shape[0] if plan.shape else 1
        added = set(range(rows, plan.shape[0])) if plan.shape else set()
        uncovered = sorted(added - set(plan.rows[0] if plan.rows else []))
        if uncovered:
            raise CheckpointError(f"{name}: row {uncovered[0]} was added in training but is not in the adapter.")
