"""Settings that exclude each other. Each check names the keys it reads and is skipped when one of them is wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Values:
    """What the checks see: values by dotted key, defaults where nothing was written."""

    value: dict[str, Any]
    changed: frozenset[str]
    """Keys set to something else than their default; a default never contradicts anything."""

    def __getitem__(self, key: str) -> Any:
        return self.value[key]


Check = Callable[[Values], str | None]


@dataclass(frozen=True, slots=True)
class Rule:
    """Report at `keys[0]`; read all of `keys`."""

    keys: tuple[str, ...]
    check: Check


RULES: list[Rule] = []


def rule(*keys: str) -> Callable[[Check], Check]:
    """Register a check that reads `keys`; a message is reported at the first."""

    def register(check: Check) -> Check:
        RULES.append(Rule(keys, check))
        return check

    return register


@rule("lora.init_lora_weights", "model.quantize")
def _init_needs_dense(v: Values) -> str | None:
    if v["lora.init_lora_weights"] in ("pissa", "loftq") and v["model.quantize"] != "none":
        return (
            f"{v['lora.init_lora_weights']} starts from the unquantised weights, and model.quantize is "
            f"{v['model.quantize']}: set model.quantize: none, or another start"
        )
    return None


@rule("lora.target_modules")
def _targets(v: Values) -> str | None:
    return None if v["lora.target_modules"] else "names no module: write all-linear, or at least one name"


@rule("lora.modules_to_save", "lora.target_modules")
def _saved_and_adapted(v: Values) -> str | None:
    targets = v["lora.target_modules"]
    both = sorted(set(v["lora.modules_to_save"]) & set(targets)) if isinstance(targets, list) else []
    return (
        f"{', '.join(both)}: also in lora.target_modules; a module is trained whole or adapted, not both"
        if both
        else None
    )


@rule("data.train")
def _some_data(v: Values) -> str | None:
    return None if v["data.train"] else "is an empty list: name at least one file"


@rule("data.eval_split", "data.eval")
def _split(v: Values) -> str | None:
    split = v["data.eval_split"]
    if split >= 1 and split != int(split):
        return f"got {split:g}; from 1 on it is a number of rows and must be whole, below 1 a fraction"
    if split > 0 and v["data.eval"]:
        return "set together with data.eval: rows are held out only when data.eval is empty; keep one of them"
    return None


def _evaluates(v: Values) -> bool:
    return bool(v["data.eval"]) or v["data.eval_split"] > 0


@rule("output.keep_best", "data.eval", "data.eval_split")
def _best_needs_rows(v: Values) -> str | None:
    if v["output.keep_best"] and not _evaluates(v):
        return "needs evaluation rows: set data.eval or data.eval_split"
    return None


@rule("train.eval_steps", "data.eval", "data.eval_split")
def _eval_needs_rows(v: Values) -> str | None:
    if v["train.eval_steps"] is not None and not _evaluates(v):
        return "nothing to evaluate on: set data.eval or data.eval_split, or leave train.eval_steps out"
    return None


@rule("output.keep_best", "output.save_steps", "train.eval_steps")
def _best_is_saved(v: Values) -> str | None:
    save, evaluate = v["output.save_steps"], v["train.eval_steps"]
    if v["output.keep_best"] and save and evaluate and save % evaluate:
        return (
            f"output.save_steps ({save}) must be a multiple of train.eval_steps ({evaluate}), "
            "so that what is kept was measured"
        )
    return None


@rule("train.warmup_steps", "train.warmup_ratio", "train.lr_scheduler_type", "train.max_steps")
def _warmup(v: Values) -> str | None:
    steps, limit = v["train.warmup_steps"], v["train.max_steps"]
    if steps is not None and limit is not None and steps > limit:
        return f"got {steps}, more than train.max_steps ({limit})"
    if steps is not None and "train.warmup_ratio" in v.changed:
        return "set together with train.warmup_ratio: keep one of them"
    if steps and v["train.lr_scheduler_type"] == "constant":
        return "train.lr_scheduler_type: constant has no warm-up; write constant_with_warmup"
    return None


@rule("train.warmup_ratio", "train.lr_scheduler_type")
def _warmup_ratio(v: Values) -> str | None:
    unused = "train.warmup_ratio" in v.changed and v["train.warmup_ratio"] > 0
    if unused and v["train.lr_scheduler_type"] == "constant":
        return "train.lr_scheduler_type: constant has no warm-up; write constant_with_warmup"
    return None


@rule("train.min_lr_ratio", "train.lr_scheduler_type")
def _floor(v: Values) -> str | None:
    if "train.min_lr_ratio" in v.changed and v["train.lr_scheduler_type"] != "cosine_with_min_lr":
        return f"has no effect with train.lr_scheduler_type: {v['train.lr_scheduler_type']}; write cosine_with_min_lr"
    return None
