"""Cases of test_zero.py."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor.debug import CommDebugMode

from frugal.config import LoraSection
from frugal.distributed.optimizer_state import OptimizerState
from frugal.distributed.strategy import Strategy
from frugal.distributed.zero import state as zero_state
from frugal.distributed.zero.config import ZeroSettings
from frugal.distributed.zero.engine import Zero
from frugal.errors import CheckpointError, FrugalError
from frugal.memory.meter_report import optimizer_tensors
from frugal.model_structure import decoder_layers
from frugal.models.build import ModelSpec, build
from frugal.models.resolve import ResolvedModel
from frugal.tensor_files import read_tensors, write_tensors
from frugal.training.loop import micro_batch
from frugal.training.setup import LoopState
from frugal.training.warmup_step import run_warmup_step
from tests.distributed.ranks.sharded_runs import (
    GLOBAL_BATCH,
    Running,
    Setting,
    give_b,
    rows,
    rows_masked_for_some,
    start,
)
from tests.distributed.ranks.worker import Rank

CPU = torch.device("cpu")
ODD = Setting(
    folder="TINY_ODD", quantize="none", policy="none", lora={"r": 3, "use_dora": True, "modules_to_save": ["lm_head"]}
)
"""Nothing divides by two: 131 rows, rank 3, magnitudes, a trained head of 301 rows."""
TIED = Setting(folder="TINY_TIED", new_token_ids=(290, 295))
LORA_PLUS = Setting(train={"loraplus_lr_ratio": 2.0}, policy="none")
"""Several groups: each is a flat partition of its own."""
MICRO = Setting(micro=4, policy="offload")
"""A window of one micro-batch: reduced during its backward pass."""
HALF_WAY = 5


def zero(stage: int, setting: Setting | None = None, **changes: Any) -> Zero:
    """A strategy for two ranks and `sharded_runs.start`."""
    micro = (setting or Setting()).micro
    accumulation = GLOBAL_BATCH // micro // torch.distributed.get_world_size()
    return Zero(CPU, ZeroSettings(stage, micro, accumulation, max_grad_norm=0.5, **changes))


def finish(rank: Rank, running: Running, state: LoopState | None = None) -> dict[str, Any]:
    """Train to the end; adapter and optimizer state as files of rank 0."""
    running.train(state)
    keep(rank, running)
    held = zero_state.local_bytes(running.model)
    running.job.strategy.close()
    running.handle.close()
    return {"records": running.records, "held": held}


def keep(rank: Rank, running: Running, name: str = "") -> None:
    """What a checkpoint holds of them, written as one writes it."""
    strategy = running.job.strategy
    adapter, optimizer = running.adapter(), strategy.full_optimizer_state(running.job.optimizer)
    if strategy.rank == 0:
        rank.save(adapter, name)
        write_tensors(rank.folder / f"optimizer{name}.safetensors", optimizer.tensors, optimizer.meta)
    else:
        assert adapter == {}
        assert optimizer.tensors == {}


def go_on(rank: Rank, setting: Setting, strategy: Strategy, case: str, name: str) -> dict[str, Any]:
    """Train the second half from what another case, or the test, saved half-way."""
    running = start(setting, strategy)
    place = rank.folder.parent / case
    adapter, _ = read_tensors(place / f"0.{name}.safetensors")
    tensors, meta = read_tensors(place / f"optimizer{name}.safetensors")
    strategy.load_adapter(running.model, adapter)
    strategy.load_optimizer_state(running.job.optimizer, OptimizerState(tensors, meta), "the test's file")
    return finish(rank, running, LoopState(step=HALF_WAY))


def case_zero1(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), zero(1)))


def case_zero2(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), zero(2)))


def case_zero3(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), zero(3)))


def case_zero2_offload(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(policy="none"), zero(2, offload_optimizer=True)))


def case_zero3_offload(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), zero(3, offload_optimizer=True, offload_parameters=True)))


def case_zero2_masked(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(policy="none"), zero(2), data=rows_masked_for_some()))


def case_zero3_masked(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), zero(3), data=rows_masked_for_some()))


def case_zero2_odd(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(ODD, zero(2)))


def case_zero3_odd(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(ODD, zero(3)))


def case_zero3_tied(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(TIED, zero(3)))


def case_zero2_groups(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(LORA_PLUS, zero(2)))


def case_zero2_one_micro(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(MICRO, zero(2, MICRO)))


def case_zero3_one_micro(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(MICRO, zero(3, MICRO)))


def case_zero3_half(rank: Rank) -> dict[str, Any]:
    """The first half, saved; then the second half in a new engine."""
    running = start(Setting(policy="none"), zero(3))
    running.job = replace(running.job, save_steps=HALF_WAY)
    running.train(save=lambda state: keep(rank, running, "half") if state.step == HALF_WAY else None)
    running.job.strategy.close()
    return {"records": running.records}


def case_zero3_from_one(rank: Rank) -> dict[str, Any]:
    return go_on(rank, Setting(policy="none"), zero(3), "alone", "half")


def case_zero2_from_zero3(rank: Rank) -> dict[str, Any]:
    return go_on(rank, Setting(policy="none"), zero(2, offload_optimizer=True), "zero3_half", "half")


def case_zero3_odd_from_one(rank: Rank) -> dict[str, Any]:
    return go_on(rank, ODD, zero(3), "alone_odd", "half")


def case_gathers(rank: Rank) -> dict[str, Any]:
    """Gathers of one micro-batch under ZeRO-3, without and with recomputation, once the engine knows the order."""
    out: dict[str, Any] = {}
    for policy in ("none", "recompute", "offload"):
        running = start(Setting(policy=policy, steps=3), zero(3))
        running.train()
        batch = micro_batch(running.job, [rank.rank], 0)
        wrapped, strategy = running.job.wrapped, running.job.strategy
        with CommDebugMode() as comm, strategy.accumulating(wrapped, True):
            loss, sums = wrapped(batch)
            strategy.backward(loss / sums[1], torch.amp.GradScaler("cpu", enabled=False))
        counts = {str(op).split(".")[1]: number for op, number in comm.get_comm_counts().items()}
        strategy.zero_grad(running.job.optimizer)
        strategy.rest(wrapped)
        out[policy] = {"counts": counts, "losses": running.losses()}
        strategy.close()
        running.handle.close()
        assert "forward" not in vars(next(iter(decoder_layers(running.model).values())))
    return out


def case_bytes(rank: Rank) -> dict[str, Any]:
    """What this rank holds, whole and under each stage, after two steps."""
    out: dict[str, Any] = {}
    alone = start(Setting(steps=1))
    out["whole"] = zero_state.local_bytes(alone.model)
    del alone
    for stage in (1, 2, 3):
        running = start(Setting(steps=2), zero(stage))
        running.train()
        engine = running.job.strategy.engine  # type: ignore[attr-defined]
        out[f"zero{stage}"] = {**zero_state.local_bytes(running.model), **zero_state.state_bytes(engine)}
        out[f"zero{stage}"]["measured"] = sum(t.nbytes for t in optimizer_tensors(running.job.optimizer))
        running.job.strategy.close()
        running.handle.close()
    return out


def case_every_dtype(rank: Rank) -> dict[str, Any]:
    """A base stored in bfloat16 beside 4-bit layers, float32 adapters: nothing is cast, no byte of the base changes."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        setting = Setting(steps=2, folder="TINY_BF16", policy="none")
        alone = start(setting)
        want = {name: p.detach().clone() for name, p in alone.model.named_parameters() if not p.requires_grad}
        running = start(setting, zero(stage))
        running.train()
        wrong = []
        for name, parameter in running.model.named_parameters():
            with zero_state.whole(parameter):
                if name in want and not torch.equal(
                    parameter.detach().contiguous().view(torch.uint8), want[name].contiguous().view(torch.uint8)
                ):
                    wrong.append(name)
                if name not in want and parameter.dtype != torch.float32:
                    wrong.append(name)
        out[str(stage)] = {"wrong": wrong, "dtypes": sorted({str(t.dtype) for t in want.values()})}
        running.job.strategy.close()
    return out


def case_evaluation_and_probe(rank: Rank) -> dict[str, Any]:
    """3 evaluation batches on 2 ranks, a probe that leaves no trace, answers that need every rank."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        setting = Setting(steps=3, train={"eval_steps": 2, "per_device_eval_batch_size": 2})
        running = start(setting, zero(stage), eval_rows=rows([2, 1, 5, 3, 4], seed=3))
        job = running.job
        before = running.adapter()
        run_warmup_step(job)
        after = running.adapter()
        unchanged = all(torch.equal(before[name], after[name]) for name in before)
        fresh = job.strategy.full_optimizer_state(job.optimizer).tensors == {}
        running.train()
        answer = job.strategy.inside(job.wrapped, partial(answer_with, running.model))
        job.strategy.rest(job.wrapped)
        held = zero_state.local_bytes(running.model)
        last = running.adapter()
        state = job.strategy.full_optimizer_state(job.optimizer)
        run_warmup_step(job, first_step=1)
        later, state_later = running.adapter(), job.strategy.full_optimizer_state(job.optimizer)
        out[str(stage)] = {
            "records": running.records,
            "unchanged": unchanged and fresh,
            "unchanged_later": all(torch.equal(last[name], later[name]) for name in last)
            and all(torch.equal(state.tensors[name], state_later.tensors[name]) for name in state.tensors),
            "answer": answer.tolist(),
            "held": held,
        }
        if rank.rank == 0:
            rank.save(later, str(stage))
        job.strategy.close()
        running.handle.close()
    return out


def answer_with(model: Any) -> torch.Tensor:
    model.eval()
    ids, together = torch.tensor([[5, 6, 7, 8]]), torch.distributed.is_initialized()
    found: torch.Tensor = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, synced_gpus=together)
    return found


def case_loss_scaling(rank: Rank) -> dict[str, Any]:
    """An overflow on one rank leaves out the step on all, and the scale falls."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        running = start(Setting(policy="none", steps=6), zero(stage), loss_scaling=True)
        if rank.rank == 1:
            overflow_in_third_step(running)
        end = running.train()
        scale = end.loss_scaling["scale"]
        out[str(stage)] = {"records": running.records, "skipped": end.skipped_steps, "scale": scale}
        found = running.adapter()
        if rank.rank == 0:
            rank.save(found, str(stage))
        running.job.strategy.close()
    return out


def overflow_in_third_step(running: Running) -> None:
    """Let the gradients of one micro-batch become infinite on their way back."""
    calls = [0]

    def spoil(module: Any, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        calls[0] += 1
        if calls[0] == 2 * running.job.train.gradient_accumulation_steps + 1:
            output[0].register_hook(lambda gradient: gradient * float("inf"))

    running.job.module.register_forward_hook(spoil)


def case_not_finite(rank: Rank) -> dict[str, Any]:
    """A gradient that is not a number on one rank: both stop with the same message, and nothing was changed."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        running = start(Setting(policy="none", steps=3), zero(stage))
        before = running.adapter()

        def spoil(module: Any, args: Any, output: Any) -> Any:
            loss, sums = output
            return (loss * float("nan"), sums * float("nan")) if rank.rank == 1 else (loss, sums)

        running.job.module.register_forward_hook(spoil)
        try:
            running.train()
            message = "nothing was raised"
        except FrugalError as error:
            message = str(error)
        after = running.adapter()
        out[str(stage)] = {"message": message, "same": all(torch.equal(before[k], after[k]) for k in before)}
        running.job.strategy.close()
    return out


def case_raises(rank: Rank) -> dict[str, Any]:
    """One rank raises amid a window: it must not wait in a reduction, in which the other one does not take part."""
    out: dict[str, Any] = {}
    for stage in (2, 3):
        running = start(Setting(policy="none"), zero(stage))
        wrapped, strategy = running.job.wrapped, running.job.strategy
        with strategy.accumulating(wrapped, False):
            loss, sums = wrapped(micro_batch(running.job, [rank.rank], 0))
            strategy.backward(loss / sums[1], torch.amp.GradScaler("cpu", enabled=False))
        out[str(stage)] = ""
        if rank.rank == 1:
            try:
                with strategy.accumulating(wrapped, False):
                    raise ValueError("amid a window")
            except ValueError as error:
                out[str(stage)] = str(error)
        torch.distributed.barrier()
        strategy.close()
    return out


def case_other_ages(rank: Rank) -> dict[str, Any]:
    """State in which one parameter has taken fewer steps cannot be DeepSpeed's."""
    running = start(Setting(steps=1, policy="none"), zero(2))
    running.train()
    strategy, optimizer = running.job.strategy, running.job.optimizer
    gathered = [strategy.full_optimizer_state(optimizer)]
    torch.distributed.broadcast_object_list(gathered, src=0)
    state = gathered[0]
    label = next(label for label in state.tensors if label.endswith("|step"))
    state.tensors[label] = state.tensors[label] + 1
    messages = []
    for wrong in (state, OptimizerState(state.tensors, {**state.meta, "optimizer": "AdamW8bit"})):
        try:
            strategy.load_optimizer_state(optimizer, wrong, "FILE")
        except CheckpointError as error:
            messages.append(str(error))
    strategy.close()
    return {"messages": json.loads(json.dumps(messages))}


def case_layer_by_layer(rank: Rank) -> dict[str, Any]:
    """Each layer partitioned before the next is read: no rank ever holds the whole base."""
    base = ResolvedModel("tiny", Path(os.environ["TINY_UNTIED"]), "folder", None)
    lora = LoraSection(r=4, lora_alpha=8)
    strategy = zero(3)
    held: list[int] = []

    def take(name: str, layer: Any) -> None:
        strategy.take_layer(name, layer)
        held.append(zero_state.local_bytes(layer)["frozen"])

    filled = build(ModelSpec(source=base, lora=lora), "layerwise", take)
    give_b(filled.model)
    running = start(Setting(), strategy, model=filled.model, head=filled.head)
    return {**finish(rank, running), "layers": held}
