"""One training run, top to bottom, one line a hop; and the two that look without training: preview and evaluate."""

from __future__ import annotations

import gc
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from frugal.adapters import apply_adapters
from frugal.chat import load_run
from frugal.config import Config, SourceSection, load_config
from frugal.data import (
    PreparedData,
    PreviewData,
    build,
    choose_template,
    preview_rows,
    render_preview,
    write_preview_html,
)
from frugal.errors import ConfigError, MemoryBudgetError
from frugal.hardware import resolve_dtype
from frugal.memory.checkpoint import apply_activation_checkpointing
from frugal.models.attention import use_attention
from frugal.models.load import load_base
from frugal.models.source import BaseSource, resolve_base
from frugal.models.tokenizer import load_tokenizer, new_token_ids, rows_needed
from frugal.run_record import RunRecord
from frugal.save.checkpoint import load_checkpoint
from frugal.save.final import save_final
from frugal.save.lock import hold
from frugal.save.resume import check_plan, data_fingerprint, starting_point
from frugal.save.run_folder import open_run
from frugal.save.space import check_space, checkpoint_bytes, kept_at_once, size
from frugal.save.writer import CheckpointWriter, put_adapter, restore
from frugal.train import ranks
from frugal.train.device import device_of, make_accelerator
from frugal.train.evaluate import evaluate_rows
from frugal.train.loop import Hooks, Job, LoopState, train_loop
from frugal.train.loss import LossModule
from frugal.train.optim import build_optimizer, trainable
from frugal.train.progress import safe_console, say
from frugal.train.randomness import seed_step_noise
from frugal.train.schedule import StepOrder, TrainPlan, make_plan, rate_factor
from frugal.train.signals import StopRequest
from frugal.train.summary import TrainResult, summarise
from frugal.train.trackers import check_trackers

Source = Config | Mapping[str, Any] | str | Path


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
        return _train(load_config(config), resume)
    except torch.OutOfMemoryError as error:
        _forget(error)
        raise MemoryBudgetError(_out_of_memory(error, held_bytes)) from None
    except BaseException as error:
        _forget(error)
        raise
    finally:
        gc.collect()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()


def _train(config: Config, resume: bool | str | Path | None) -> TrainResult:
    run_dir = Path(config.output.dir)
    check_trackers(list(config.train.report_to))
    accelerator = make_accelerator(run_dir, list(config.train.report_to))
    device = device_of(accelerator)
    dtype = resolve_dtype(config.model.dtype, device)
    plain = config.model_dump(mode="json")
    tell = say if ranks.rank() == 0 else _silent
    start = ranks.on_first(lambda: starting_point(run_dir, plain, resume, tell))
    with ExitStack() as cleanup:
        cleanup.callback(accelerator.free_memory)  # it keeps a list of models
        lock = cleanup.enter_context(hold(run_dir, tell))
        checkpoint = None if start is None else load_checkpoint(start)

        source = resolve_base(
            config.model.base, config.model.revision, trust_remote_code=config.model.trust_remote_code
        )
        tokenizer = _tokenizer(config, source)
        data = _data(config, tokenizer, source)
        use_template(tokenizer, config.data.chat_template, data)
        plan = make_plan(config.train, rows=len(data.train), world_size=ranks.world_size())
        rows_hash = data_fingerprint(data.train)
        if checkpoint is not None:
            check_plan(checkpoint.folder, checkpoint.state, plan.as_dict(), rows_hash)
        record = cleanup.enter_context(RunRecord(config, run_dir, plan, source, data))
        record.computes_on(device, dtype, ranks.world_size())

        base = load_base(
            source,
            quantize=config.model.quantize,
            double_quant=config.model.bnb_4bit_use_double_quant,
            dtype=dtype.compute,
            device=device.torch_device,
            trust_remote_code=config.model.trust_remote_code,
            vocab_size=rows_needed(tokenizer, source.config()),
        )
        attention = use_attention(base.model)
        applied = apply_adapters(
            base.model,
            config.lora,
            seed=config.train.seed,
            quantize=config.model.quantize,
            new_token_ids=new_token_ids(tokenizer, config.model.add_tokens),
        )
        model, parameters = applied.model, trainable(applied.model)
        ranks.check_same(parameters)
        ranks.on_first(lambda: _space(config, run_dir, plan, checkpoint_bytes(parameters, config.train.optim)))

        optimizer = build_optimizer(parameters, config.train)
        seed_step_noise(config.train.seed, ranks.rank())
        state = LoopState()
        if checkpoint is not None:
            state = restore(
                checkpoint,
                model=model,
                optimizer=optimizer,
                device=device.torch_device,
                seed=config.train.seed,
                say=tell,
            )
        record.before(model, tokenizer, state.step)

        handle = apply_activation_checkpointing(model, config.memory.checkpoint, scratch_dir=config.memory.scratch_dir)
        cleanup.callback(handle.close)
        module = LossModule(model, chunk_tokens=config.memory.loss_chunk_tokens)
        record.implementations(attention, module.head, base.report, applied.lines())
        writer = CheckpointWriter(
            run_dir, model, optimizer, plan, plain, rows_hash, config.output, device.torch_device, lock, tell
        )
        job = Job(
            module=module,
            optimizer=optimizer,
            plan=plan,
            order=StepOrder(data.train.lengths, plan, seed=config.train.seed, group_by_length=_grouped(config)),
            train=config.train,
            rows=data.train,
            eval_rows=data.eval if data.eval is not None and len(data.eval) else None,
            pad_id=tokenizer.pad_token_id or 0,
            flat=attention.name == "frugal" or config.data.packing,
            accelerator=accelerator,
            rate_factor=rate_factor(config.train, plan),
            save_steps=config.output.save_steps,
            keep_best=config.output.keep_best,
            loss_scaling=dtype.loss_scaling,
        )
        record.begin(accelerator, state.step)
        with StopRequest(record.say) as stop:
            state = train_loop(job, Hooks(record.step, writer.save, stop), state)

        kept_best = config.output.keep_best and state.best_step is not None
        if kept_best:
            put_adapter(model, run_dir / f"checkpoint-{state.best_step}")
        result = summarise(run_dir, state, plan, kept_best=kept_best, device=device.torch_device)
        card = record.after(model, tokenizer, result)
        ranks.on_first(
            lambda: save_final(
                run_dir, model, tokenizer, base=source.path, card=card, base_fingerprint=record.base_fingerprint
            )
        )
        record.finished(result)
    return result


def preview(config: Source, *, html: str | Path | None = None, rows: int = 5) -> PreviewData:
    """Show the first ``rows`` rows as they will be trained: trained tokens coloured, counts, lengths, answers' ends.

    Printed, or written to ``html``. Loads the tokenizer, no weights.
    """
    config = load_config(config)
    source = _source(config)
    tokenizer = _tokenizer(config, source)
    table = rows_needed(tokenizer, source.config())
    shown = preview_rows(config.data, tokenizer, seed=config.train.seed, vocab_size=table, rows=rows)
    if html is not None:
        write_preview_html(shown, Path(html))
    else:
        safe_console().print(render_preview(shown))
    return shown


def evaluate(run: str | Path, *, data: str | Path | None = None) -> dict[str, float]:
    """Token-mean loss and perplexity of a trained run on its evaluation rows, or on the rows of the file ``data``.

    Returns `loss`, `perplexity`, `tokens` (targets) and `rows`. Holds no logits.
    """
    config = open_run(run).config
    if config is None:
        raise ConfigError(f"{run} has no config.yaml, so it is not known how rows are rendered. Give a run's folder.")
    section = config.data
    if data is not None:
        section = section.model_copy(update={"train": [SourceSection(path=str(data))], "eval": [], "eval_split": 0.0})
    loaded = load_run(run)
    prepared = build(
        section, loaded.tokenizer, seed=config.train.seed, vocab_size=loaded.model.get_input_embeddings().num_embeddings
    )
    rows = prepared.train if data is not None else prepared.eval
    if rows is None or len(rows) == 0:
        raise ConfigError(f"{run} was trained without evaluation rows. Name a file: frugal eval {run} --data FILE.")
    attention = use_attention(loaded.model.get_base_model())
    result = evaluate_rows(
        LossModule(loaded.model, chunk_tokens=config.memory.loss_chunk_tokens),
        rows,
        batch_size=config.train.per_device_eval_batch_size,
        pad_id=loaded.tokenizer.pad_token_id or 0,
        flat=attention.name == "frugal" or config.data.packing,
        device=loaded.device.torch_device,
    )
    return {"loss": result.loss, "perplexity": result.perplexity, "tokens": result.tokens, "rows": result.rows}


def _source(config: Config) -> BaseSource:
    settings = config.model
    return resolve_base(settings.base, settings.revision, trust_remote_code=settings.trust_remote_code)


def _tokenizer(config: Config, source: BaseSource) -> Any:
    return load_tokenizer(
        source,
        add_tokens=config.model.add_tokens,
        trust_remote_code=config.model.trust_remote_code,
    )


def use_template(tokenizer: Any, asked: str | None, data: PreparedData) -> None:
    """Make the template that the rows were rendered with the tokenizer's own: it is saved, and answers, with it."""
    if data.template_report.template:
        tokenizer.chat_template = choose_template(asked, tokenizer, all_alpaca=True).source


def _data(config: Config, tokenizer: Any, source: BaseSource) -> PreparedData:
    """Rows of this run; with several processes rank 0 goes first and fills the cache for the others."""
    rows = rows_needed(tokenizer, source.config())

    def prepare() -> PreparedData:
        return build(config.data, tokenizer, seed=config.train.seed, vocab_size=rows)

    if ranks.world_size() == 1:
        return prepare()
    mine: list[PreparedData] = []
    ranks.on_first(lambda: mine.append(prepare()))
    return mine[0] if mine else prepare()


def _grouped(config: Config) -> bool:
    return config.train.group_by_length and not config.data.packing


def _space(config: Config, run_dir: Path, plan: TrainPlan, one_bytes: int) -> None:
    saves = -(-plan.total_steps // (config.output.save_steps or plan.steps_per_epoch))
    kept = kept_at_once(config.output.save_total_limit, config.output.keep_best, saves)
    check_space(run_dir, one_bytes=one_bytes, kept=kept)


def _forget(error: BaseException) -> None:
    """Clear the local variables in an error's frames: a kept traceback must not keep model and optimizer alive."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__  # type: ignore[assignment]


def _out_of_memory(error: torch.OutOfMemoryError, held_bytes: int) -> str:
    text = str(error).split(". ", 1)[0]
    older = f" {size(held_bytes)} were in use in this process before the run began: delete older models first." * (
        held_bytes > 0
    )
    return (
        f"out of device memory: {text}.{older} Ways out: memory.checkpoint: offload, a smaller "
        "train.per_device_train_batch_size (with more gradient_accumulation_steps), a smaller data.max_length."
    )


def _silent(text: str) -> None:
    return None
