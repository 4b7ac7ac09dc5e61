"""Hops of a run that take a few lines each: base, tokenizer, rows, model with adapter; and what failures leave."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from frugal.adapters.targets import resolve_targets
from frugal.checkpoints.rotation import check_space, checkpoint_bytes, kept_at_once
from frugal.checkpoints.run_folder import experts_were_encoded, open_run
from frugal.config import Config
from frugal.data import PreparedData, build
from frugal.decision import Decision
from frugal.device import Device
from frugal.distributed import group as ranks
from frugal.errors import CheckpointError
from frugal.memory.space import is_of_host
from frugal.models.build import BuiltModel, ModelSpec, OnLayer
from frugal.models.build import build as build_model
from frugal.models.resolve import ResolvedModel, resolve_base
from frugal.models.skeleton import build_meta, expert_kinds
from frugal.models.tokenizer import load_tokenizer, new_token_ids, rows_needed
from frugal.training.schedule import TrainPlan
from frugal.units import gib


def open_base(config: Config) -> ResolvedModel:
    """Find the base model, and the layers that the adapter goes on; no weight is read."""
    settings = config.model
    base = resolve_base(settings.base, settings.revision, trust_remote_code=settings.trust_remote_code)
    # now, from names alone: a pattern that matches nothing is found before rows are prepared and weights loaded
    resolve_targets(build_meta(base.config(), trust_remote_code=settings.trust_remote_code), config.lora)
    return base


def open_tokenizer(config: Config, base: ResolvedModel) -> Any:
    """The base's tokenizer with the configuration's added tokens."""
    settings = config.model
    return load_tokenizer(base, add_tokens=settings.add_tokens, trust_remote_code=settings.trust_remote_code)


def prepare_data(config: Config, tokenizer: Any, base: ResolvedModel, *, clock: datetime | None = None) -> PreparedData:
    """Rows of this run; with several processes rank 0 goes first and fills the cache for the others.

    The template that the rows were rendered with becomes the tokenizer's own: it is saved with it, and answers with it.
    ``clock`` is the time that it prints, the same for the whole run.
    """
    mine: list[PreparedData] = []

    def prepare() -> None:
        table = rows_needed(tokenizer, base.config())
        mine.append(
            build(
                config.data,
                tokenizer,
                seed=config.train.seed,
                vocab_size=table,
                clock=clock,
                objective=config.objective.name,
            )
        )

    ranks.on_first(prepare)
    if not mine:
        prepare()
    ranks.meet()  # without a cache, or on another host, everyone did the work
    if mine[0].template_report.template:
        tokenizer.chat_template = mine[0].chat_template
    return mine[0]


def load_model(
    config: Config,
    base: ResolvedModel,
    tokenizer: Any,
    device: Device,
    dtype: Decision[torch.dtype],
    take_layer: OnLayer | None = None,
) -> BuiltModel:
    """Load the base as configured, put a fresh adapter on it, and replace what is proven equal by fused modules.

    ``take_layer`` (a strategy that shards the base) is given each decoder layer before the next one is read.
    """
    spec = model_spec(config, base, tokenizer, device, dtype)
    return build_model(spec, "files" if take_layer is None else "layerwise", take_layer)


def model_spec(
    config: Config, base: ResolvedModel, tokenizer: Any, device: Device, dtype: Decision[torch.dtype]
) -> ModelSpec:
    """What a configuration says of the model that is trained."""
    return ModelSpec(
        source=base,
        quantize=config.model.quantize,
        double_quant=config.model.bnb_4bit_use_double_quant,
        dtype=dtype.value,
        device=device.torch_device,
        vocab_size=rows_needed(tokenizer, base.config()),
        embedding=config.memory.embedding,
        lora=config.lora,
        seed=config.train.seed,
        new_token_ids=new_token_ids(tokenizer, config.model.add_tokens),
        attention=config.memory.attention,
        fused=config.memory.fused,
        mlp_tile_tokens=config.memory.mlp_chunk_tokens,
    )


def check_experts(config: Config, base: ResolvedModel, checkpoint: Path) -> None:
    """Raise CheckpointError when a checkpoint was trained over stacks of experts that were not in NF4, and now are."""
    settings = base.config().get_text_config().to_dict()
    if config.model.quantize != "nf4" or not any("experts" in key for key in settings):
        return
    if experts_were_encoded(open_run(checkpoint).adapter):
        return
    if expert_kinds(build_meta(base.config(), trust_remote_code=base.trust_remote_code))[0]:
        raise CheckpointError(
            f"{checkpoint} was trained by a frugal that kept experts in 16 bits; this one keeps them in 4 bits, so the "
            "run would go on over another base. Finish it with that version, or start a new run. chat, merge, export "
            "and verify keep the experts as they were."
        )


def check_disk(config: Config, run_dir: Path, plan: TrainPlan, parameters: dict[str, nn.Parameter]) -> None:
    """Raise CheckpointError when this run's checkpoints will not fit on the disk."""
    saves = -(-plan.total_steps // (config.output.save_steps or plan.steps_per_epoch))
    kept = kept_at_once(config.output.save_total_limit, config.output.keep_best, saves)
    check_space(run_dir, one_bytes=checkpoint_bytes(parameters, config.train.optim), kept=kept)


def out_of_memory(error: BaseException, held_bytes: int) -> str:
    """What to tell after an out-of-memory, with what older objects of this process held before the run began."""
    reason = str(error).strip().split("\n", 1)[0].split(". ", 1)[0] or type(error).__name__
    older = ""
    if held_bytes > 0:
        older = f" {gib(held_bytes)} were in use in this process before the run began: delete older models first."
    whose = "host" if is_of_host(error) else "device"
    return (
        f"out of {whose} memory: {reason}.{older} Ways out: memory.checkpoint: offload, a smaller "
        "train.per_device_train_batch_size (with more gradient_accumulation_steps), a smaller data.max_length."
    )
