"""Model cards: README.md with the front matter that PEFT and the hub read, the data, the settings and the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from frugal.assets import is_known, weights_note
from frugal.checkpoints.run_folder import RunFolder
from frugal.config import Config, LoraSection
from frugal.files import read_json
from frugal.hub import public_base
from frugal.models.resolve import ResolvedModel


def adapter_card(
    config: Config,
    *,
    base_folder: Path | None = None,
    account: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
    samples: Sequence[Mapping[str, str]] = (),
    versions: Mapping[str, str] | None = None,
) -> str:
    """README.md of an adapter.

    Args:
        base_folder: folder of the base model, read for its licence.
        account: numbers of the data account (rows, tokens, dropped).
        result: numbers of the end of the run (train_loss, eval_loss_before, eval_loss, steps).
        samples: entries with ``prompt``, ``before`` and ``after``.
    """
    name = Path(config.output.dir).name or "adapter"
    base = _public_name(config.model.base)
    hub_id = _public_name(public_base(config.model.base if base_folder is None else str(base_folder)))
    method = "QLoRA (NF4)" if config.model.quantize == "nf4" else "LoRA"
    lines = [
        _front_matter(hub_id, base_folder, library="peft", tags=["frugal", "lora"]),
        f"# {name}",
        "",
        f"A {method} adapter for `{base}`{weights_note(config.model.base)}, trained with frugal.",
        "",
        *_use(config),
        "",
        "## Data",
        "",
        *(f"- `{_public_name(source.path)}` (weight {source.weight:g})" for source in config.data.train),
        "",
        *_table(account, ("account", "")),
        "## Settings",
        "",
        *_table(_settings(config), ("setting", "value")),
    ]
    if result:
        lines += ["## Results", "", *_table(result, ("measure", "value"))]
    if samples:
        lines += ["## Samples", ""]
        for sample in samples:
            lines += [f"**{_quote(sample['prompt'])}**", "", f"- before: {_quote(sample.get('before', ''))}"]
            lines += [f"- after: {_quote(sample.get('after', ''))}", ""]
    if versions:
        shown = ("frugal", "torch", "transformers", "peft", "bitsandbytes", "python")
        lines += ["## Versions", "", ", ".join(f"{key} {versions[key]}" for key in shown if key in versions), ""]
    return "\n".join(lines).rstrip() + "\n"


def _use(config: Config) -> list[str]:
    """How to load the adapter with stock PEFT: lines that run as they are once both folders are named."""
    model = config.model
    base, imports = f'"{_public_name(model.base)}"', []
    if is_known(model.base):
        base, imports = f'fetch("{model.base}")', ["from frugal import fetch"]
    elif Path(model.base).expanduser().is_dir():
        base = f'"path/of/{_public_name(model.base)}"'
    lines = [
        "```python",
        *imports,
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'folder = "path/of/this/folder"',
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        f"base = AutoModelForCausalLM.from_pretrained({base})",
        "model = PeftModel.from_pretrained(base, folder)",
        "```",
        "",
        "Or `frugal chat path/of/this/folder`. Stop ids are in `generation_config.json`.",
    ]
    if model.quantize == "nf4":
        double = ", bnb_4bit_use_double_quant=True" if model.bnb_4bit_use_double_quant else ""
        lines += [
            "",
            "It was trained over the base in NF4, which `frugal chat` uses. The lines above put it on unquantised "
            "weights, where answers differ; for the weights it was trained over pass "
            f'`quantization_config=BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4"{double})`.',
        ]
    return lines


def merged_card(run: RunFolder, source: ResolvedModel, report: Sequence[str]) -> str:
    """README.md of a merged model: what it came from and what the merge measured."""
    base = _public_name(source.name)
    lines = [
        _front_matter(
            _public_name(public_base(str(source.path))), source.path, library="transformers", tags=["frugal", "merged"]
        ),
        f"# {base}, fine-tuned and merged",
        "",
        f"`{base}`{weights_note(source.name)} with the adapter of the frugal run `{run.root.name}` merged in.",
        "It loads with stock transformers. Do not quantise it back to 4 bits expecting the same answers: rounding to 4 "
        "bits can take the update away; use the adapter on the 4-bit base instead.",
        "",
        "## Merge",
        "",
        *(f"- {without_folders(line, run, source)}" for line in report if not line.startswith("merged ")),
        "",
    ]
    samples = run.root / "samples.json"
    if run.config is not None:
        lines += ["## Settings of the run", "", *_table(_settings(run.config), ("setting", "value"))]
    if samples.is_file():
        lines += ["## Samples", ""]
        for sample in _samples(read_json(samples)):
            lines += [f"- **{_quote(sample.get('prompt', ''))}** {_quote(sample.get('after', ''))}"]
    return "\n".join(lines).rstrip() + "\n"


def without_folders(text: str, run: RunFolder, source: ResolvedModel) -> str:
    """``text`` with the folders of this machine reduced to their last part, so that it can be published."""
    for folder in (str(source.path), str(run.adapter), str(run.root), source.name):
        text = text.replace(folder, _public_name(folder))
    return text


def _samples(content: Any) -> list[dict[str, str]]:
    rows = content.get("samples", []) if isinstance(content, dict) else content
    return [row for row in rows if isinstance(row, dict)]


def _front_matter(base: str, folder: Path | None, *, library: str, tags: list[str]) -> str:
    relation = "adapter" if library == "peft" else "finetune"
    fields: dict[str, Any] = {"base_model": base, "library_name": library, "pipeline_tag": "text-generation"}
    fields["base_model_relation"] = relation
    fields["tags"] = [*tags, f"base_model:{relation}:{base}"]
    if licence := _licence(folder):
        fields["license"] = licence
    return "---\n" + yaml.safe_dump(fields, sort_keys=False, allow_unicode=True) + "---\n"


def _licence(folder: Path | None) -> str | None:
    """The base's licence: from the front matter of its own card, or what `frugal fetch` noted; None when unknown."""
    if folder is None:
        return None
    source, card = folder / "source.json", folder / "README.md"
    if source.is_file() and (licence := read_json(source).get("licence")):
        return str(licence).lower()
    if card.is_file():
        parts = card.read_text(encoding="utf-8", errors="replace").split("---\n")
        if len(parts) >= 3 and not parts[0].strip():
            try:
                front = yaml.safe_load(parts[1])
            except yaml.YAMLError:
                return None  # a card that the hub would refuse too; the licence is then unknown
            if isinstance(front, dict) and isinstance(front.get("license"), str):
                return str(front["license"])
    return None


def _public_name(path: str) -> str:
    """A name that can be published: a folder of this machine is reduced to its last part."""
    candidate = Path(path)
    return candidate.name if candidate.is_absolute() or path.startswith((".", "~")) else path


def _narrowed(lora: LoraSection) -> dict[str, str]:
    """What takes layers of target_modules away, where something does."""
    out = lora.exclude_modules
    found = {
        "exclude_modules": out if isinstance(out, str) else ", ".join(out),
        "layers_to_transform": ", ".join(str(number) for number in lora.layers_to_transform),
    }
    return {key: text for key, text in found.items() if text}


def _settings(config: Config) -> dict[str, Any]:
    train, lora, data = config.train, config.lora, config.data
    targets = lora.target_modules
    return {
        "quantize": config.model.quantize,
        "r / lora_alpha": f"{lora.r} / {lora.lora_alpha:g}",
        "target_modules": targets if isinstance(targets, str) else ", ".join(targets),
        **_narrowed(lora),
        "method": ", ".join(n for n, on in (("rsLoRA", lora.use_rslora), ("DoRA", lora.use_dora)) if on) or "LoRA",
        "learning_rate": f"{train.learning_rate:g} ({train.lr_scheduler_type})",
        "batch": f"{train.per_device_train_batch_size} x {train.gradient_accumulation_steps}",
        "length": f"{train.max_steps} steps" if train.max_steps else f"{train.num_train_epochs:g} epochs",
        "max_length": f"{data.max_length}{', packed' if data.packing else ''}",
        "train_on": data.train_on,
        "seed": train.seed,
    }


def _table(values: Mapping[str, Any] | None, head: tuple[str, str]) -> list[str]:
    rows = [(key, value) for key, value in (values or {}).items() if isinstance(value, str | int | float)]
    if not rows:
        return []
    shown = [(key, f"{value:.6g}" if isinstance(value, float) else str(value)) for key, value in rows]
    return [f"| {head[0]} | {head[1]} |", "|---|---|", *(f"| {key} | {_quote(text)} |" for key, text in shown), ""]


def _quote(text: str) -> str:
    """One line that Markdown shows as it is: no table cells, no HTML, no headings from a model's answer."""
    flat = " ".join(text.split())
    return flat.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").replace("`", "\\`").replace("*", "\\*")
