"""What an adapter cannot have on a base whose layers get their weights after it was put on."""

from __future__ import annotations

from collections.abc import Iterable

from frugal.adapters.targets import Targets
from frugal.config import LoraSection
from frugal.models.held import inside


def needs_weights(lora: LoraSection, targets: Targets, layers: Iterable[str]) -> str | None:
    """Why the adapter of ``lora`` needs the weights of decoder ``layers`` when it is made; None when it does not."""
    layers = list(layers)
    adapted = next((name for name in targets.layers if inside(name, layers)), None)
    if lora.init_lora_weights in ("pissa", "loftq") and adapted is not None:
        return f"lora.init_lora_weights: {lora.init_lora_weights} starts from the weights of {adapted} and others"
    if lora.use_dora and adapted is not None:
        return f"lora.use_dora: true takes the first magnitudes from the weights of {adapted} and others"
    saved = next((name for name in targets.modules_to_save if inside(name, layers)), None)
    if saved is not None:
        return f"lora.modules_to_save: {saved} lies inside a decoder layer, and PEFT copies it at once"
    return None
