"""Load a trained run, or a base model with a fresh adapter: `frugal.load`, `frugal.load_run`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoTokenizer

from frugal.adapters.peft_model import FINGERPRINT
from frugal.adapters.trained import widen_trained_tables
from frugal.checkpoints.run_folder import RunFolder, check_depth, open_run, other_base
from frugal.config import Config, LoraSection, MemorySection, load_config
from frugal.data import choose_template
from frugal.device import Device, describe, resolve_dtype, usable
from frugal.errors import ConfigError, UnsupportedError
from frugal.exports.merge_plan import fit_adapter
from frugal.files import read_json
from frugal.inference.generate import Messages, answer, as_messages, generation_config
from frugal.memory.checkpointing import CheckpointHandle, apply_activation_checkpointing
from frugal.models.build import ModelSpec, build
from frugal.models.resolve import ResolvedModel, base_fingerprint, resolve_base
from frugal.models.tokenizer import load_tokenizer, new_token_ids, rows_needed


@dataclass(slots=True)
class LoadedRun:
    """A PEFT model with its tokenizer, ready to answer."""

    model: Any
    """`peft.PeftModel`; `model.generate` of transformers works on it."""
    tokenizer: Any
    device: Device
    system_prompt: str | None = None
    generation: dict[str, Any] = field(default_factory=dict)
    """Content of the run's generation_config.json."""
    warnings: list[str] = field(default_factory=list)
    clock: datetime | None = None
    """The time that the run's rows hold where its chat template prints one; questions hold the same."""
    checkpointing: CheckpointHandle | None = None
    """With ``for_training``: the policy on the decoder layers; ``close()`` takes it off."""

    def __iter__(self) -> Iterator[Any]:
        """So that ``model, tokenizer = frugal.load(...)`` works."""
        return iter((self.model, self.tokenizer))

    def answer(
        self,
        prompt: str | Messages,
        *,
        max_new_tokens: int = 256,
        temperature: float = 0.0,
        write: Callable[[str], None] | None = None,
    ) -> str:
        """The answer to one question, or to a conversation that ends with a question; ``write`` gets each piece."""
        messages = as_messages(prompt, self.system_prompt) if isinstance(prompt, str) else prompt
        config = self.generation_config(max_new_tokens, temperature)
        text, stopped = answer(self.model, self.tokenizer, messages, config, write, clock=self.clock)
        if stopped:
            raise KeyboardInterrupt
        return text.strip()

    def generation_config(self, max_new_tokens: int, temperature: float) -> Any:
        """Settings of one answer: the run's stop tokens, greedy at temperature 0."""
        return generation_config(
            self.model,
            self.tokenizer,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            settings=self.generation,
        )


def load_run(
    run: str | Path,
    *,
    device: str | None = None,
    base: str | Path | None = None,
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
    trainable: bool = False,
    quantize: Literal["nf4", "none"] | None = None,
    for_training: bool = False,
) -> LoadedRun:
    """Load a run the way it was trained: same base, same NF4 storage, its adapter, tokenizer and stop ids.

    Args:
        run: a run folder, a ``checkpoint-N`` folder of it, or an adapter folder of another tool.
        device: for example "cpu" or "cuda:1"; default: the best one here.
        base: the base model; wins over what the run stored.
        allow_other_base: do not warn when the base's weights are not those the run was trained on.
        trust_remote_code: run code that comes with the base; never taken over from the run's configuration.
        trainable: leave the adapter's weights trainable; otherwise everything is frozen, and a trainer changes nothing.
        quantize: how the base is kept, for an adapter that does not say what it was trained on; default: in 16 bits.
        for_training: as `load` says; implies ``trainable``.

    Raises:
        CheckpointError: no adapter there, or its keys or shapes do not fit the base.
        UnsupportedError: ``quantize`` is not what the adapter was trained on.
    """
    where = _device(device)
    opened = open_run(run)
    kept = _kept(opened, quantize)
    source = opened.base_source(base, trust_remote_code=trust_remote_code)
    check_depth(opened, source)
    fit_adapter(source.path, opened.adapter, trust_remote_code=trust_remote_code)  # before any weight is read
    warnings = _warnings(opened, source, allow_other_base, trust_remote_code)
    tokenizer = _tokenizer(opened, source, trust_remote_code)
    asked = opened.config.model.dtype if opened.config is not None else "auto"
    spec = ModelSpec(
        source=source,
        quantize=kept,
        double_quant=opened.double_quant,
        quantize_experts=opened.recorded is None or opened.quantized_experts,
        dtype=resolve_dtype(asked, where).value,
        device=where.torch_device,
        vocab_size=rows_needed(tokenizer, source.config()),
        adapter=opened.adapter,
        trainable=trainable or for_training,
        attention=None,
        fused=for_training,
        split_head=False,
    )
    model = _for_others(build(spec).model)
    if not spec.trainable:
        model.eval()
    system = opened.config.data.system_prompt if opened.config is not None else None
    loaded = LoadedRun(model, tokenizer, where, system, _generation(opened), warnings, _clock(opened))
    return _for_training(loaded, opened.config) if for_training else loaded


def _for_others(model: Any) -> Any:
    """``model``, ready for adapters that others put on its base: rows of a table of 16 bits may be trained."""
    model.get_base_model().register_forward_pre_hook(widen_trained_tables)
    return model


def _for_training(loaded: LoadedRun, config: Config | None) -> LoadedRun:
    """The model with its layers checkpointed as the configuration says (auto: recomputed)."""
    memory = config.memory if config is not None else MemorySection()
    scratch = memory.scratch_dir if memory.checkpoint == "disk" else None
    loaded.checkpointing = apply_activation_checkpointing(loaded.model, memory.checkpoint, scratch_dir=scratch)
    return loaded


def _kept(run: RunFolder, asked: Literal["nf4", "none"] | None) -> Literal["nf4", "none"]:
    """How to keep the base: as the adapter's run did; ``asked`` decides only where that is not known."""
    if asked not in (None, "nf4", "none"):
        raise ConfigError(f"quantize={asked!r}: expected nf4 or none.")
    recorded: Literal["nf4", "none"] | None = None if run.recorded is None else "nf4" if run.quantized else "none"
    if asked is None or recorded in (None, asked):
        return asked or recorded or "none"
    raise UnsupportedError(
        f"{run.adapter} was trained on a base with quantize={recorded!r}, and over another one its answers would be "
        f"others than it learned. Leave quantize={asked!r} out, or merge it: frugal merge {run.root} --out DIR."
    )


def load_bare(
    base: str, *, quantize: Literal["nf4", "none"] = "nf4", device: str | None = None, trust_remote_code: bool = False
) -> LoadedRun:
    """A base model alone, without an adapter, to talk to: fetch name, folder or hub id."""
    where = _device(device)
    source = resolve_base(base, None, trust_remote_code=trust_remote_code)
    tokenizer = load_tokenizer(source, trust_remote_code=trust_remote_code)
    spec = ModelSpec(
        source=source,
        quantize=quantize,
        dtype=resolve_dtype("auto", where).value,
        device=where.torch_device,
        vocab_size=rows_needed(tokenizer, source.config()),
        attention=None,
        fused=False,
        split_head=False,
    )
    return LoadedRun(build(spec).model.eval(), tokenizer, where)


def _device(asked: str | None) -> Device:
    """The device asked for, else the best one here."""
    if asked is None:
        return usable()
    device = torch.device(asked)
    if device.type != "cpu" and (device.type != "cuda" or not torch.cuda.is_available()):
        raise UnsupportedError(f"device {asked!r} is not here; allowed: cpu, and cuda:N where torch sees a GPU.")
    return describe(device)


def _warnings(run: RunFolder, source: ResolvedModel, allow_other_base: bool, trust_remote_code: bool) -> list[str]:
    found = []
    sentence = other_base(run, source)
    if sentence is not None and not allow_other_base:
        found.append(f"{sentence} Answers may be worthless. --allow-other-base silences this.")
    if run.config is not None and run.config.model.trust_remote_code and not trust_remote_code:
        found.append("The run was trained with trust_remote_code; it is off here unless you pass it again.")
    for line in found:
        print(f"warning: {line}", file=sys.stderr)
    return found


def _tokenizer(run: RunFolder, source: ResolvedModel, trust_remote_code: bool) -> Any:
    if run.tokenizer_folder is not None:
        return AutoTokenizer.from_pretrained(str(run.tokenizer_folder), trust_remote_code=trust_remote_code)
    if run.config is None:
        return load_tokenizer(source, trust_remote_code=trust_remote_code)
    return _prepared_tokenizer(run.config, source, trust_remote_code)


def _prepared_tokenizer(config: Config, source: ResolvedModel, trust_remote_code: bool) -> Any:
    """The base's tokenizer with the added tokens and the template of a configuration."""
    tokenizer = load_tokenizer(source, add_tokens=config.model.add_tokens, trust_remote_code=trust_remote_code)
    if config.data.chat_template is not None:
        tokenizer.chat_template = choose_template(config.data.chat_template, tokenizer).source
    return tokenizer


def _clock(run: RunFolder) -> datetime | None:
    stored = run.manifest.get("data")
    clock = stored.get("clock") if isinstance(stored, dict) else None
    return datetime.fromisoformat(clock) if isinstance(clock, str) else None


def _generation(run: RunFolder) -> dict[str, Any]:
    for folder in (run.adapter, run.root):
        if (folder / "generation_config.json").is_file():
            return dict(read_json(folder / "generation_config.json"))
    return {}


def load(
    what: str | Path | Mapping[str, Any] | Config,
    *,
    lora: Mapping[str, Any] | None = None,
    quantize: Literal["nf4", "none"] | None = None,
    device: str | None = None,
    for_training: bool = False,
    **options: Any,
) -> LoadedRun:
    """A PEFT model and its tokenizer, for notebooks, `transformers.Trainer` and TRL: ``model, tokenizer = load(...)``.

    Args:
        what: a run or adapter folder (its trained adapter), a configuration (Config, dict, or path of a YAML file), or
            a base model (fetch name, folder, hub id); the latter two with a fresh adapter that changes nothing yet.
        lora: fields of the configuration's ``lora`` section, for a base model.
        quantize: "nf4" (the default for a base model) or "none"; for an adapter of another tool as `load_run` says.
        for_training: for a trainer of others (`transformers.Trainer`, TRL): modules proven equal are replaced by ours,
            and decoder layers are checkpointed as `memory.checkpoint` of the configuration says, else recomputed.
            Give the trainer `gradient_checkpointing=False`: it would checkpoint them again.
        options: as `load_run` takes them, for a run or adapter folder.
    """
    if isinstance(what, (str, Path)) and any(
        (Path(what).expanduser() / name).is_file() for name in ("adapter_config.json", "config.yaml")
    ):
        if lora is not None:
            raise ConfigError(f"load({str(what)!r}, lora=...): the adapter there has its own settings. Leave lora out.")
        return load_run(what, device=device, quantize=quantize, for_training=for_training, **options)
    if options:
        raise TypeError(f"load() takes {', '.join(options)} for runs only")
    config: Config
    if isinstance(what, (Mapping, Config)) or Path(what).suffix in (".yaml", ".yml"):
        if lora is not None or quantize is not None:
            raise ConfigError("load(CONFIG, ...): lora and quantize are in the configuration. Change them there.")
        config = load_config(what)
    else:
        model = {"base": str(what), "quantize": quantize or "nf4"}
        config = load_config({"model": model, "lora": dict(lora or {}), "data": {"train": "-"}, "output": {"dir": "-"}})
    return _load_fresh(config, config.lora, device, for_training)


def _load_fresh(config: Config, lora: LoraSection, device: str | None, for_training: bool) -> LoadedRun:
    where = _device(device)
    settings = config.model
    source = resolve_base(settings.base, settings.revision, trust_remote_code=settings.trust_remote_code)
    tokenizer = _prepared_tokenizer(config, source, settings.trust_remote_code)
    spec = ModelSpec(
        source=source,
        quantize=settings.quantize,
        double_quant=settings.bnb_4bit_use_double_quant,
        dtype=resolve_dtype(settings.dtype, where).value,
        device=where.torch_device,
        vocab_size=rows_needed(tokenizer, source.config()),
        lora=lora,
        seed=config.train.seed,
        new_token_ids=new_token_ids(tokenizer, settings.add_tokens),
        attention=None,
        fused=for_training,
        split_head=False,
    )
    model = _for_others(build(spec).model)
    model.base_record = {**model.base_record, FINGERPRINT: base_fingerprint(source.path)}
    loaded = LoadedRun(model, tokenizer, where, config.data.system_prompt)
    return _for_training(loaded, config) if for_training else loaded
