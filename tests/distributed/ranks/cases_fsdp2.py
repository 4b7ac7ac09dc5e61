"""Cases of test_fsdp2.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

from frugal.codecs.nf4 import NF4Linear
from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.tensors import fill, local, local_bytes, whole
from frugal.errors import UnsupportedError
from frugal.memory.meter_report import optimizer_tensors
from frugal.models.modules.experts import NF4Experts
from frugal.training.loop import micro_batch
from frugal.training.optim import trainable
from frugal.training.setup import LoopState
from frugal.training.warmup_step import run_warmup_step
from tests.distributed.ranks.sharded_runs import Running, Setting, rows, rows_masked_for_some, start
from tests.distributed.ranks.worker import Rank

CPU = torch.device("cpu")
EIGHT_BIT = Setting(train={"optim": "adamw_8bit"}, lora={"r": 64, "lora_alpha": 128})
TIED = Setting(folder="TINY_TIED", new_token_ids=(290, 295))
TRAINED_HEAD = Setting(lora={"modules_to_save": ["lm_head"]})
EXPERTS = Setting(folder="TINY_EXPERTS")
STOCK = Setting(fused=False, flat=False, quantize="none", micro=2)
POLICIES = ("none", "recompute", "offload", "disk")


def finish(rank: Rank, running: Running) -> dict[str, Any]:
    running.train()
    found = running.adapter()
    running.handle.close()
    if rank.rank == 0:
        rank.save(found)
    else:
        assert found == {}
    return {"records": running.records}


def case_same(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), FullyShard(CPU)))


def case_masked(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), FullyShard(CPU), data=rows_masked_for_some()))


def case_adapters_only(rank: Rank) -> dict[str, Any]:
    running = start(Setting(), FullyShard(CPU, shard_base=False))
    whole_base = not any(isinstance(p, DTensor) for p in running.model.parameters() if not p.requires_grad)
    cut_adapters = all(isinstance(p, DTensor) for p in running.model.parameters() if p.requires_grad)
    return {**finish(rank, running), "whole_base": whole_base, "cut_adapters": cut_adapters}


def case_eight_bit(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(EIGHT_BIT, FullyShard(CPU)))


def case_host_shards(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(Setting(), FullyShard(CPU, offload=True)))


def case_tied_with_new_tokens(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(TIED, FullyShard(CPU)))


def case_trained_head(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(TRAINED_HEAD, FullyShard(CPU)))


def case_experts(rank: Rank) -> dict[str, Any]:
    running = start(EXPERTS, FullyShard(CPU))
    held = [module for module in running.model.modules() if isinstance(module, NF4Experts)]
    cut = held and all(isinstance(p, DTensor) for module in held for p in module.parameters())
    return {**finish(rank, running), "cut": bool(cut)}


def case_stock_modules(rank: Rank) -> dict[str, Any]:
    return finish(rank, start(STOCK, FullyShard(CPU)))


def case_policies(rank: Rank) -> dict[str, Any]:
    """3 steps with each policy, and the gathers of one micro-batch."""
    out: dict[str, Any] = {}
    for policy in POLICIES:
        running = start(Setting(policy=policy, steps=3), FullyShard(CPU), scratch=rank.folder)
        batch = micro_batch(running.job, [rank.rank], 0)
        wrapped, strategy = running.job.wrapped, running.job.strategy
        for _ in range(2):  # the first one also starts the engine
            with CommDebugMode() as comm, strategy.accumulating(wrapped, True):
                loss, sums = wrapped(batch)
                strategy.backward(loss / sums[1], torch.amp.GradScaler("cpu", enabled=False))
            strategy.zero_grad(running.job.optimizer)
        counts = {str(op).split(".")[1]: number for op, number in comm.get_comm_counts().items()}
        running.train()
        running.handle.close()
        out[policy] = {"counts": counts, "losses": running.losses()}
    return out


def case_bytes(rank: Rank) -> dict[str, Any]:
    """What this rank holds of everything, before and after sharding, at rest and after a step."""
    alone = start(Setting(steps=1))
    before = held(alone)
    running = start(Setting(steps=2), FullyShard(CPU))
    wrapped, strategy = running.job.wrapped, running.job.strategy
    running.train(LoopState(step=1))
    after = held(running)
    with strategy.accumulating(wrapped, True):
        loss, sums = wrapped(micro_batch(running.job, [rank.rank], 0))
        strategy.backward(loss / sums[1], torch.amp.GradScaler("cpu", enabled=False))
    after["gradients"] = local_bytes(p.grad for p in trainable(running.model).values() if p.grad is not None)
    after["optimizer"] = sum(local(t).nbytes for t in optimizer_tensors(running.job.optimizer))
    return {"before": before, "after": after}


def held(running: Running) -> dict[str, int]:
    parameters = list(running.model.parameters())
    return {
        "base": local_bytes(p for p in parameters if not p.requires_grad),
        "adapters": local_bytes(p for p in parameters if p.requires_grad),
        "nf4": local_bytes(
            p for m in running.model.modules() if isinstance(m, NF4Linear) for p in (m.weight, m.absmax)
        ),
    }


def case_every_byte(rank: Rank) -> dict[str, Any]:
    """Every byte, and every NaN and infinity of 16 bits, in sharded storage: gathered by a forward, bit for bit."""
    running = start(Setting(steps=1, dtype=torch.float32, folder="TINY_BF16"), FullyShard(CPU))
    patterns: dict[str, torch.Tensor] = {}
    for name, parameter in running.model.named_parameters():
        if parameter.requires_grad:
            continue
        full = planted(parameter.shape, parameter.dtype)
        patterns[name] = full
        fill(parameter, full)
    wrong: list[str] = []

    def look() -> None:
        for name, parameter in running.model.named_parameters():
            if name in patterns and not isinstance(parameter, DTensor) and not same(parameter, patterns[name]):
                wrong.append(name)
        seen.update(n for n, p in running.model.named_parameters() if n in patterns and not isinstance(p, DTensor))

    seen: set[str] = set()
    for module in running.model.modules():
        module.register_forward_hook(lambda *_: look(), prepend=True)
    with torch.no_grad():
        running.job.wrapped(micro_batch(running.job, [0], 0))
    at_rest = [n for n, p in running.model.named_parameters() if n in patterns and not same(whole(p, CPU), patterns[n])]
    kinds = sorted({str(full.dtype) for full in patterns.values()})
    return {"wrong": wrong + at_rest, "seen": len(seen), "planted": len(patterns), "dtypes": kinds}


def planted(shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """All 256 bytes in turn; in 16-bit floats all NaN and infinity patterns in turn."""
    count = shape.numel()
    if dtype.itemsize == 2:
        exponent = 0x7F80 if dtype == torch.bfloat16 else 0x7C00
        mantissa = 0xFFFF ^ exponent ^ 0x8000
        codes = [sign | exponent | low for sign in (0, 0x8000) for low in range(mantissa + 1)]
        bits = torch.tensor(codes, dtype=torch.int32).to(torch.uint16).view(torch.int16)
        return bits.repeat(-(count // -len(bits)))[:count].clone().view(dtype).view(shape)
    raw = torch.arange(256, dtype=torch.uint8).repeat(-(count * dtype.itemsize // -256))
    return raw[: count * dtype.itemsize].clone().view(dtype).view(shape)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().contiguous().view(torch.uint8), b.detach().contiguous().view(torch.uint8))


def case_evaluation_and_probe(rank: Rank) -> dict[str, Any]:
    """3 evaluation batches on 2 ranks, a probe that leaves no trace, answers that need every rank."""
    setting = Setting(steps=3, train={"eval_steps": 2, "per_device_eval_batch_size": 2})
    running = start(setting, FullyShard(CPU), eval_rows=rows([2, 1, 5, 3, 4], seed=3))
    job = running.job
    before = running.adapter()
    measured = run_warmup_step(job)
    after = running.adapter()
    unchanged = all(torch.equal(before[name], after[name]) for name in before) and not job.optimizer.state
    running.train(LoopState())
    ids = torch.tensor([[5, 6, 7, 8]])
    answer = job.strategy.inside(
        job.wrapped,
        lambda: running.model.generate(input_ids=ids, max_new_tokens=5, do_sample=False, synced_gpus=True),
    )
    all_cut = all(isinstance(parameter, DTensor) for parameter in running.model.parameters())
    state = {name: tensor.clone() for name, tensor in running.adapter().items()}
    run_warmup_step(job, first_step=1)
    resumed = running.adapter()
    if rank.rank == 0:
        rank.save(resumed)
    return {
        "records": running.records,
        "unchanged": unchanged,
        "unchanged_later": all(torch.equal(state[name], resumed[name]) for name in state),
        "step_bytes": measured.step_bytes,
        "answer": answer.tolist(),
        "all_cut": all_cut,
    }


def case_loss_scaling(rank: Rank) -> dict[str, Any]:
    """A gradient scaler over shards: the same steps; an overflow on one rank leaves out the step on all."""
    running = start(Setting(steps=4), FullyShard(CPU), loss_scaling=True)
    name, poisoned = next((n, p) for n, p in trainable(running.model).items())
    clip = running.job.strategy.norm_and_clip
    calls = []

    def with_overflow(optimizer: Any, max_norm: float, scaler: Any) -> Any:
        calls.append(scaler.get_scale())
        if len(calls) == 2 and rank.rank == 1:
            local(poisoned.grad).fill_(float("inf"))
        return clip(optimizer, max_norm, scaler)

    running.job.strategy.norm_and_clip = with_overflow  # type: ignore[method-assign]
    state = running.train()
    found = running.adapter()
    if rank.rank == 0:
        rank.save(found)
    return {"skipped": state.skipped_steps, "scales": calls, "records": running.records, "name": name}


def case_compared(rank: Rank) -> dict[str, Any]:
    """DDP: one rank's adapter drifts within the first step."""
    running = start(Setting(steps=3))
    name = sorted(trainable(running.model))[3]
    step = running.job.strategy.step

    def drifting(optimizer: Any, scaler: Any) -> Any:
        done = step(optimizer, scaler)
        if rank.rank == 1:
            with torch.no_grad():
                trainable(running.model)[name].view(-1)[0] += 1e-6
        return done

    running.job.strategy.step = drifting  # type: ignore[method-assign]
    try:
        running.train()
    except UnsupportedError as error:
        return {"error": str(error), "name": name, "steps": len(running.records)}
    return {"error": "", "name": name, "steps": len(running.records)}
