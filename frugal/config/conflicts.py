"""Settings that exclude each other."""

from __future__ import annotations

from collections.abc import Iterator

from frugal.config.schema import Config, Section


def _changed(section: Section, key: str) -> bool:
    """True for a key set to something else than its default; a default never contradicts anything."""
    return bool(getattr(section, key) != type(section).model_fields[key].default)


_OBJECTIVES_OF = {
    "beta": ("dpo", "orpo", "simpo", "kto"),
    "loss_type": ("dpo",),
    "label_smoothing": ("dpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "precompute_reference": ("dpo", "kto"),
}
"""Keys of `objective`, and the objectives that read them."""


def _of_objective(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Contradictions between what is trained for and the rest."""
    objective, data, train = config.objective, config.data, config.train
    name = objective.name
    for key, names in _OBJECTIVES_OF.items():
        if name not in names and _changed(objective, key):
            keys = (f"objective.{key}", "objective.name")
            yield keys, f"has no effect with objective.name: {name}; it is a key of {', '.join(names)}"
    if name == "dpo" and objective.label_smoothing and objective.loss_type != "sigmoid":
        keys = ("objective.label_smoothing", "objective.loss_type")
        yield keys, f"has no effect with objective.loss_type: {objective.loss_type}; write loss_type: sigmoid"
    if name == "sft":
        return
    start = config.lora.init_lora_weights
    if start in ("pissa", "loftq") and name in _OBJECTIVES_OF["precompute_reference"]:
        keys = ("lora.init_lora_weights", "objective.name")
        yield keys, f"{start} changes the base, which objective.name: {name} compares with: leave it out"
    if train.label_smoothing:
        way = "write objective.label_smoothing" if name in _OBJECTIVES_OF["label_smoothing"] else "leave it out"
        yield ("train.label_smoothing", "objective.name"), f"smooths the tokens of objective.name: sft; {way}"
    strategy = config.distributed.strategy
    if strategy not in ("auto", "ddp"):
        message = f"{strategy} cuts tensors, and objective.name: {name} trains on whole copies of the base so far"
        yield ("distributed.strategy", "objective.name"), f"{message}; write distributed.strategy: ddp"
    if data.packing:
        yield (
            ("data.packing", "objective.name"),
            f"is not there for objective.name: {name}: leave it out",
        )
    if data.train_on == "all":
        message = f"would train the prompt too; objective.name: {name} compares answers: leave it out, or write last"
        yield ("data.train_on", "objective.name"), message


def conflicts(config: Config) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield each contradiction: the keys it was read from (it is reported at the first), and a message."""
    model, lora, data, train, output = config.model, config.lora, config.data, config.train, config.output
    if lora.init_lora_weights in ("pissa", "loftq") and model.quantize != "none":
        yield (
            ("lora.init_lora_weights", "model.quantize"),
            f"{lora.init_lora_weights} starts from the unquantised weights, and model.quantize is {model.quantize}: "
            "set model.quantize: none, or another start",
        )
    yield from _of_objective(config)
    if not lora.target_modules:
        yield ("lora.target_modules",), "names no module: write all-linear, or at least one name"
    both = set(lora.modules_to_save) & set(lora.target_modules if isinstance(lora.target_modules, list) else [])
    if both:
        yield (
            ("lora.modules_to_save", "lora.target_modules"),
            f"{', '.join(sorted(both))}: also in lora.target_modules; a module is trained whole or adapted, not both",
        )
    if not data.train:
        yield ("data.train",), "is an empty list: name at least one file"
    if data.eval_split >= 1 and data.eval_split != int(data.eval_split):
        yield (
            ("data.eval_split", "data.eval"),
            f"must be a whole number of rows, or a fraction below 1, got {data.eval_split:g}",
        )
    elif data.eval_split > 0 and data.eval:
        yield (
            ("data.eval_split", "data.eval"),
            "set together with data.eval: rows are held out only when data.eval is empty; keep one of them",
        )
    if not data.eval and data.eval_split == 0:
        if output.keep_best:
            keys = ("output.keep_best", "data.eval", "data.eval_split")
            yield keys, "needs evaluation rows: set data.eval or data.eval_split"
        if train.eval_steps is not None:
            keys = ("train.eval_steps", "data.eval", "data.eval_split")
            yield keys, "nothing to evaluate on: set data.eval or data.eval_split, or leave train.eval_steps out"
    if output.keep_best and output.save_steps and train.eval_steps and output.save_steps % train.eval_steps:
        yield (
            ("output.keep_best", "output.save_steps", "train.eval_steps"),
            f"output.save_steps ({output.save_steps}) must be a multiple of train.eval_steps ({train.eval_steps}), "
            "so that what is kept was measured",
        )
    steps, ratio_set = train.warmup_steps, _changed(train, "warmup_ratio")
    constant = "train.lr_scheduler_type: constant has no warm-up; write constant_with_warmup"
    warmup_keys = ("train.warmup_steps", "train.warmup_ratio", "train.lr_scheduler_type", "train.max_steps")
    if steps and train.max_steps is not None and steps >= train.max_steps:
        yield warmup_keys, f"must be less than train.max_steps ({train.max_steps}), got {steps}"
    elif steps is not None and ratio_set:
        yield warmup_keys, "set together with train.warmup_ratio: keep one of them"
    elif steps and train.lr_scheduler_type == "constant":
        yield warmup_keys, constant
    if ratio_set and train.warmup_ratio > 0 and train.lr_scheduler_type == "constant":
        yield ("train.warmup_ratio", "train.lr_scheduler_type"), constant
    if _changed(train, "min_lr_ratio") and train.lr_scheduler_type != "cosine_with_min_lr":
        yield (
            ("train.min_lr_ratio", "train.lr_scheduler_type"),
            f"has no effect with train.lr_scheduler_type: {train.lr_scheduler_type}; write cosine_with_min_lr",
        )
