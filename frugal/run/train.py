"""One training run, top to bottom, one line a hop."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from frugal.checkpoints.lock import run_lock
from frugal.checkpoints.read import load_checkpoint, put_adapter, restore
from frugal.checkpoints.resume import check_plan, data_fingerprint, run_identity, starting_point
from frugal.checkpoints.write import CheckpointWriter, side_files
from frugal.config import Config, load_config
from frugal.console import say
from frugal.device import resolve_dtype
from frugal.distributed import group as ranks
from frugal.distributed.launch import check_group, read_launch, unused_gpus
from frugal.distributed.sanity_checks import preflight
from frugal.errors import MemoryBudgetError
from frugal.exports.adapter import save_final
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.models.tokenizer import rows_needed, zero_embedding_rows
from frugal.objectives import LossModule, make_objective
from frugal.ops.choice import check_attention
from frugal.run.memory import forecast, limit_allocator, make_planner, start_fallback, warm_up
from frugal.run.record import RunRecord
from frugal.run.sharing import asked_engine, layer_taker, share
from frugal.run.steps import (
    check_disk,
    forget,
    load_model,
    open_base,
    open_tokenizer,
    out_of_memory,
    prepare_data,
    silent,
)
from frugal.run.summary import TrainResult, summarise
from frugal.run.trackers import check_trackers
from frugal.training.device import device_of, make_accelerator
from frugal.training.loop import train_loop
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import Hooks, LoopState, TrainSetup, seed_step_noise
from frugal.training.signals import StopRequest
from frugal.training.step import optimizer_in_backward

Source = Config | Mapping[str, object] | str | Path


def train(config: Source, *, resume: bool | str | Path | None = None) -> TrainResult:
    """Fine-tune an adapter as ``config`` says; returns what was reached and where it lies.

    ``resume``: None starts fresh (and refuses a folder that holds a run), True or "auto" goes on from the newest
    complete checkpoint of `output.dir`, a path from that one.

    After a failure nothing stays in memory, also while a notebook keeps the traceback: the run's frames are cleared, so
    a debugger finds no local variables there.

    Raises:
        FrugalError: whatever the user can cause, with one message. Interrupted (exit code 130 or 143) after Ctrl-C or
            SIGTERM, with a checkpoint saved.
    """
    held_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    try:
        with ranks.guarded():
            return _train(load_config(config), resume)
    except torch.OutOfMemoryError as error:
        forget(error)
        raise MemoryBudgetError(out_of_memory(error, held_bytes)) from None
    except BaseException as error:
        forget(error)
        raise
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _train(config: Config, resume: bool | str | Path | None) -> TrainResult:
    run_dir, plain, settings = Path(config.output.dir), config.model_dump(mode="json"), config.train
    check_trackers(list(settings.report_to))
    launch = read_launch()
    asked_engine(config, launch)  # here for its refusals
    accelerator = make_accelerator(run_dir, list(settings.report_to), timeout_seconds=config.distributed.ddp_timeout)
    device = device_of(accelerator)
    gpus = torch.cuda.device_count() if device.kind == "cuda" else 0
    check_group(launch, world_size=ranks.world_size(), gpus=gpus)
    dtype = resolve_dtype(config.model.dtype, device)
    check_attention(device.torch_device, dtype.compute, config.memory.attention)
    in_backward = optimizer_in_backward(
        config.memory.optimizer_in_backward,
        gradient_accumulation_steps=settings.gradient_accumulation_steps,
        max_grad_norm=settings.max_grad_norm,
        loss_scaling=dtype.loss_scaling,
        world_size=ranks.world_size(),
    )
    tell = say if ranks.rank() == 0 else silent
    for note in filter(None, [*launch.notes, unused_gpus(launch, gpus)]):
        tell(note)
    start = ranks.on_first(lambda: starting_point(run_dir, plain, resume, tell))
    with ExitStack() as cleanup:
        cleanup.callback(accelerator.free_memory)  # it keeps a list of models
        cleanup.enter_context(run_lock(run_dir, tell))
        checkpoint = None if start is None else load_checkpoint(start, hashes=False)  # compared when it was chosen

        base = open_base(config)
        tokenizer = open_tokenizer(config, base)
        data = prepare_data(config, tokenizer, base)
        plan = make_plan(settings, rows=len(data.train), world_size=ranks.world_size())
        rows_hash = data_fingerprint(data.train)
        if checkpoint is not None:
            check_plan(checkpoint.folder, checkpoint.state, plan.as_dict(), rows_hash)
        record = cleanup.enter_context(RunRecord(config, run_dir, plan, base, data))
        record.computes_on(device, dtype, ranks.world_size())
        record.manifest.choose("optimizer step", "inside backward" if in_backward.value else "after backward",
                               why=in_backward.reason)  # fmt: skip
        grouped = settings.group_by_length and not config.data.packing
        order = StepOrder(data.train.lengths, plan, seed=settings.seed, group_by_length=grouped)
        vocab_size = rows_needed(tokenizer, base.config())
        planner = make_planner(config, base.config(), data, plan, order, device, dtype, vocab_size)
        shared = share(config, launch, planner, accelerator.device)
        strategy = shared.strategy
        cleanup.callback(strategy.close)
        record.shared_by(strategy, shared.reason)
        foreseen = forecast(config, shared.planner)
        limit_allocator(config, device)

        take_layer, why_whole = layer_taker(config, base, strategy)
        if why_whole is not None:
            record.say(why_whole)
        loaded = load_model(config, base, tokenizer, device, dtype, take_layer)
        model = loaded.model
        strategy.compare_start(model)
        ranks.on_first(lambda: check_disk(config, run_dir, plan, trainable(model)))
        untrained = zero_embedding_rows(model)

        objective = make_objective(
            pad_id=tokenizer.pad_token_id or 0,
            flat=loaded.attention.value == "frugal" or config.data.packing,
            label_smoothing=settings.label_smoothing,
        )
        module = LossModule(model, objective, chunk_tokens=config.memory.loss_chunk_tokens, head=loaded.head)
        wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), settings))
        checked = preflight(strategy, wrapped, module, optimizer, max_grad_norm=settings.max_grad_norm)
        record.manifest.add("parameter bytes", {"this process": checked.local, "all of it": checked.whole})
        seed_step_noise(settings.seed, ranks.rank())
        state = LoopState()
        if checkpoint is not None:
            state = restore(checkpoint, strategy, model, optimizer, seed=settings.seed, say=tell)
        record.before(wrapped, model, tokenizer, state.step, untrained)
        ranks.meet()  # rank 0 answered prompts and read the base for its fingerprint

        scratch_dir = config.memory.scratch_dir or str(run_dir)
        handle = apply_activation_checkpointing(model, foreseen.policy, scratch_dir=scratch_dir)
        record.implementations(loaded, module.head)
        writer = CheckpointWriter(
            run_dir=run_dir,
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            output=config.output,
            identity=run_identity(plain, plan.as_dict(), rows_hash),
            side_files=side_files(tokenizer, base=base.path, config=config),
            base_fingerprint=record.base_fingerprint,
        )
        memory = MemorySettings(
            module, settings.per_device_train_batch_size, settings.per_device_eval_batch_size, handle, scratch_dir
        )
        cleanup.callback(memory.close)
        setup = TrainSetup(
            module=module,
            wrapped=wrapped,
            strategy=strategy,
            optimizer=optimizer,
            plan=plan,
            order=order,
            train=settings,
            rows=data.train,
            eval_rows=data.eval if data.eval is not None and len(data.eval) else None,
            device=accelerator.device,
            lr_lambda=lr_lambda(settings, plan),
            memory=memory,
            save_steps=config.output.save_steps,
            keep_best=config.output.keep_best,
            loss_scaling=dtype.loss_scaling,
            step_in_backward=in_backward.value,
        )
        fallback = start_fallback(memory, foreseen, record.say)
        if state.step < plan.total_steps:
            rehearse = partial(writer.rehearse, state)
            record.memory(foreseen, warm_up(config, setup, fallback, first_step=state.step, save=rehearse), fallback)
        record.begin(accelerator, state.step)
        with StopRequest(record.say) as stop, ranks.guarded():
            state = train_loop(setup, Hooks(record.step, writer.save, stop, fallback.next), state)

        kept_best = config.output.keep_best and state.best_step is not None
        if kept_best:
            put_adapter(strategy, model, run_dir / f"checkpoint-{state.best_step}")
        result = summarise(run_dir, state, plan, objective, kept_best=kept_best, device=device.torch_device)
        card = record.after(wrapped, model, tokenizer, result)
        adapter, known = strategy.full_adapter(model), record.base_fingerprint
        ranks.on_first(
            lambda: save_final(run_dir, model, adapter, tokenizer, base=base.path, card=card, base_fingerprint=known)
        )
        record.finished(result)
    return result
