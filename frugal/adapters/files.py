"""Adapters as files: what stock PEFT reads, written whole and read strictly."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from peft import LoraConfig, PeftConfig, PeftModel, set_peft_model_state_dict
from transformers import PreTrainedModel

from frugal.adapters.apply import (
    START,
    adapter_state,
    inject,
    masters_float32,
    refuse_adapted,
    remember_start,
)
from frugal.adapters.conversion import layers_as_modules, layers_as_parameters
from frugal.adapters.peft_model import CONFIG, FINGERPRINT, WEIGHTS
from frugal.adapters.trained import prepare_trained
from frugal.errors import CheckpointError, ModelError, UnsupportedError
from frugal.files import atomic_path, read_json, write_json
from frugal.hub import public_base
from frugal.tensor_files import read_all, read_metadata, write_tensors

log = logging.getLogger("frugal.adapters")


BASE_WEIGHT = ".base_layer.weight"
"""End of the key of a base's own weight beside the adapter of a layer."""


def save_adapter(
    model: PeftModel,
    folder: Path,
    *,
    tensors: Mapping[str, torch.Tensor] | None = None,
    base_fingerprint: str | None = None,
    plain: bool = False,
) -> None:
    """Write adapter_model.safetensors and adapter_config.json into ``folder``, each whole or not at all.

    ``tensors``: the adapter under PEFT's names where ``model`` holds only a part of it (a sharded run gathers them).
    ``base_fingerprint`` (`frugal.models.resolve`) is kept in the file's metadata, to notice another base later.
    ``plain`` turns a PiSSA adapter, which belongs to a changed base, into an ordinary LoRA of twice the rank for the
    original base; other adapters are plain already.

    Raises:
        CheckpointError: a tensor is empty or not finite in shape (sharded parameters that were not gathered).
    """
    folder = Path(folder)
    name = model.active_adapter
    found = adapter_state(model, name) if tensors is None else tensors
    whole = {key: tensor.detach().to("cpu") for key, tensor in found.items()}
    empty = sorted(key for key, tensor in whole.items() if tensor.numel() == 0)
    if empty or not whole:
        raise CheckpointError(f"The adapter has empty tensors and was not saved: {', '.join(empty[:5]) or 'all'}.")
    config = _config_dict(model.peft_config[name])
    if config.get("base_model_name_or_path"):  # in memory it is the folder, which loads without a network
        config["base_model_name_or_path"] = public_base(config["base_model_name_or_path"])
    layers_as_parameters(model, model.peft_config[name], config)
    if plain and config["init_lora_weights"] == "pissa":
        whole = _plain_lora(model, whole, config)
    folder.mkdir(parents=True, exist_ok=True)
    texts = dict(getattr(model, "base_record", {}))
    if base_fingerprint:
        texts[FINGERPRINT] = base_fingerprint
    with atomic_path(folder / WEIGHTS) as beside:
        write_tensors(beside, whole, texts=texts)
    write_json(folder / CONFIG, config)


def _config_dict(config: PeftConfig) -> dict[str, Any]:
    """A PEFT configuration as JSON: sets sorted, so that two saves of one adapter are the same bytes."""
    values = {key: sorted(value) if isinstance(value, set) else value for key, value in config.to_dict().items()}
    return {**{key: values[key] for key in sorted(values)}, "inference_mode": True}


def _plain_lora(model: PeftModel, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Delta W = B A - B0 A0 as one LoRA [A; A0], [B, -B0]: rank doubles, alpha grows so that the scale stays."""
    initial: Mapping[str, torch.Tensor] | None = getattr(model, START, None)
    if initial is None:
        raise CheckpointError("The start of this PiSSA adapter is not known, so it cannot be saved as plain LoRA.")
    plain: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        if ".lora_A." in key:
            plain[key] = torch.cat([tensor, initial[key].to(tensor)], dim=0)
        elif ".lora_B." in key:
            plain[key] = torch.cat([tensor, -initial[key].to(tensor)], dim=1)
        else:
            plain[key] = tensor
    factor = 2**0.5 if config["use_rslora"] else 2
    config["init_lora_weights"] = True
    config["r"] *= 2
    config["lora_alpha"] *= factor
    config["rank_pattern"] = {key: 2 * value for key, value in config["rank_pattern"].items()}
    config["alpha_pattern"] = {key: factor * value for key, value in config["alpha_pattern"].items()}
    return plain


def load_adapter(
    model: PreTrainedModel,
    folder: Path,
    trainable: bool = False,
    *,
    base_fingerprint: str | None = None,
    on_other_base: Literal["warn", "error", "ignore"] = "warn",
) -> PeftModel:
    """Put the adapter saved in ``folder`` on ``model``, changed in place. Nothing is left out and nothing made up.

    The path given wins over what the adapter's configuration names as its base. With ``base_fingerprint`` (of this
    base), an adapter whose file holds another one is reported as ``on_other_base`` says.

    Raises:
        ModelError: files are missing or damaged, keys or shapes do not fit (all of them listed), or the base differs
            and ``on_other_base`` is error.
    """
    refuse_adapted(model)
    folder = Path(folder)
    config, tensors, metadata = _read(folder)
    _check_base(folder, metadata.get(FINGERPRINT), base_fingerprint, on_other_base)
    tensors = {key: tensor for key, tensor in tensors.items() if not _is_of_the_base(model, key, tensor)}
    layers_as_modules(config, model)
    _check_modules(model, folder, config, tensors)
    config.inference_mode = not trainable
    prepare_trained(model, config.modules_to_save or [], trains_tokens=config.trainable_token_indices is not None)
    try:
        peft_model = inject(model, config)
    except (ValueError, TypeError) as error:
        raise ModelError(f"{folder} does not fit this base model: {error}") from error
    expected = adapter_state(peft_model)
    _compare(folder, {key: tuple(value.shape) for key, value in expected.items()}, tensors)
    remember_start(peft_model)
    set_peft_model_state_dict(peft_model, dict(tensors))
    masters_float32(peft_model)
    for key, value in adapter_state(peft_model).items():
        if not torch.equal(value.detach().cpu(), tensors[key].to(value.dtype)):
            raise AssertionError(f"{key} is not what {folder} holds after loading")
    return peft_model


def _read(folder: Path) -> tuple[LoraConfig, dict[str, torch.Tensor], dict[str, str]]:
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{folder} holds no adapter: {CONFIG} is missing.")
    if not (folder / WEIGHTS).is_file():
        pickle = (
            " (adapter_model.bin is a pickle and is never read)" if (folder / "adapter_model.bin").is_file() else ""
        )
        raise ModelError(f"{folder} holds no adapter: {WEIGHTS} is missing{pickle}.")
    kind = read_json(folder / CONFIG).get("peft_type")
    if kind != "LORA":
        raise UnsupportedError(f"{folder} is an adapter of type {kind}; frugal loads LORA.")
    return PeftConfig.from_pretrained(str(folder)), read_all(folder / WEIGHTS), read_metadata(folder / WEIGHTS)


def _is_of_the_base(model: PreTrainedModel, key: str, tensor: torch.Tensor) -> bool:
    """Whether this is the base's own table, which PEFT writes beside an adapter of it (`save_embedding_layers`)."""
    if not key.endswith(BASE_WEIGHT):
        return False
    module = dict(model.named_modules()).get(key.removeprefix("base_model.model.").removesuffix(BASE_WEIGHT))
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.is_meta or weight.shape != tensor.shape:
        return False
    return torch.equal(weight.detach().cpu(), tensor.to(weight.dtype))


def _check_base(folder: Path, saved: str | None, given: str | None, action: str) -> None:
    if saved is None or given is None or saved == given or action == "ignore":
        return
    text = (
        f"The adapter in {folder} was trained on another base model: same names, other weights (fingerprint "
        f"{saved[:12]}, this base has {given[:12]})."
    )
    if action == "error":
        raise ModelError(text)
    log.warning(text)


_LAYER_KEY = re.compile(r"^base_model\.model\.(?P<layer>.+)\.lora_(?P<part>A|B)\.weight$")


def _check_modules(
    model: PreTrainedModel, folder: Path, config: LoraConfig, tensors: Mapping[str, torch.Tensor]
) -> None:
    """Before anything is changed: every layer in the file exists here with its sizes, and its token rows too."""
    modules = dict(model.named_modules())
    wrong: list[str] = []
    for key, tensor in tensors.items():
        match = _LAYER_KEY.match(key)
        if match is None:
            continue
        layer, part = match["layer"], match["part"]
        module = modules.get(layer)
        if module is None:
            wrong.append(f"{layer}: not in this model")
            continue
        size = getattr(module, "in_features" if part == "A" else "out_features", None)
        got = tensor.shape[1] if part == "A" else tensor.shape[0]
        if size is not None and size != got:
            wrong.append(f"{layer}: {'in' if part == 'A' else 'out'}_features {size} here, {got} in the file")
    if wrong:
        raise ModelError(_mismatch(folder, wrong))
    rows = int(model.get_input_embeddings().weight.shape[0])
    indices = config.trainable_token_indices
    ids = [i for part in (indices.values() if isinstance(indices, dict) else [indices or []]) for i in part]
    if ids and max(ids) >= rows:
        raise ModelError(
            f"{folder} holds rows for token {max(ids)}, the embedding table here has {rows}: load the base with "
            f"vocab_size={max(ids) + 1} or more (`rows_needed` with the tokenizer saved beside the adapter)."
        )


def _compare(folder: Path, expected: Mapping[str, tuple[int, ...]], tensors: Mapping[str, torch.Tensor]) -> None:
    wrong = [f"missing {key}" for key in sorted(expected.keys() - tensors.keys())]
    wrong += [f"unexpected {key}" for key in sorted(tensors.keys() - expected.keys())]
    for key in sorted(expected.keys() & tensors.keys()):
        if expected[key] != tuple(tensors[key].shape):
            wrong.append(f"{key}: {expected[key]} here, {tuple(tensors[key].shape)} in the file")
    if wrong:
        raise ModelError(_mismatch(folder, wrong))


def _mismatch(folder: Path, wrong: list[str]) -> str:
    more = f"; and {len(wrong) - 20} more" if len(wrong) > 20 else ""
    return (
        f"The adapter in {folder} does not fit this base model: {'; '.join(wrong[:20])}{more}. Load the base it was "
        "trained on (`base_model_name_or_path` in adapter_config.json)."
    )
