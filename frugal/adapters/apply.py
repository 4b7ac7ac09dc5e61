"""PEFT injection into a base model loaded by frugal: dtype, seed and layers under control.

One dtype policy on every path (create, load, resume, a second adapter): what is trained is float32, whatever the base's
dtype. float16 gradients never reach a gradient scaler, and the optimizer's state is float32.
"""

from __future__ import annotations

import contextlib
import importlib.util
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoftQConfig, LoraConfig, PeftModel, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn
from transformers import PreTrainedModel

from frugal.adapters.conversion import names_as_given, refuse_rewritten_dora
from frugal.adapters.patterns import PatternRow
from frugal.adapters.peft_model import FrugalPeftModel, adapted, compute_in
from frugal.adapters.targets import Scale, Targets, resolve_targets
from frugal.adapters.trained import cast_linear, prepare_trained
from frugal.config import LoraSection
from frugal.errors import ConfigError, UnsupportedError
from frugal.model_structure import decoder_layers, input_device, inside, is_tied, table_names


@dataclass
class Applied:
    """A base model with a fresh adapter, and what was adapted."""

    model: PeftModel
    table: list[PatternRow]
    """Pattern -> layers matched, for the terminal and the manifest."""
    layers: dict[str, Scale]
    """Layer name -> rank, alpha and scale."""
    trainable: int
    """Number of trained values."""

    def lines(self) -> list[str]:
        """A few lines for the terminal."""
        return [*(row.line() for row in self.table), f"{self.trainable:,} trained values, float32"]


def apply_adapters(
    model: PreTrainedModel,
    lora: LoraSection,
    *,
    seed: int,
    quantize: str = "nf4",
    new_token_ids: Sequence[int] = (),
) -> Applied:
    """Put one fresh adapter (PEFT name ``default``) on ``model``, which is changed in place.

    The start depends on ``seed`` and the configuration alone; the global random state is left as it was.
    ``new_token_ids`` are rows of the embedding table (and of an untied head) to train and to save with the adapter.

    Raises:
        ConfigError: a pattern matches nothing, or the model has an adapter already.
        UnsupportedError: the kind of start is not possible on this base.
    """
    refuse_adapted(model)
    _refuse_start(model, lora, quantize)
    targets = resolve_targets(model, lora)
    deferred = decoder_layers(model) if _is_deferred(model) else {}
    if deferred and (reason := needs_weights(lora, targets, deferred)):
        raise UnsupportedError(f"The adapter needs the weights of layers that have none yet: {reason}.")
    config = _lora_config(model, lora, targets, new_token_ids)
    prepare_trained(model, targets.modules_to_save, trains_tokens=config.trainable_token_indices is not None)
    peft_model, to_come = _inject(model, config, deferred, seed)
    refuse_rewritten_dora(peft_model, config)
    remember_start(peft_model)
    for name, wanted in targets.layers.items():
        layer = peft_model.base_model.model.get_submodule(name)
        got = Scale(layer.r["default"], layer.lora_alpha["default"], layer.scaling["default"])
        if got != wanted:
            raise AssertionError(f"{name}: PEFT gave {got}, the configuration says {wanted}")
    count = sum(parameter.numel() for parameter in peft_model.parameters() if parameter.requires_grad)
    return Applied(peft_model, targets.table, targets.layers, count + to_come)


def _inject(
    model: PreTrainedModel, config: LoraConfig, deferred: Mapping[str, nn.Module], seed: int
) -> tuple[PeftModel, int]:
    """The adapted model, and how many trained values come when ``deferred`` layers are filled (`start_magnitudes`)."""
    if not deferred or not config.use_dora:
        return inject(model, config, seed=seed), 0
    config.use_dora = False  # its magnitudes are norms of the base's rows
    peft_model = inject(model, config, seed=seed)
    config.use_dora = peft_model.peft_config["default"].use_dora = True
    start_magnitudes(peft_model, config, leave=decoder_layers(peft_model))
    return peft_model, _magnitudes_to_come(deferred.values())


def get_peft_model(
    model: PreTrainedModel, config: LoraConfig, *, adapter_name: str = "default", seed: int = 0
) -> FrugalPeftModel:
    """`peft.get_peft_model` for a base of `frugal.load`: an adapter with a LoraConfig of your own.

    Merging, saving and counting work as on the models that `frugal.load` gives; PEFT's own function puts layers on
    that cannot merge into 4-bit weights. ``model`` is changed in place: ``frugal.load(BASE).model.unload()`` gives one
    without an adapter. ``seed`` decides where the adapter starts; the global random state stays as it was.

    Raises:
        UnsupportedError: ``config`` is no LoraConfig, or what it wants trained is stored in NF4.
        ConfigError: ``model`` has an adapter already.
    """
    if not isinstance(config, LoraConfig):
        raise UnsupportedError(
            f"frugal.get_peft_model takes a peft.LoraConfig, got {type(config).__name__}. peft.get_peft_model puts "
            "other adapters on this model too; before such a one is merged, call `model.dequantize()`."
        )
    refuse_adapted(model)
    prepare_trained(model, config.modules_to_save or [], trains_tokens=config.trainable_token_indices is not None)
    peft_model = inject(model, config, seed=seed, adapter_name=adapter_name)
    compute_in(peft_model, peft_model.dtype)
    return peft_model


def refuse_adapted(model: nn.Module) -> None:
    """Raise ConfigError when ``model`` carries an adapter: a second one would hide or stack on the first."""
    if isinstance(model, PeftModel) or any(isinstance(module, BaseTunerLayer) for module in model.modules()):
        raise ConfigError(
            "This model carries an adapter already, and nothing was changed. Load the base model anew for a fresh "
            "adapter, or take the old one off with `model.unload()`; to go on training a saved one, load it with "
            "trainable=True."
        )


def _refuse_start(model: PreTrainedModel, lora: LoraSection, quantize: str) -> None:
    start = lora.init_lora_weights
    if start in ("pissa", "loftq") and quantize != "none":
        raise UnsupportedError(
            f"lora.init_lora_weights: {start} changes the base weights, which cannot be done in NF4. Write "
            "`model.quantize: none`, or `lora.init_lora_weights: default`."
        )
    if start == "loftq" and input_device(model).type != "cuda":
        raise UnsupportedError(
            "lora.init_lora_weights: loftq quantises on a CUDA device in PEFT, and there is none here. Write "
            "`lora.init_lora_weights: pissa` or `default`."
        )
    if start == "loftq" and importlib.util.find_spec("scipy") is None:
        raise UnsupportedError("lora.init_lora_weights: loftq needs scipy in PEFT: `pip install scipy`.")


def _lora_config(
    model: PreTrainedModel, lora: LoraSection, targets: Targets, new_token_ids: Sequence[int]
) -> LoraConfig:
    start: Any = {"default": True, "gaussian": "gaussian"}.get(lora.init_lora_weights, lora.init_lora_weights)
    options: dict[str, Any] = {}
    if start == "loftq":
        options["loftq_config"] = LoftQConfig(loftq_bits=4, loftq_iter=1)
    if rows := _token_rows(model, new_token_ids, targets.modules_to_save):
        options["trainable_token_indices"] = rows
    if targets.modules_to_save and is_tied(model) and _trains_table(model, targets.modules_to_save):
        options["ensure_weight_tying"] = True
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.r,
        lora_alpha=_plain(lora.lora_alpha),
        lora_dropout=lora.lora_dropout,
        target_modules=targets.target_modules,
        # taken away from target_modules already: for who reads the file, and PEFT comes to the same
        exclude_modules=lora.exclude_modules or None,
        layers_to_transform=sorted(set(lora.layers_to_transform)) or None,
        modules_to_save=targets.modules_to_save or None,
        use_rslora=lora.use_rslora,
        use_dora=lora.use_dora,
        init_lora_weights=start,
        rank_pattern=dict(lora.rank_pattern),
        alpha_pattern={pattern: _plain(alpha) for pattern, alpha in lora.alpha_pattern.items()},
        bias="none",
        base_model_name_or_path=model.config._name_or_path,
        **options,
    )


def _plain(value: float) -> float | int:
    """32 rather than 32.0: PEFT's configuration declares an integer."""
    return int(value) if value == int(value) else value


def _trains_table(model: PreTrainedModel, names: list[str]) -> bool:
    return bool(set(names) & set(table_names(model)))


def _token_rows(model: PreTrainedModel, ids: Sequence[int], trained_whole: Sequence[str]) -> dict[str, list[int]]:
    """PEFT's trainable_token_indices: the embedding, and the head too where it has a table of its own.

    A table that is trained whole trains its new rows already; PEFT would wrap it twice.
    """
    rows = int(model.get_input_embeddings().weight.shape[0])
    outside = [token for token in ids if not 0 <= token < rows]
    if outside:
        raise ConfigError(f"Token ids {outside} have no row in the embedding table of {rows}: load it with more rows.")
    names = table_names(model)
    if is_tied(model):
        names = [] if _trains_table(model, list(trained_whole)) else names[:1]
    return {name.rsplit(".", 1)[-1]: sorted(ids) for name in names if ids and name not in trained_whole}


def inject(
    model: PreTrainedModel, config: LoraConfig, *, seed: int = 0, adapter_name: str = "default"
) -> FrugalPeftModel:
    """PEFT's injection with a random state of its own, then the dtype policy.

    Adapters of layers that wait for their weights are where the model's input belongs.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        with warnings.catch_warnings():
            # PEFT asks transformers for a property under its former name; users can do nothing about it
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            with _stand_ins(model, input_device(model)), names_as_given(model):
                peft_model = adapted(model, config, adapter_name)
    _cast_tied_heads(peft_model)
    masters_float32(peft_model)
    return peft_model


def _cast_tied_heads(model: nn.Module) -> None:
    """PEFT ties a trained head with a plain `nn.Linear`; the casting form takes its place, with the same Parameter."""
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):
            for name, child in module.modules_to_save.items():
                if type(child) is nn.Linear:
                    module.modules_to_save[name] = cast_linear(child)


def masters_float32(model: nn.Module) -> None:
    """Make everything that belongs to an adapter float32, frozen or not. Call it after adding or loading one."""
    for module in model.modules():
        parts: list[Any] = []
        if isinstance(module, BaseTunerLayer):
            parts = [getattr(module, name, None) for name in module.adapter_layer_names]
        elif isinstance(module, ModulesToSaveWrapper):
            parts = [module.modules_to_save]
        for part in parts:
            for parameter in part.parameters() if isinstance(part, nn.Module) else []:
                if parameter.is_floating_point() and parameter.dtype != torch.float32:
                    parameter.data = parameter.data.float()


def _is_deferred(model: nn.Module) -> bool:
    """Whether parameters of ``model`` wait for their weights on the meta device, beside others that have theirs."""
    return {parameter.is_meta for parameter in model.parameters()} == {True, False}


def needs_weights(lora: LoraSection, targets: Targets, layers: Iterable[str]) -> str | None:
    """Why the adapter of ``lora`` needs the weights of decoder ``layers`` when it is made; None when it does not."""
    layers = list(layers)
    adapted = next((name for name in targets.layers if inside(name, layers)), None)
    if lora.init_lora_weights in ("pissa", "loftq") and adapted is not None:
        return f"lora.init_lora_weights: {lora.init_lora_weights} starts from the weights of {adapted} and others"
    saved = next((name for name in targets.modules_to_save if inside(name, layers)), None)
    if saved is not None:
        return f"lora.modules_to_save: {saved} is inside a decoder layer, and PEFT copies it at once"
    return None


def start_magnitudes(
    module: nn.Module, config: LoraConfig, *, leave: Collection[str] = (), adapter_name: str = "default"
) -> None:
    """Make plain LoRA layers in ``module``, which have their weights now, DoRA layers as PEFT makes them at once.

    ``leave`` names what in ``module`` has no weights yet.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, LoraLayer) and not inside(name, leave):
            layer.lora_variant[adapter_name] = layer.resolve_lora_variant(config=config)
            layer.use_dora[adapter_name] = True
            # At injection A and B have the base's dtype while the norms of its rows are taken. What they hold is exact
            # in it: they had it before they became float32.
            layer._move_adapter_to_device_of_base_layer(adapter_name)
            layer.lora_variant[adapter_name].init(layer, adapter_name=adapter_name, config=config)
    masters_float32(module)


def _magnitudes_to_come(layers: Iterable[nn.Module]) -> int:
    """Trained values that `start_magnitudes` will add to ``layers``: one for each output of an adapted layer."""
    adapted = {inner for layer in layers for inner in layer.modules() if isinstance(inner, LoraLayer)}
    return sum(int(layer.out_features) for layer in adapted)


@contextlib.contextmanager
def _stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """For a while, a tensor of one element, expanded, in place of each parameter on the meta device.

    PEFT puts an adapter on the device, and at first in the dtype, of the weight that it adapts: it finds the right
    ones, and adapters come out as over the real weight.
    """
    found: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                found.append((module, name, parameter, nn.Parameter(value, requires_grad=False)))
    for module, name, _, instead in found:
        module._parameters[name] = instead
    try:
        yield
    finally:
        for module, name, parameter, instead in found:
            if module._parameters[name] is instead:
                module._parameters[name] = parameter


START = "frugal_pissa_start"


def adapter_state(model: PeftModel, adapter_name: str | None = None) -> dict[str, torch.Tensor]:
    """The adapter's tensors under PEFT's file keys (references, no copies): LoRA, trained modules and token rows."""
    name = adapter_name or model.active_adapter
    state: dict[str, torch.Tensor] = get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False)
    return state


def remember_start(model: PeftModel) -> None:
    """Keep the start of a PiSSA adapter (a copy of its size), which `save_adapter(plain=True)` subtracts."""
    if model.peft_config[model.active_adapter].init_lora_weights == "pissa":
        setattr(model, START, {key: value.detach().clone() for key, value in adapter_state(model).items()})
