"""Names of adapted layers that stay what they are, though PEFT rewrites them for mixtures of experts.

For adapters made with transformers 4, PEFT turns names such as `gate_proj` of many families into parameters of stacked
experts, at every injection and every load. Linear layers of these names (dense layers, shared experts) would lose their
adapter and experts would get one. In a file such a layer is named as a parameter, which PEFT leaves as it is and reads
into the same keys and shapes.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from peft import PeftConfig, PeftModel
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from frugal.errors import UnsupportedError

_WEIGHT = ".weight"


@contextlib.contextmanager
def names_as_given(model: Any) -> Iterator[None]:
    """Inside, PEFT does not rewrite names on ``model``: its configuration does not tell the family."""
    config = model.config
    config.__dict__["model_type"] = ""
    try:
        yield
    finally:
        del config.__dict__["model_type"]


def layers_as_modules(config: Any, model: nn.Module) -> None:
    """Undo `layers_as_parameters` in a configuration that was read: 2-D weights of layers are layers again."""
    parameters = set(config.target_parameters or ())
    layers = {name for name in parameters if _is_linear(model, name)}
    if not layers:
        return
    config.target_parameters = sorted(parameters - layers) or None
    config.target_modules = sorted({*config.target_modules, *(name.removesuffix(_WEIGHT) for name in layers)})
    for patterns in (config.rank_pattern, config.alpha_pattern):
        for name in layers & patterns.keys():
            patterns[name.removesuffix(_WEIGHT)] = patterns.pop(name)


def _is_linear(model: nn.Module, name: str) -> bool:
    try:
        return name.endswith(_WEIGHT) and isinstance(model.get_submodule(name.removesuffix(_WEIGHT)), nn.Linear)
    except AttributeError:
        return False


def layers_as_parameters(model: PeftModel, config: PeftConfig, values: dict[str, Any]) -> None:
    """Name layers that PEFT would rewrite as parameters in ``values``, ``config`` as JSON."""
    lost = _rewritten(model, config) if getattr(config, "target_modules", None) else set()
    if not lost:
        return
    tuner: Any = model.base_model
    full = sorted(n for n in tuner.targeted_module_names if any(n == t or n.endswith(f".{t}") for t in lost))
    kept = set(tuner.targeted_module_names) - set(full)
    values["target_modules"] = sorted(
        kept
        if any(n.rsplit(".", 1)[-1] in lost for n in kept)
        else {t for t in values["target_modules"] if t not in lost}
    )
    values["target_parameters"] = sorted({*(values.get("target_parameters") or ()), *(n + _WEIGHT for n in full)})
    values["lora_dropout"] = 0.0  # PEFT refuses another one beside parameters; it has no part in what is learned
    for key, part in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha")):
        if values[key]:
            own = {n + _WEIGHT: getattr(tuner.model.get_submodule(n), part)[model.active_adapter] for n in full}
            values[key] = {**own, **values[key]}


def _rewritten(model: Any, config: Any) -> set[str]:
    """Entries of ``config.target_modules`` that PEFT would turn into something else on this family."""
    base = model.get_base_model()
    if isinstance(config.target_modules, str):
        return set()
    lost = set()
    for entry in config.target_modules:
        one = copy.deepcopy(config)
        one.target_modules = {entry}
        try:
            convert_peft_config_for_transformers(one, base, None)
        except ValueError:  # gate_proj without up_proj: rewritten, too
            lost.add(entry)
        else:
            lost |= {entry} - set(one.target_modules)
    return lost


def refuse_rewritten_dora(model: PeftModel, config: Any) -> None:
    """Raise UnsupportedError where DoRA would have to be saved on layers that can only be named as parameters."""
    if getattr(config, "use_dora", False) and (lost := _rewritten(model, config)):
        raise UnsupportedError(
            f"lora.use_dora: PEFT rewrites the names {', '.join(sorted(lost)[:4])} of this family, and what is left "
            "cannot say DoRA: nobody could load the adapter. Write `lora.use_dora: false`, or leave these layers out."
        )
