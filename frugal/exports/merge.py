"""Merge a run's adapter into its base: 16-bit weights, streamed tensor by tensor from safetensors to safetensors."""

from __future__ import annotations

import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from frugal.checkpoints.run_folder import RunFolder, check_depth, open_run, other_base
from frugal.checkpoints.side_files import copy_tokenizer, highest_token_id
from frugal.errors import CheckpointError, ConfigError, UnsupportedError
from frugal.exports.card import merged_card, without_folders
from frugal.exports.merge_io import OutTensor, plan_shards, write_shards
from frugal.exports.merge_math import Maker, WeightPlan
from frugal.exports.merge_plan import MergePlan, plan_merge
from frugal.files import fsync_folder, read_json, write_json, write_text
from frugal.models.resolve import ResolvedModel
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
            f"base weights: {self.weights} ({self.base}); {self.tied}",
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


def merge(
    run: str | Path,
    out: str | Path,
    *,
    weights: Weights | None = None,
    dtype: str | None = None,
    max_shard_bytes: int = 512 << 20,
    base: str | Path | None = None,
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Write the merged model of ``run`` into the new folder ``out``; stock transformers loads it.

    Args:
        run: a run folder, a checkpoint of it, or an adapter folder.
        weights: "dequantized" adds the update to what the run computed with (NF4 and back; equals base + adapter to
            rounding), "original" to the checkpoint's own weights (without the quantisation error, which the adapter
            never saw absent). Default: dequantized when the run was quantised.
        dtype: "bfloat16", "float16" or "float32"; default: that of the base's checkpoint.
        max_shard_bytes: largest file of weights; a larger tensor has a file of its own.
        base: the base model; wins over what the run stored.
        allow_other_base: merge although the base's fingerprint is not that of the run's base.

    Raises:
        CheckpointError: the adapter does not fit, ``out`` is not empty, no space; ConfigError: an unknown choice.
    """
    start = time.perf_counter()
    if weights not in (None, "dequantized", "original"):
        raise ConfigError(f"weights: got {weights!r}; allowed are dequantized and original.")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype: got {dtype!r}; allowed are {', '.join(DTYPES)}.")
    folder, opened = _new_folder(Path(out).expanduser()), open_run(run)
    source = opened.base_source(base, trust_remote_code=trust_remote_code)
    check_depth(opened, source)
    warnings = _check_base(opened, source, allow_other_base)
    chosen: Weights = weights or ("dequantized" if opened.quantized else "original")
    if chosen == "dequantized" and not opened.quantized:
        chosen = "original"
        warnings.append("the run was not quantised: dequantized and original weights are the same")
    plan = plan_merge(source.path, opened.adapter, quantized=opened.quantized, trust_remote_code=trust_remote_code)
    if plan.unreached and chosen == "dequantized":
        raise UnsupportedError(
            f"Loading this base joins or splits tensors of its files ({plan.unreached}), so their 4-bit form cannot be "
            "written back one by one. Merge into the original weights with --base-weights original."
        )
    target = DTYPES[dtype] if dtype else None
    maker = Maker(chosen == "dequantized", opened.double_quant, measure=opened.quantized)
    tensors = [_out_tensor(name, weight, target, maker) for name, weight in plan.weights.items()]
    shards = plan_shards(tensors, max_shard_bytes)
    written_dtype = _main_dtype(tensors)
    _check_space(folder.parent, sum(tensor.n_bytes for tensor in tensors))
    tokens = opened.tokenizer_folder or source.path
    surplus = list(range(highest_token_id(tokens) + 1, plan.vocab_rows))
    if len(surplus) > MOST_SUPPRESSED:
        warnings.append(f"{len(surplus)} rows of the token table have no token; too many to suppress one by one")
    beside = folder.with_name(f".{folder.name}.merging")
    shutil.rmtree(beside, ignore_errors=True)  # left by a merge that was killed
    beside.mkdir(parents=True)
    try:
        n_bytes = write_shards(beside, shards)
        _write_side_files(beside, opened, source, plan, written_dtype, surplus, trust_remote_code)
        report = MergeReport(
            out=str(folder),
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
        public = {"out": folder.name, "warnings": [without_folders(line, opened, source) for line in warnings]}
        public["base"] = without_folders(source.name, opened, source)
        write_json(beside / "merge_report.json", {**asdict(report), **public})
        write_text(beside / "README.md", merged_card(opened, source, report.lines()))
        fsync_folder(beside)
        if folder.exists():
            folder.rmdir()
        beside.rename(folder)
        fsync_folder(folder.parent)
    except OSError as error:
        raise CheckpointError(f"Cannot write {folder}: {error}. Free space or choose another folder.") from error
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return report


def _new_folder(out: Path) -> Path:
    out = out.absolute()
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise CheckpointError(f"{out} exists and is not empty. Choose a new folder for the merged model, or remove it.")
    return out


def _check_base(run: RunFolder, source: ResolvedModel, allow_other_base: bool) -> list[str]:
    sentence = other_base(run, source)
    if sentence is None:
        return []
    if not allow_other_base:
        raise CheckpointError(f"{sentence} Merge into it all the same with --allow-other-base.")
    return [sentence]


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


def _check_space(folder: Path, n_bytes: int) -> None:
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < n_bytes * 1.02 + (32 << 20):
        raise CheckpointError(
            f"{folder} has {disk_size(free)} free, the merged model needs {disk_size(n_bytes)}. "
            "Free space or choose another folder."
        )


def _write_side_files(
    folder: Path,
    run: RunFolder,
    source: ResolvedModel,
    plan: MergePlan,
    dtype: str,
    surplus: list[int],
    trust_remote_code: bool,
) -> None:
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
    if trust_remote_code:
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
    text["vocab_size"] = plan.vocab_rows
    if text is not config:
        text.pop("torch_dtype", None)
        text["dtype"] = dtype
