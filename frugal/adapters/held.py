"""Adapters on a base whose decoder layers get their weights after the adapter was put on."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from torch import nn

from frugal.adapters.masters import masters_float32
from frugal.adapters.targets import Targets
from frugal.config import LoraSection
from frugal.models.deferred_layers import inside


def needs_weights(lora: LoraSection, targets: Targets, layers: Iterable[str]) -> str | None:
    """Why the adapter of ``lora`` needs the weights of decoder ``layers`` when it is made; None when it does not."""
    layers = list(layers)
    adapted = next((name for name in targets.layers if inside(name, layers)), None)
    if lora.init_lora_weights in ("pissa", "loftq") and adapted is not None:
        return f"lora.init_lora_weights: {lora.init_lora_weights} starts from the weights of {adapted} and others"
    saved = next((name for name in targets.modules_to_save if inside(name, layers)), None)
    if saved is not None:
        return f"lora.modules_to_save: {saved} lies inside a decoder layer, and PEFT copies it at once"
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


def magnitudes_to_come(layers: Iterable[nn.Module]) -> int:
    """Trained values that `start_magnitudes` will add to ``layers``: one for each output of an adapted layer."""
    adapted = {inner for layer in layers for inner in layer.modules() if isinstance(inner, LoraLayer)}
    return sum(int(layer.out_features) for layer in adapted)
