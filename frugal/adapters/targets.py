"""Which layers a configuration names: every pattern with the layers it matches, and no pattern without one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from peft import LoraConfig
from peft.tuners.tuners_utils import _check_lora_target_modules_mamba
from peft.utils.other import get_pattern_key
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from frugal.adapters.patterns import PatternRow, narrowed, nothing
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.model_structure import inside, is_tied, router_names, stacked_experts, table_names, unreached_by_text

_PLAIN_NAME = re.compile(r"[\w.]+")


@dataclass(frozen=True)
class Scale:
    """Rank, alpha and effective scale of one layer."""

    r: int
    lora_alpha: float
    scale: float
    """lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora."""


@dataclass
class Targets:
    """The resolved layers of one `lora` section on one model."""

    target_modules: list[str]
    """For PEFT: the shortest names that match exactly the layers wanted."""
    modules_to_save: list[str]
    """Full names."""
    table: list[PatternRow]
    layers: dict[str, Scale] = field(default_factory=dict)
    """Layer name -> rank and scale."""


def resolve_targets(model: PreTrainedModel, lora: LoraSection) -> Targets:
    """Resolve ``lora``'s names and patterns on ``model``.

    Names match as in PEFT: a target is a full name or a dotted tail (`q_proj`, `layers.1.self_attn.q_proj`), a single
    text may be a regular expression over full names, and the keys of rank_pattern and alpha_pattern are regular
    expressions over tails, of which the first that matches counts.
    exclude_modules and layers_to_transform take layers of target_modules away (`narrowed`).

    Raises:
        ConfigError: a pattern matches nothing (or nothing that can be adapted); the message lists near names.
    """
    names = {name: module for name, module in model.named_modules() if name}
    reached = _reached(model, _targets(model, lora.target_modules, names))
    rows, narrowing = narrowed(model, lora, reached)
    saved_rows = [_by_tail("modules_to_save", entry, names) for entry in lora.modules_to_save]
    saved = {name for row in saved_rows for name in row.layers}
    adapted = [name for name in names if any(name in row.layers for row in rows) and name not in saved]
    if not adapted:
        raise ConfigError("lora.target_modules: every layer named is in lora.modules_to_save, none is left to adapt.")
    if lora.use_dora:
        _refuse_dora(model, adapted)
    rank_rows, ranks = _patterns("rank_pattern", lora.rank_pattern, adapted)
    alpha_rows, alphas = _patterns("alpha_pattern", lora.alpha_pattern, adapted)
    layers = {}
    for name in adapted:
        r, alpha = int(ranks.get(name, lora.r)), alphas.get(name, lora.lora_alpha)
        layers[name] = Scale(r, alpha, alpha / (r**0.5 if lora.use_rslora else r))
    short = _shortest(adapted, names)
    return Targets(short, sorted(saved), [*rows, *narrowing, *rank_rows, *alpha_rows, *saved_rows], layers)


def tied_too(model: PreTrainedModel, lora: LoraSection) -> str | None:
    """A sentence where `lora.modules_to_save` names one half of a tied table, since the other half trains with it."""
    tables = table_names(model)
    saved = {name for entry in lora.modules_to_save for name in _by_tail_of(model, entry).layers}
    named, unnamed = [name for name in tables if name in saved], [name for name in tables if name not in saved]
    if not is_tied(model) or not named or not unnamed:
        return None
    rows, width = model.get_input_embeddings().weight.shape
    return (
        f"lora.modules_to_save: {named[0]} is tied to {unnamed[0]}: they are one table of {rows:,} x {width:,} values, "
        f"so {unnamed[0]} is trained and saved too. Leave {named[0]} out to train neither."
    )


def _by_tail_of(model: PreTrainedModel, entry: str) -> PatternRow:
    return _by_tail("modules_to_save", entry, {name: module for name, module in model.named_modules() if name})


def _refuse_dora(model: PreTrainedModel, adapted: list[str]) -> None:
    """DoRA on an embedding would be trained, and then nothing could merge it."""
    tables = [name for name in adapted if isinstance(model.get_submodule(name), nn.Embedding)]
    if tables:
        raise ConfigError(
            f"lora.use_dora: {tables[0]} is an embedding, and DoRA on an embedding cannot be merged. Leave it out of "
            "lora.target_modules, train it whole (lora.modules_to_save), or write `lora.use_dora: false`."
        )


def _reached(model: PreTrainedModel, rows: list[PatternRow]) -> list[PatternRow]:
    """``rows`` without layers that a text never runs through: their adapters would stay at their start."""
    beyond = unreached_by_text(model)
    found = []
    for row in rows:
        if refused := [name for name in row.layers if _peft_refuses(model, name)]:
            raise ConfigError(
                f"lora.target_modules: {row.pattern!r} names {refused[0]}, which PEFT refuses to adapt in "
                f"{model.config.model_type}: its kernels pass an adapter by. Leave it out, or write `all-linear`."
            )
        dead = tuple(name for name in row.layers if inside(name, beyond))
        if dead and len(dead) == len(row.layers):
            raise ConfigError(
                f"lora.target_modules: {row.pattern!r} names only layers that a text never runs through ({dead[0]} and "
                f"{len(dead) - 1} others): training on text would leave them as they are. Name layers of the language "
                "model, or write `all-linear`."
            )
        found.append(replace(row, layers=tuple(n for n in row.layers if n not in set(dead)), unreached=dead))
    return found


def _targets(model: PreTrainedModel, asked: str | list[str], names: Mapping[str, nn.Module]) -> list[PatternRow]:
    if asked == "all-linear":
        head, routers = model.get_output_embeddings(), router_names(model)
        layers = tuple(
            name
            for name, module in names.items()
            if isinstance(module, nn.Linear | Conv1D)
            and module is not head
            and name not in routers
            and not (_reads_weight(names, name) or _peft_refuses(model, name))
        )
        if not layers:
            raise ConfigError("lora.target_modules: all-linear, but the model has no linear layer.")
        return [PatternRow("target_modules", "all-linear", layers)]
    if isinstance(asked, str) and not _PLAIN_NAME.fullmatch(asked):
        try:
            expression = re.compile(asked)
        except re.error as error:
            raise ConfigError(f"lora.target_modules: {asked!r} is no valid regular expression: {error}.") from error
        matched = [name for name in names if expression.fullmatch(name)]
        layers = tuple(name for name in matched if _can_adapt(names[name]))
        if not layers:
            raise ConfigError(nothing("target_modules", asked, names, matched))
        return [PatternRow("target_modules", asked, layers)]
    rows = [_by_tail("target_modules", entry, names) for entry in ([asked] if isinstance(asked, str) else asked)]
    for row in rows:
        wrong = [name for name in row.layers if not _can_adapt(names[name])]
        if wrong:
            kind = type(names[wrong[0]]).__name__
            raise ConfigError(
                f"lora.target_modules: {row.pattern!r} names {wrong[0]} ({kind}), no linear or embedding layer. "
                f"Layers inside it: {', '.join(_tails_inside(wrong[0], names)) or 'none'}."
            )
    return rows


def _reads_weight(names: Mapping[str, nn.Module], name: str) -> bool:
    """Whether ``name`` ends a Mamba mixer: on GPUs its kernel takes the weight and passes an adapter by."""
    mixer = names.get(name.rpartition(".")[0])
    return name.endswith("out_proj") and hasattr(mixer, "A_log") and hasattr(mixer, "D")


def _peft_refuses(model: PreTrainedModel, name: str) -> bool:
    """Whether PEFT adapts no layer of this name in this family, neither now nor when the file is loaded."""
    try:
        _check_lora_target_modules_mamba(LoraConfig(), model, name.rsplit(".", 1)[-1])
    except ValueError:
        return True
    return False


def _can_adapt(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)


def _tails_inside(name: str, names: Mapping[str, nn.Module]) -> list[str]:
    inside = (other for other, module in names.items() if other.startswith(f"{name}.") and _can_adapt(module))
    return sorted({other.rsplit(".", 1)[-1] for other in inside})


def _by_tail(
    key: Literal["target_modules", "modules_to_save"], entry: str, names: Mapping[str, nn.Module]
) -> PatternRow:
    layers = tuple(name for name in names if name == entry or name.endswith(f".{entry}"))
    if not layers:
        offered = [name for name, module in names.items() if key == "modules_to_save" or _can_adapt(module)]
        raise ConfigError(nothing(key, entry, offered, []) + _experts_hint(entry, names))
    return PatternRow(key, entry, layers)


def _experts_hint(entry: str, names: Mapping[str, nn.Module]) -> str:
    """What a name that fits no layer has to do with experts, which are parameters and no layers."""
    stacks = {name: list(stacked_experts(module)) for name, module in names.items()}
    found = next((f"{name}.{parts[0]}" for name, parts in stacks.items() if parts), None)
    if found is None or not re.search(r"gate|up|down|w[123]$|experts", entry):
        return ""
    return (
        f" The experts of this model are stacked in parameters ({found}), which get no adapter here: leave {entry!r} "
        "out, and the attention layers are trained."
    )


def _patterns(
    key: Literal["rank_pattern", "alpha_pattern"], asked: Mapping[str, float], adapted: list[str]
) -> tuple[list[PatternRow], dict[str, float]]:
    """Rows of a pattern table, and layer -> value. PEFT's own matching decides, so that what is shown happens."""
    values: dict[str, float] = {}
    layers: dict[str, list[str]] = {pattern: [] for pattern in asked}
    for name in adapted:
        pattern = get_pattern_key(list(asked), name)
        if pattern in layers:
            layers[pattern].append(name)
            values[name] = asked[pattern]
    for pattern, matched in layers.items():
        if matched:
            continue
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in adapted):
            raise ConfigError(f"lora.{key}: every layer that {pattern!r} matches is taken by an earlier pattern.")
        raise ConfigError(nothing(key, pattern, adapted, []))
    return [PatternRow(key, pattern, tuple(found), asked[pattern]) for pattern, found in layers.items()], values


def _shortest(wanted: list[str], names: Mapping[str, nn.Module]) -> list[str]:
    """Last parts of the names if these match exactly the layers ``wanted``, else full names."""
    tails = sorted({name.rsplit(".", 1)[-1] for name in wanted})
    by_tail = {name for name in names if name.rsplit(".", 1)[-1] in tails}
    return tails if by_tail == set(wanted) else sorted(wanted)
