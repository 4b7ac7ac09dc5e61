"""Find what belongs to a finished run: its adapter, configuration, manifest and base, from any of its folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from frugal.adapters.peft_model import EXPERTS, FINGERPRINT, QUANTIZE, WEIGHTS, base_record
from frugal.assets import CATALOGUE, cache_folder, is_complete
from frugal.config import Config, load_config
from frugal.errors import CheckpointError, ConfigError, ModelError
from frugal.files import read_json, run_folder
from frugal.hub import fetched_as
from frugal.manifest import FILE_NAME, Manifest
from frugal.models.resolve import ResolvedModel, base_fingerprint, resolve_base
from frugal.tensor_files import read_metadata

ADAPTER_CONFIG = "adapter_config.json"


@dataclass(frozen=True, slots=True)
class RunFolder:
    """A run, one of its checkpoints, or the folder of an adapter that another tool wrote."""

    root: Path
    """The run's folder; the adapter's own where there is no run around it."""
    adapter: Path
    """The folder that holds adapter_model.safetensors."""
    config: Config | None
    manifest: dict[str, Any]
    adapter_config: dict[str, Any]

    @property
    def recorded(self) -> str | None:
        """How the base was kept that the adapter was trained on: `none`, `nf4`, or `nf4 single` (scales not quantised).

        None for an adapter of another tool, which does not say.
        """
        if self.config is not None:
            model = self.config.model
            return base_record(model.quantize, double_quant=model.bnb_4bit_use_double_quant)[QUANTIZE]
        return read_metadata(self.adapter / WEIGHTS).get(QUANTIZE) if (self.adapter / WEIGHTS).is_file() else None

    @property
    def quantized(self) -> bool:
        """The adapter was trained on a base in NF4 (False where that is not known)."""
        return (self.recorded or "none").startswith("nf4")

    @property
    def quantized_experts(self) -> bool:
        """Its stacks of experts were in NF4 too: not in runs of frugal 0.1.0, nor in those of other tools."""
        return self.quantized and experts_were_encoded(self.adapter)

    @property
    def double_quant(self) -> bool:
        """The NF4 scales were quantised too."""
        return self.recorded != "nf4 single"

    @property
    def tokenizer_folder(self) -> Path | None:
        """The folder whose tokenizer was saved with the adapter; None when the base's own is meant."""
        for folder in (self.adapter, self.root):
            if (folder / "tokenizer_config.json").is_file():
                return folder
        return None

    def base_source(self, base: str | Path | None = None, *, trust_remote_code: bool = False) -> ResolvedModel:
        """The base model: ``base`` when given (it wins over what is stored), else the configuration's or the adapter's.

        Raises:
            ModelError: not found; CheckpointError: nothing says which base is meant.
        """
        if base is not None:
            return resolve_base(str(base), None, trust_remote_code=trust_remote_code)
        name: str | None
        if self.config is not None:
            name, revision = self.config.model.base, self.config.model.revision
        else:
            name, revision = self.adapter_config.get("base_model_name_or_path"), self.adapter_config.get("revision")
        if not name:
            raise CheckpointError(f"{self.adapter / ADAPTER_CONFIG} names no base model. Give it with --base.")
        try:
            return self._fetched(name) or resolve_base(name, revision, trust_remote_code=trust_remote_code)
        except (ModelError, ConfigError) as error:
            where = "a folder of the machine it was trained on" if Path(name).is_absolute() else "as it is named"
            raise ModelError(
                f"{self.root} was trained over {name} ({where}), which cannot be had here: {error} "
                "Give the base's folder or hub id with --base (`base=` in Python)."
            ) from error

    def _fetched(self, name: str) -> ResolvedModel | None:
        """What `frugal fetch` has here of the original that an adapter names, when its weights are the trained ones."""
        fetched = fetched_as(name)
        stored = self.manifest.get("base", {}).get("fingerprint") or _fingerprint_in(self.adapter)
        if fetched is None or not stored or not is_complete(cache_folder() / CATALOGUE[fetched].folder_name):
            return None
        found = resolve_base(fetched, None)
        return found if base_fingerprint(found.path) == stored else None


def experts_were_encoded(adapter: Path) -> bool:
    """Whether the adapter in this folder was trained over stacks of experts in NF4."""
    return (adapter / WEIGHTS).is_file() and EXPERTS in read_metadata(adapter / WEIGHTS)


def open_run(path: str | Path) -> RunFolder:
    """Open a run folder, a ``checkpoint-N`` folder or an adapter folder; an unfinished run at its last checkpoint.

    Raises:
        CheckpointError: nothing there that holds an adapter; the message says what was looked for.
    """
    folder = run_folder(path)
    root = folder.parent if _is_run(folder.parent) and not _is_run(folder) else folder
    adapter = _adapter_folder(folder)
    manifest = Manifest.read(root).content if (root / FILE_NAME).is_file() else {}
    config = load_config(root / "config.yaml") if (root / "config.yaml").is_file() else None
    if config is not None and resolved_from_auto(manifest, "model.dtype") is not None:
        # what the training device computed in need not be what this one can
        config = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "auto"})})
    return RunFolder(root, adapter, config, manifest, read_json(adapter / ADAPTER_CONFIG))


def resolved_from_auto(manifest: Mapping[str, Any], key: str) -> Any:
    """The value that a run gave a key of its configuration that was `auto`; None when it was not."""
    entry = manifest.get("decisions", {}).get(key, {})
    return entry.get("chosen") if entry.get("asked") == "auto" else None


def _is_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() and (folder / FILE_NAME).is_file()


def _adapter_folder(folder: Path) -> Path:
    checkpoints = sorted(
        (
            entry
            for entry in folder.glob("checkpoint-*")
            if entry.name.removeprefix("checkpoint-").isdigit() and not entry.is_symlink()
        ),
        key=lambda entry: int(entry.name.removeprefix("checkpoint-")),
        reverse=True,
    )
    candidates = [folder, folder / "adapter"]
    for checkpoint in checkpoints:
        candidates += [checkpoint, checkpoint / "adapter"]
    for candidate in candidates:
        if (candidate / ADAPTER_CONFIG).is_file():
            return candidate
    inside = sorted(entry.name for entry in folder.iterdir() if _is_run(entry) or (entry / ADAPTER_CONFIG).is_file())
    if inside:
        some = ", ".join(inside[:8]) + (f" and {len(inside) - 8} more" if len(inside) > 8 else "")
        raise CheckpointError(
            f"{folder} is no run, but holds these: {some}. Give one of them, for example {folder / inside[0]}."
        )
    raise CheckpointError(
        f"{folder} holds no adapter: looked for {ADAPTER_CONFIG} there and in its checkpoint-N folders. "
        "Was the run stopped before its first checkpoint?"
    )


def other_base(run: RunFolder, source: ResolvedModel) -> str | None:
    """A sentence when the base found is not the one the run was trained on (by the stored fingerprint), else None."""
    stored = run.manifest.get("base", {}).get("fingerprint") or _fingerprint_in(run.adapter)
    if not stored:
        return None
    found = base_fingerprint(source.path)
    if found == stored:
        return None
    trained_on = run.manifest.get("base", {}).get("name") or "its base"
    return (
        f"The base found at {source.path} has other weights than {trained_on}, on which {run.root} was trained "
        f"(fingerprint {found[:12]}, trained on {str(stored)[:12]})."
    )


def _fingerprint_in(adapter: Path) -> str | None:
    """The fingerprint that frugal keeps in the adapter file's own metadata."""
    file = adapter / WEIGHTS
    if not file.is_file():
        return None
    with safe_open(str(file), framework="pt") as handle:
        metadata: dict[str, str] = handle.metadata() or {}
    return metadata.get(FINGERPRINT)


def check_depth(run: RunFolder, source: ResolvedModel) -> None:
    """Refuse a base with more layers than an adapter that was trained on all layers has keys for.

    PEFT saves ``all-linear`` as the full names it found, so that the adapter of a shallower base would fit a deeper one
    without a missing key, and leave its last layers as they were.

    Raises:
        CheckpointError: layers of the base are not in the adapter.
    """
    names = run.adapter_config.get("target_modules")
    if isinstance(names, list):  # layers that PEFT would rename stand among the parameters
        names = [*names, *(run.adapter_config.get("target_parameters") or ())]
    chosen = run.config.lora.target_modules if run.config is not None else "all-linear"
    kept = [run.adapter_config.get(key) for key in ("layers_to_transform", "exclude_modules")]
    # an exclusion with a number in it may take whole layers away
    narrowed = kept[0] is not None or re.search(r"\d", str(kept[1] or ""))
    if chosen != "all-linear" or not isinstance(names, list) or narrowed:
        return
    found = {int(number) for name in names for number in re.findall(r"(?:^|\.)(\d+)\.", name)}
    text = source.config().get_text_config()
    crossed = getattr(text, "cross_attention_layers", None) or ()  # these get no adapter
    depth = getattr(text, "num_hidden_layers", 0) - len(crossed)
    if not found or found != set(range(len(found))) or depth <= len(found):
        return
    last = next(name for name in names if f".{len(found) - 1}." in f".{name}")
    missing = f".{last}".replace(f".{len(found) - 1}.", f".{len(found)}.").lstrip(".")
    raise CheckpointError(
        f"The adapter in {run.adapter} does not fit the base {source.path}: it has keys for {len(found)} layers, the "
        f"base has {depth}; missing are base_model.model.{missing}.lora_A.weight and all others of the layers "
        f"{len(found)} to {depth - 1}. Use the base it was trained on."
    )
