"""Formats `gguf` and `lora-gguf`: the merged model, or the adapter alone, in one file for llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import gguf
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from frugal.checkpoints.side_files import copy_tokenizer, stop_ids
from frugal.errors import ConfigError, UnsupportedError
from frugal.exports.base import Export, check_space, new_folder
from frugal.exports.gguf_families import (
    Names,
    family_of,
    rope_factors,
    to_halves,
    window_note,
    write_keys,
)
from frugal.exports.gguf_file import Entry, Kind, check_type, fill, finish, kind_of, read_tensors, start
from frugal.exports.gguf_vocab import check_vocab, write_vocab
from frugal.exports.merge_math import LoraUpdate, Maker
from frugal.exports.merge_plan import Fit, MergePlan, adapter_parts, fit_adapter, plan_merge
from frugal.exports.proof import Proof, check_memory, proof_rows, prove, reference
from frugal.files import read_json, write_json
from frugal.models.stock import load_stock
from frugal.units import disk_size

READ_BY_TRANSFORMERS = ("llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text")
"""Families whose GGUF files transformers reads itself; the others are read back by the tables that wrote them."""


@dataclass(slots=True)
class GgufReport:
    """What was written, and what the proof measured."""

    file: str
    type: str
    n_bytes: int
    tensors: int
    proof: Proof | None
    warnings: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The report as lines of text for the terminal."""
        first = f"wrote {self.tensors} tensors ({self.type}) into {self.file}: {disk_size(self.n_bytes)}"
        proven = self.proof.line() if self.proof is not None else "not proven (--no-proof)"
        notes = [self.proof.note] if self.proof is not None and self.proof.note else []
        return [first, proven, *(f"warning: {warning}" for warning in [*notes, *self.warnings])]


@dataclass(frozen=True, slots=True)
class GgufOptions:
    """What can be asked of a GGUF file of the model."""

    type: str = "f16"
    """f32, f16, bf16 or q8_0"""
    weights: str | None = None
    """As of a merge: "dequantized" or "original"; None: dequantized when the run was quantised."""
    proof: bool = True
    """Read the file back and compare it with the adapter on its base."""

    def __post_init__(self) -> None:
        check_type(self.type)
        if self.weights not in (None, "dequantized", "original"):
            raise ConfigError(f"weights: got {self.weights!r}; allowed are dequantized and original.")


@dataclass(frozen=True, slots=True)
class LoraGgufOptions:
    """What can be asked of an adapter's GGUF file."""

    type: str = "f16"
    """f32, f16 or bf16"""
    proof: bool = True

    def __post_init__(self) -> None:
        check_type(self.type, ("f32", "f16", "bf16"))


def write_gguf(export: Export, options: GgufOptions) -> GgufReport:
    """Write the base with the adapter merged in as ``model-TYPE.gguf``, with tokenizer, template and stop ids in it.

    Raises:
        UnsupportedError: a family, tokenizer or type that cannot be written.
        CheckpointError: the adapter does not fit, no space, or the file answers otherwise than the trained model.
    """
    run, base, kind = export.run, export.base, options.type.lower()
    _names_a_folder(export.out)
    config = base.config()
    family = family_of(config)
    names = Names(config, family)
    plan = plan_merge(
        base.path,
        run.adapter,
        quantized=run.quantized,
        experts=run.quantized_experts,
        trust_remote_code=export.trust_remote_code,
    )
    if family.norm_shift and not plan.tied:
        raise UnsupportedError(
            f"llama.cpp ties the head of {config.model_type} to its embedding; this adapter changes them differently."
        )
    dequantized = run.quantized and options.weights != "original"
    entries = list(_entries(plan, names, kind, Maker(dequantized, run.double_quant, measure=False)))
    if (factors := rope_factors(config)) is not None:
        name = f"{gguf.TENSOR_NAMES[gguf.MODEL_TENSOR.ROPE_FREQS]}.weight"
        entries.insert(0, Entry(name, tuple(factors.shape), Kind.F32, lambda: [factors]))
    check_space(export.out, sum(entry.n_bytes for entry in entries) + (16 << 20))
    if options.proof:
        check_memory(4 * sum(prod(weight.shape) for weight in plan.weights.values()))
    home = run.tokenizer_folder or base.path
    tokenizer = AutoTokenizer.from_pretrained(str(home), trust_remote_code=export.trust_remote_code)
    warnings = export.warnings
    if note := window_note(config, family):
        warnings.append(note)
    with new_folder(export.out) as folder:
        file = folder / f"model-{kind}.gguf"
        writer = start(file, family.arch, kind, "model")
        writer.add_name(export.out.name)
        write_keys(writer, config, family, plan.vocab_rows)
        stops = stop_ids(tokenizer, _generation(export))
        warnings += write_vocab(writer, home, tokenizer, plan.vocab_rows, stops)
        size = finish(writer, entries)
        proof = None
        if options.proof:
            warnings += check_vocab(file, tokenizer, plan.vocab_rows, stops)
            proof = _prove_model(export, plan, names, tokenizer, file, kind, dequantized)
            write_json(folder / "proof.json", asdict(proof))
    return GgufReport(str(export.out / file.name), kind, size, len(entries), proof, warnings)


def _names_a_folder(out: Path) -> None:
    if out.suffix == ".gguf":
        raise ConfigError(f"--out {out.name}: give a folder; the file in it gets its name by its type.")


def _generation(export: Export) -> dict[str, Any]:
    for folder in (export.run.adapter, export.run.root, export.base.path):
        if (folder / "generation_config.json").is_file():
            return dict(read_json(folder / "generation_config.json"))
    return {}


def _entries(plan: MergePlan, names: Names, kind: str, maker: Maker) -> Iterator[Entry]:
    seen: dict[str, str] = {}
    for name, weight in plan.weights.items():
        if name.endswith("rotary_emb.inv_freq"):
            continue
        key = names(name)
        if key in seen:
            raise UnsupportedError(f"{name} and {seen[key]} have the same name {key} in llama.cpp.")
        seen[key] = name
        make = maker.producer(weight, torch.float32)
        yield Entry(key, weight.shape, kind_of(weight.shape, kind), make, names.heads(name), names.shift(name))


def _prove_model(
    export: Export, plan: MergePlan, names: Names, tokenizer: Any, file: Path, kind: str, dequantized: bool
) -> Proof:
    config = export.base.config()
    text = config.get_text_config()
    text.vocab_size, text.tie_word_embeddings = plan.vocab_rows, plan.tied
    known = config.model_type in READ_BY_TRANSFORMERS

    def read_back() -> nn.Module:
        if known:
            return _by_transformers(file, config)
        model: nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        fill(model, file, names)
        return model

    linears = {name for name, weight in plan.weights.items() if weight.quantized}
    return prove(
        export,
        proof_rows(export, tokenizer, plan.vocab_rows),
        lambda: reference(export, dequantized=dequantized, linears=linears, vocabulary=plan.vocab_rows),
        read_back,
        reader="read by transformers" if known else "read by frugal",
        kind=kind,
    )


def _by_transformers(file: Path, config: Any) -> nn.Module:
    model: nn.Module = load_stock(
        str(file.parent),
        gguf_file=file.name,
        config=config,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    return model.eval()


def write_lora_gguf(export: Export, options: LoraGgufOptions) -> GgufReport:
    """Write the adapter alone as ``lora-TYPE.gguf``, for `llama-cli --lora` over a GGUF file of its base.

    Raises:
        UnsupportedError: a family that cannot be written, or an adapter that is more than low-rank updates.
    """
    run, base, kind = export.run, export.base, options.type.lower()
    _names_a_folder(export.out)
    config = base.config()
    family = family_of(config)
    names = Names(config, family)
    fit = fit_adapter(base.path, run.adapter, trust_remote_code=export.trust_remote_code)
    updates = _low_rank(fit)
    # One alpha for the file, and llama.cpp scales by alpha / rank of each tensor; what differs goes into B
    alpha = next(update.scaling * update.a.shape[0] for update in updates.values())
    entries = [entry for name, update in updates.items() for entry in _pair(name, update, names, kind, alpha)]
    check_space(export.out, sum(entry.n_bytes for entry in entries))
    if options.proof:
        check_memory(4 * sum(prod(tensor.shape) for tensor in fit.stored.values()))
    if run.quantized:
        export.warnings.append("trained over the base in NF4: over a base file of another type answers differ a little")
    with new_folder(export.out) as folder:
        file = folder / f"lora-{kind}.gguf"
        writer = start(file, family.arch, kind, gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, alpha)
        writer.add_name(export.out.name)
        size = finish(writer, entries)
        copy_tokenizer(run.tokenizer_folder or base.path, folder)
        proof = None
        if options.proof:
            proof = _prove_lora(export, fit, names, file, kind)
            write_json(folder / "proof.json", asdict(proof))
    return GgufReport(str(export.out / file.name), kind, size, len(entries), proof, export.warnings)


def _low_rank(fit: Fit) -> dict[str, LoraUpdate]:
    """The updates by the parameter they change. Raises UnsupportedError for what a LoRA file cannot hold."""
    found: dict[str, LoraUpdate] = {}
    for name, fields in adapter_parts(fit.peft_model, fit.tensors).items():
        update = fields.get("update")
        more = sorted(set(fields) - {"update"})
        reason = {"replaced": "was trained whole", "rows": "has trained rows", "bias_update": "has a trained bias"}
        problem = reason.get(more[0], more[0]) if more else None
        if update is not None and update.magnitude is not None:
            problem = "has DoRA's magnitudes"
        elif name in (fit.embedding, fit.head) and problem is None:
            problem = "is the token table or the head"
        if problem is not None or update is None:
            raise UnsupportedError(f"{name} {problem}, which a LoRA file cannot hold. Use --to gguf.")
        found[name] = update
    return found


def _pair(name: str, update: LoraUpdate, names: Names, kind: str, alpha: float) -> Iterator[Entry]:
    rank, key = update.a.shape[0], names(name)
    factor = update.scaling / (alpha / rank)

    def second() -> list[torch.Tensor]:
        rows = update.b.read().float()
        return [rows if factor == 1.0 else rows * factor]

    yield Entry(f"{key}.lora_a", update.a.shape, kind_of(update.a.shape, kind), lambda: [update.a.read()])
    yield Entry(f"{key}.lora_b", update.b.shape, kind_of(update.b.shape, kind), second, names.heads(name))


def _prove_lora(export: Export, fit: Fit, names: Names, file: Path, kind: str) -> Proof:
    tokenizer = AutoTokenizer.from_pretrained(str(export.run.tokenizer_folder or export.base.path))

    def read_back() -> nn.Module:
        model: nn.Module = load_stock(export.base.path, dtype=torch.float32).eval()
        add_lora(model, file, names)
        return model

    return prove(
        export,
        proof_rows(export, tokenizer, fit.rows),
        lambda: reference(export, dequantized=False, linears=set(), vocabulary=fit.rows),
        read_back,
        reader="read by frugal",
        kind=kind,
    )


def add_lora(model: nn.Module, file: Path, names: Names) -> None:
    """Add a LoRA file to a model's weights as llama.cpp does: alpha / rank times B A, rows in the file's order."""
    found = read_tensors(file)
    alpha = float(gguf.GGUFReader(file).fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            key = names(name)
            if f"{key}.lora_a" not in found:
                continue
            a, b = found.pop(f"{key}.lora_a"), found.pop(f"{key}.lora_b")
            delta, heads = alpha / a.shape[0] * (b @ a), names.heads(name)
            parameter.add_(delta if heads is None else to_halves(delta, heads))
    if found:
        raise UnsupportedError(f"{file.name} holds tensors that the base has not: {', '.join(sorted(found)[:8])}.")
