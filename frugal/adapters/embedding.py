"""Where the embedding table of a run waits: on the device, or in host memory (`frugal.models.host_embedding`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from frugal.adapters.targets import resolve_targets
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.models.host_embedding import host_refusal


@dataclass(frozen=True)
class TablePlace:
    """Whether the table waits on the host, and why."""

    on_host: bool
    reason: str


def place_of_table(
    asked: Literal["auto", "device", "host"], model: Any, lora: LoraSection, *, kind: str, adds_tokens: bool
) -> TablePlace:
    """Decide for ``memory.embedding`` before anything is loaded.

    Args:
        model: the base, which may have no memory yet.
        kind: of the device, "cuda" or "cpu".
        adds_tokens: whether the run trains rows of added tokens.

    Raises:
        ConfigError: ``host`` is asked for and cannot be.
    """
    if asked == "device":
        return TablePlace(False, "memory.embedding is device")
    if kind == "cpu" and asked == "auto":
        return TablePlace(False, "the device is the host")
    reason = host_refusal(model) or _trained(model, lora, adds_tokens)
    if reason is None:
        return TablePlace(True, "frozen and not tied to the head: only the rows in use are copied to the device")
    if asked == "host":
        raise ConfigError(f"memory.embedding: the table cannot wait on the host: {reason}. Write auto or device.")
    return TablePlace(False, reason)


def _trained(model: Any, lora: LoraSection, adds_tokens: bool) -> str | None:
    if adds_tokens:
        return "rows of added tokens are trained"
    table = model.get_input_embeddings()
    name = next(name for name, module in model.named_modules() if module is table)
    targets = resolve_targets(model, lora)
    if name in targets.layers:
        return f"{name} is in lora.target_modules"
    if any(name == saved or name.startswith(f"{saved}.") for saved in targets.modules_to_save):
        return f"{name} is in lora.modules_to_save"
    return None
