"""One training run, top to bottom, one line a hop."""

from __future__ import annotations

import gc
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch

from frugal.checkpoints.lock import run_lock
from frugal.checkpoints.read import load_checkpoint, put_adapter, restore
from frugal.checkpoints.resume import check_plan, data_fingerprint, finished, run_clock, run_identity, starting_point
from frugal.checkpoints.write import CheckpointWriter, side_files
from frugal.config import Config, load_config
from frugal.device import needs_loss_scaling
from frugal.distributed import group
from frugal.distributed.sanity_checks import preflight
from frugal.errors import MemoryBudgetError, ProcessLost
from frugal.exports.adapter import save_final
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.memory.device_memory import limited
from frugal.memory.space import clear_frames, is_out_of_memory
from frugal.models.attention import join_rows
from frugal.models.resolve import base_fingerprint
from frugal.models.tokenizer import zero_embedding_rows
from frugal.objectives import LossModule, configured_objective
from frugal.objectives.pairs import precompute_reference
from frugal.ops.registry import recording
from frugal.run.events import RunEvents
from frugal.run.library_log import FILE_NAME, LibraryLog
from frugal.run.memory import start_fallback, warm_up
from frugal.run.samples import Samples, asked_otherwise
from frugal.run.setup import open_machine, resolve
from frugal.run.sharing import layer_taker
from frugal.run.steps import (
    check_disk,
    check_experts,
    load_model,
    open_base,
    open_tokenizer,
    out_of_memory,
    prepare_data,
)
from frugal.run.summary import TrainResult, result_of_finished, summarise
from frugal.run.trackers import check_trackers
from frugal.training.evaluate import to_device
from frugal.training.loop import peak_memory_bytes, train_loop
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.overflow import refuse_overflow
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import Hooks, LoopState, TrainSetup, seed_step_noise
from frugal.training.signals import StopAtOnce, StopRequest

Source = Config | Mapping[str, object] | str | Path


def train(config: Source, *, resume: bool | str | Path | None = None) -> TrainResult:
    """Fine-tune an adapter as ``config`` says; returns what was reached and where it lies.

    ``resume``: None starts fresh (and refuses a folder that holds a run), True or "auto" goes on from the newest
    complete checkpoint of `output.dir`, a path from that one.

    After an out-of-memory nothing stays on the device, also while a notebook keeps the traceback: the run's frames are
    cleared, so a debugger finds no local variables there. Other errors keep theirs.

    Raises:
        FrugalError: whatever the user can cause, with one message. Interrupted (exit code 130 or 143) after Ctrl-C or
            SIGTERM, with a checkpoint saved.
    """
    older_bytes = torch.cuda.memory_allocated() if torch.cuda.is_initialized() else 0
    try:
        with group.guarded():
            return _train(load_config(config), resume)
    except MemoryBudgetError as error:
        clear_frames(error)
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        clear_frames(error)
        raise MemoryBudgetError(out_of_memory(error, older_bytes)) from None
    finally:
        if not isinstance(sys.exception(), ProcessLost):  # then the device may still wait for the lost process
            gc.collect()
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()


def _train(config: Config, resume: bool | str | Path | None) -> TrainResult:
    run_dir, asked, settings = Path(config.output.dir), config.model_dump(mode="json"), config.train
    check_trackers(list(settings.report_to))
    with ExitStack() as cleanup:
        libraries = cleanup.enter_context(LibraryLog())
        machine = open_machine(config)
        accelerator, device, first = machine.accelerator, machine.device, group.rank() == 0
        events = cleanup.enter_context(RunEvents(run_dir, config, first=first))
        cleanup.enter_context(StopAtOnce(events.interrupted))
        events.say(*machine.notes)
        start = group.on_first(lambda: starting_point(run_dir, asked, resume, events.say))
        ended = group.on_first(lambda: finished(run_dir, start))
        if ended is not None:
            events.say(f"{run_dir} is finished: all {ended['step']} steps are done. Nothing is left to train.")
            return result_of_finished(config, ended)
        cleanup.callback(accelerator.free_memory)  # it keeps a list of models
        cleanup.enter_context(run_lock(run_dir, events.say))
        checkpoint = None if start is None else load_checkpoint(start, hashes=False)  # compared when it was chosen

        base = open_base(config)
        tokenizer = open_tokenizer(config, base)
        clock = group.on_first(lambda: run_clock(None if checkpoint is None else checkpoint.state))
        with events.phase("data"):
            data = prepare_data(config, tokenizer, base, clock=clock)
        plan = make_plan(settings, rows=len(data.train), world_size=group.world_size())
        rows_hash = data_fingerprint(data.train)
        if checkpoint is not None:
            check_plan(checkpoint.folder, checkpoint.state, plan.as_dict(), rows_hash)
            check_experts(config, base, checkpoint.folder)
        grouped = settings.group_by_length and not config.data.packing
        order = StepOrder(data.train.lengths, plan, seed=settings.seed, group_by_length=grouped)
        events.prepared(base, data, plan)
        events.warn(*asked_otherwise(data, tokenizer, system_prompt=config.data.system_prompt, clock=clock))

        with events.phase("plan"):
            setup = resolve(config, machine, base, tokenizer, data, plan, order)
        strategy, forecast = setup.strategy, setup.forecast
        cleanup.callback(strategy.close)
        fingerprint = base_fingerprint(base.path) if first else None
        events.resolved(machine, setup, base_fingerprint=fingerprint)
        libraries.write_to(run_dir / (FILE_NAME if first else f"{group.rank()}.{FILE_NAME}"))
        events.warn(*setup.warnings)
        cleanup.enter_context(limited(device, config.memory.budget_bytes, setup.others_bytes))
        events.start_trackers(accelerator)

        ran = cleanup.enter_context(recording())
        with events.phase("load"):
            take_layer, notes = layer_taker(config, base, strategy)
            events.say(*notes)
            built = load_model(setup.config, base, tokenizer, device, machine.dtype, take_layer)
            strategy.compare_start(built.model)
        model = built.model
        group.on_first(lambda: check_disk(config, run_dir, plan, trainable(model)))
        events.warn(*data.untrained_token_warnings(tokenizer, zero_embedding_rows(model)))

        rows = join_rows(built.base, built.attention.value, packing=config.data.packing)
        events.manifest.decide(rows)
        objective = configured_objective(
            config.objective,
            label_smoothing=settings.label_smoothing,
            pad_id=tokenizer.pad_token_id or 0,
            flat=rows.value,
        )
        module = LossModule(model, objective, chunk_tokens=config.memory.loss_chunk_tokens, head=built.head)
        wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), settings))
        checked = preflight(strategy, wrapped, module, optimizer, max_grad_norm=settings.max_grad_norm)
        events.manifest.add("parameter bytes", {"this process": checked.local, "all of it": checked.whole})
        seed_step_noise(settings.seed, group.rank())
        state = LoopState()
        if checkpoint is not None:
            state = restore(checkpoint, strategy, model, optimizer, seed=settings.seed, say=events.say)
        scaled = needs_loss_scaling(machine.dtype.value)
        if scaled and state.step < plan.total_steps:
            first_row = objective.collate(data.train, order.rows_of(state.step)[:1])
            refuse_overflow(strategy, wrapped, model, to_device(first_row, accelerator.device))
        samples = Samples(
            run_dir / "samples.json",
            config.output.sample_prompts,
            max_new_tokens=config.output.sample_max_new_tokens,
            system_prompt=config.data.system_prompt,
            clock=clock,
        )
        samples.before(strategy, wrapped, model, tokenizer, resumed=state.step > 0)
        group.meet()  # rank 0 answered prompts and read the base for its fingerprint

        scratch_dir = config.memory.scratch_dir or str(run_dir)
        checkpointing = apply_activation_checkpointing(model, forecast.policy, scratch_dir=scratch_dir)
        memory = MemorySettings(
            module,
            settings.per_device_train_batch_size,
            settings.per_device_eval_batch_size,
            checkpointing,
            scratch_dir,
            0 if forecast.plan is None else forecast.plan.shape.tokens,
        )
        cleanup.callback(memory.close)
        events.built(built, module.head)
        if config.objective.precompute_reference:
            with events.phase("reference"):
                for part in data.parts.values():
                    precompute_reference(
                        module.head, part, objective, chunk_tokens=config.memory.loss_chunk_tokens,
                        batch_documents=objective.answers * settings.per_device_train_batch_size,
                        device=accelerator.device, rank=group.rank(), world_size=group.world_size(),
                    )  # fmt: skip
        writer = CheckpointWriter(
            run_dir=run_dir,
            strategy=strategy,
            model=model,
            optimizer=optimizer,
            output=config.output,
            identity=run_identity(asked, plan.as_dict(), rows_hash, clock=data.clock),
            side_files=side_files(tokenizer, base=base.path, config=config),
            base_fingerprint=fingerprint,
        )
        training = TrainSetup(
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
            loss_scaling=scaled,
            step_in_backward=machine.in_backward.value,
        )
        fallback = start_fallback(memory, forecast, events.say)
        if state.step < plan.total_steps:
            with events.phase("warm-up step"):
                save = partial(writer.rehearse, state)
                measured = warm_up(config, training, fallback, first_step=state.step, save=save)
            events.measured(forecast, measured, fallback)
            events.ran(ran.decisions())
        events.training(state.step)
        with events.phase("training"), StopRequest(events.say) as stop, group.guarded():
            state = train_loop(training, Hooks(events.step, writer.save, stop, fallback.next), state)
        events.ran(ran.decisions())  # the optimizer's too
        events.trained()

        kept_best = config.output.keep_best and state.best_step is not None
        if kept_best:
            put_adapter(strategy, model, run_dir / f"checkpoint-{state.best_step}")
        peak = peak_memory_bytes(device.torch_device)
        result = summarise(run_dir, state, plan, objective, kept_best=kept_best, peak_bytes=peak)
        samples.after(strategy, wrapped, model, tokenizer)
        with events.phase("saving"):
            card = events.card(base, data, result, samples.rows) if first else ""
            adapter = strategy.full_adapter(model)
            final = partial(save_final, run_dir, model, adapter, tokenizer)
            group.on_first(lambda: final(base=base.path, card=card, base_fingerprint=fingerprint))
        events.ran(ran.decisions())
        events.finished(result, samples.rows)
    return result
