"""Format `merged`: the adapter in its base, 16-bit weights, streamed tensor by tensor from file to file."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from frugal.assets import weights_note
from frugal.checkpoints.side_files import copy_tokenizer, highest_token_id
from frugal.errors import ConfigError, UnsupportedError
from frugal.exports.base import Export, check_space, new_folder
from frugal.exports.card import merged_card, without_folders
from frugal.exports.merge_io import OutTensor, plan_shards, write_shards
from frugal.exports.merge_math import Maker, WeightPlan
from frugal.exports.merge_plan import MergePlan, plan_merge
from frugal.files import read_json, write_json, write_text
from frugal.units import disk_size, seconds

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
MOST_SUPPRESSED = 4096
"""Surplus rows of the token table that generation_config.json can name one by one."""

Weights = Literal["dequantized", "original"]


@dataclass(slots=True)
class MergeReport:
    """What was written, and how far the two choices of base weights lie apart."""

    out: str
    base: str
    weights: str
    """"dequantized" or "original": what the update was added to."""
    dtype: str
    n_bytes: int
    shards: int
    tensors: int
    adapted: int
    """Tensors that the adapter changes."""
    tied: str
    difference: dict[str, float]
    """Relative norms, see `merge_math.Difference.report`; about the quantisation only when the run was quantised."""
    surplus_rows: int
    """Rows of the token table without a token; generation_config.json keeps them from being generated."""
    seconds: float
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text for the terminal."""
        out = [
            f"merged {self.adapted} of {self.tensors} tensors into {self.out}: {self.dtype}, {self.shards} file(s), "
            f"{disk_size(self.n_bytes)}, {seconds(self.seconds)}",
            f"base weights: {self.weights} ({self.base}{weights_note(self.base)}); {self.tied}",
        ]
        update = self.difference["update_over_weights"]
        error = self.difference["quantization_error_over_weights"]
        if error:
            which = "same as the trained model" if self.weights == "dequantized" else "not what the adapter saw"
            out.append(
                f"dequantized and original weights differ by {error:.3%} of their norm, the update is {update:.3%}: "
                f"{self.weights} is {which}"
            )
        else:
            out.append(f"the update is {update:.3%} of the weights' norm")
        if self.difference["rounding_error_over_update"]:
            out.append(
                f"rounding to {self.dtype} takes {self.difference['rounding_error_over_update']:.2%} of the update"
            )
        return out + [f"warning: {warning}" for warning in self.warnings]


@dataclass(frozen=True, slots=True)
class MergeOptions:
    """What can be asked of a merge."""

    weights: Weights | None = None
    """"dequantized" adds the update to what the run computed with (NF4 and back; equals base + adapter to rounding),
    "original" to the checkpoint's own weights (without the quantisation error, which the adapter never saw absent).
    None: dequantized when the run was quantised."""
    dtype: str | None = None
    """"bfloat16", "float16" or "float32"; None: that of the base's checkpoint."""
    max_shard_bytes: int = 512 << 20
    """Largest file of weights; a larger tensor has a file of its own."""

    def __post_init__(self) -> None:
        if self.weights not in (None, "dequantized", "original"):
            raise ConfigError(f"weights: got {self.weights!r}; allowed are dequantized and original.")
        if self.dtype is not None and self.dtype not in DTYPES:
            raise ConfigError(f"dtype: got {self.dtype!r}; allowed are {', '.join(DTYPES)}.")


def write_merged(export: Export, options: MergeOptions) -> MergeReport:
    """Write the base with the adapter merged in, for stock transformers.

    Raises:
        CheckpointError: the adapter does not fit, or no space.
        UnsupportedError: the 4-bit form of this base cannot be written back.
    """
    start = time.perf_counter()
    run, source, warnings = export.run, export.base, export.warnings
    chosen: Weights = options.weights or ("dequantized" if run.quantized else "original")
    if chosen == "dequantized" and not run.quantized:
        chosen = "original"
        warnings.append("the run was not quantised: dequantized and original weights are the same")
    trusted = export.trust_remote_code
    plan = plan_merge(
        source.path,
        run.adapter,
        quantized=run.quantized,
        experts=run.quantized_experts,
        trust_remote_code=trusted,
    )
    if plan.unreached and chosen == "dequantized":
        raise UnsupportedError(
            f"Loading this base joins or splits tensors of its files ({plan.unreached}), so their 4-bit form cannot be "
            "written back one by one. Merge into the original weights with --base-weights original."
        )
    target = DTYPES[options.dtype] if options.dtype else None
    maker = Maker(chosen == "dequantized", run.double_quant, measure=run.quantized)
    tensors = [_out_tensor(name, weight, target, maker) for name, weight in plan.weights.items()]
    shards = plan_shards(tensors, options.max_shard_bytes)
    written_dtype = _main_dtype(tensors)
    check_space(export.out, sum(tensor.n_bytes for tensor in tensors))
    surplus = list(range(highest_token_id(run.tokenizer_folder or source.path) + 1, plan.vocab_rows))
    if len(surplus) > MOST_SUPPRESSED:
        warnings.append(f"{len(surplus)} rows of the token table have no token; too many to suppress one by one")
    with new_folder(export.out) as folder:
        n_bytes = write_shards(folder, shards)
        _write_side_files(folder, export, plan, written_dtype, surplus)
        report = MergeReport(
            out=str(export.out),
            base=source.name,
            weights=chosen,
            dtype=written_dtype,
            n_bytes=n_bytes,
            shards=len(shards),
            tensors=len(tensors),
            adapted=plan.adapted,
            tied=plan.tie_note,
            difference=maker.difference.report(),
            surplus_rows=len(surplus),
            seconds=round(time.perf_counter() - start, 3),
            warnings=warnings,
        )
        public = {"out": export.out.name, "warnings": [without_folders(line, run, source) for line in warnings]}
        public["base"] = without_folders(source.name, run, source)
        write_json(folder / "merge_report.json", {**asdict(report), **public})
        write_text(folder / "README.md", merged_card(run, source, report.lines()))
    return report


def _out_tensor(name: str, plan: WeightPlan, target: torch.dtype | None, maker: Maker) -> OutTensor:
    stored = plan.stored or plan.replaced
    assert stored is not None
    # A tensor of its own dtype (a float32 router bias in a bfloat16 model) keeps it unless a dtype was asked for
    dtype = target if target is not None and stored.dtype.is_floating_point else stored.dtype
    return OutTensor(name, dtype, plan.shape, maker.producer(plan, dtype))


def _main_dtype(tensors: list[OutTensor]) -> str:
    by_dtype: dict[torch.dtype, int] = {}
    for tensor in tensors:
        if tensor.dtype.is_floating_point:
            by_dtype[tensor.dtype] = by_dtype.get(tensor.dtype, 0) + tensor.n_bytes
    return str(max(by_dtype, key=lambda dtype: by_dtype[dtype])).removeprefix("torch.")


def _write_side_files(folder: Path, export: Export, plan: MergePlan, dtype: str, surplus: list[int]) -> None:
    run, source = export.run, export.base
    config: dict[str, Any] = read_json(source.path / "config.json")
    _update_config(config, plan, dtype)
    write_json(folder / "config.json", config)
    generation = _read_optional(source.path / "generation_config.json")
    for home in (run.root, run.adapter):
        generation.update(_read_optional(home / "generation_config.json"))
    if 0 < len(surplus) <= MOST_SUPPRESSED:
        generation["suppress_tokens"] = sorted({*(generation.get("suppress_tokens") or []), *surplus})
    generation.pop("_from_model_config", None)  # else transformers would build these settings anew from config.json
    if generation:
        write_json(folder / "generation_config.json", generation)
    if run.tokenizer_folder is not None:
        copy_tokenizer(run.tokenizer_folder, folder)
    else:
        copy_tokenizer(source.path, folder)
    if export.trust_remote_code:
        for code in source.path.glob("*.py"):
            shutil.copyfile(code, folder / code.name)


def _read_optional(file: Path) -> dict[str, Any]:
    return dict(read_json(file)) if file.is_file() else {}


def _update_config(config: dict[str, Any], plan: MergePlan, dtype: str) -> None:
    for key in ("quantization_config", "_name_or_path", "torch_dtype"):
        config.pop(key, None)
    config["dtype"] = dtype
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    for section in (config, text):
        if "tie_word_embeddings" in section or section is text:
            section["tie_word_embeddings"] = plan.tied
    if plan.grown:  # a table may have more rows than the vocabulary (mllama's has 8 for pictures)
        text["vocab_size"] = plan.vocab_rows
    if text is not config:
        text.pop("torch_dtype", None)
        text["dtype"] = dtype
