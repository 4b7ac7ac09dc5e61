"""Bytes of each rank, bytes sent in a step, and differences from one process, for every strategy at 1, 2 and 4 ranks.

    python benchmarks/sharding.py --json benchmarks/results/sharding.json

A Llama of 4 layers (hidden 256, 4-bit, LoRA r=8 on all linear layers, float32) trains 10 steps on this machine's CPU,
the ranks joined by gloo. Sent bytes are counted at torch.distributed's operations as a ring sends them: gathering or
scattering B bytes over N ranks sends B (N - 1) / N from each, an all-reduce twice that. Without DeepSpeed its rows are
left out.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import tempfile
import traceback
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from common import environment
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from frugal.config import LoraSection, TrainSection
from frugal.data import TokenDataset, collate
from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.sanity_checks import preflight
from frugal.distributed.strategy import Strategy, replicated
from frugal.distributed.tensors import local
from frugal.distributed.zero import state as zero_state
from frugal.distributed.zero.config import ZeroSettings
from frugal.distributed.zero.engine import Zero
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.models.build import ModelSpec, build
from frugal.models.resolve import ResolvedModel
from frugal.objectives import LossModule, make_objective
from frugal.training.loop import train_loop
from frugal.training.oom_fallback import MemorySettings
from frugal.training.optim import build_optimizer, trainable
from frugal.training.schedule import StepOrder, lr_lambda, make_plan
from frugal.training.setup import Hooks, LoopState, TrainSetup
from frugal.training.signals import StopRequest

CPU = torch.device("cpu")
STEPS, BATCH, NORM, VOCAB = 10, 8, 0.5, 512
FIELDS = (
    "strategy", "world_size", "base_bytes", "adapter_bytes", "gradient_bytes", "optimizer_bytes",
    "sent_bytes_per_step", "loss_max_diff", "adapter_max_diff",
)  # fmt: skip
SHARDED = ("fsdp2", "fsdp2, base whole", "zero3")
"""Strategies that cut adapters, gradients and optimizer state; zero2 cuts the last two."""


class Sent(TorchDispatchMode):
    """Adds up what this rank sends, as a ring does it."""

    def __init__(self, world: int) -> None:
        super().__init__()
        self.world, self.part = world, (world - 1) / world
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, op = func.name().partition("::")
        if space == "c10d":
            self.bytes += self._sent(op.split(".")[0], args)
        elif space == "_c10d_functional":
            self.bytes += self._sent_functional(op.split(".")[0], args)
        return func(*args, **(kwargs or {}))

    def _sent(self, op: str, args: Any) -> float:
        if "barrier" in op:
            return 0.0
        if op.startswith("allreduce"):
            return 2 * self.part * _bytes(args[0])
        if "reduce_scatter" in op:  # (outputs, inputs, ...)
            return self.part * _bytes(args[1])
        if op.startswith(("_allgather_base", "allgather", "broadcast", "reduce_")):  # (outputs or tensors, ...)
            return self.part * _bytes(args[0])
        raise AssertionError(f"c10d::{op} is not counted")

    def _sent_functional(self, op: str, args: Any) -> float:
        """These take inputs alone."""
        if op.startswith("all_gather"):
            return self.part * _bytes(args[0]) * self.world
        if op.startswith("all_reduce"):
            return 2 * self.part * _bytes(args[0])
        if op.startswith(("reduce_scatter", "broadcast")):
            return self.part * _bytes(args[0])
        assert "wait" in op or "wrap" in op, f"_c10d_functional::{op} is not counted"
        return 0.0


def _bytes(tensors: Any) -> int:
    if isinstance(tensors, Tensor):
        return tensors.nbytes
    return sum(_bytes(item) for item in tensors)


def save_base(folder: Path) -> None:
    """The model of this benchmark."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=256, tie_word_embeddings=False, initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def rows() -> TokenDataset:
    """80 rows with 1 to 20 targets."""
    generator = torch.Generator().manual_seed(1)
    ids, trained = [], []
    for index in range(STEPS * BATCH):
        size, targets = 24 + index % 9, 1 + index * 7 % 20
        ids.append(torch.randint(3, VOCAB, (size,), generator=generator).int().numpy())
        trained.append((torch.arange(size) >= size - targets).numpy())
    return TokenDataset.from_documents(ids, trained, list(range(len(ids))))


def strategies(world: int) -> dict[str, Any]:
    """Name -> how it is made."""

    def zero(stage: int) -> Strategy:
        return Zero(CPU, ZeroSettings(stage=stage, micro_batch=1, accumulation=BATCH // world, max_grad_norm=NORM))

    found = {
        "ddp": lambda: replicated(CPU),
        "fsdp2": lambda: FullyShard(CPU),
        "fsdp2, base whole": lambda: FullyShard(CPU, shard_base=False),
    }
    if importlib.util.find_spec("deepspeed") is not None:
        found |= {"zero2": lambda: zero(2), "zero3": lambda: zero(3)}
    return found


def train(base: Path, strategy: Strategy) -> tuple[dict[str, int], list[float], dict[str, Tensor]]:
    """This rank's bytes, the losses, and the whole adapter (rank 0)."""
    spec = ModelSpec(source=ResolvedModel("small", base, "folder", None), lora=LoraSection(r=8, lora_alpha=16))
    built = build(spec)
    model = built.model
    section = TrainSection.model_validate(
        {
            "group_by_length": False, "max_steps": STEPS, "per_device_train_batch_size": 1, "max_grad_norm": NORM,
            "gradient_accumulation_steps": BATCH // strategy.world_size, "learning_rate": 1e-3, "warmup_ratio": 0.0,
        }
    )  # fmt: skip
    data, module = rows(), LossModule(model, make_objective(flat=True), head=built.head)
    wrapped, optimizer = strategy.prepare(module, lambda: build_optimizer(trainable(model), section))
    held = preflight(strategy, wrapped, module, optimizer, max_grad_norm=NORM).local
    handle = apply_activation_checkpointing(model, "recompute")
    plan = make_plan(section, rows=len(data), world_size=strategy.world_size)
    job = TrainSetup(
        module=module, wrapped=wrapped, strategy=strategy, optimizer=optimizer, plan=plan, train=section, rows=data,
        order=StepOrder(data.lengths, plan, seed=0, group_by_length=False), eval_rows=None,
        device=torch.device("cpu"), lr_lambda=lr_lambda(section, plan), memory=MemorySettings(module, 1, 1, handle),
    )  # fmt: skip
    losses: list[float] = []
    with Sent(strategy.world_size) as sent:
        marks = [0.0]

        def record(entry: dict[str, Any]) -> None:
            losses.append(entry["loss"])
            marks.append(sent.bytes)

        train_loop(job, Hooks(record, lambda state: None, StopRequest()), LoopState())
    found = {
        "base_bytes": held["nf4"] + held["base"],
        "adapter_bytes": held["trained"],
        "sent_bytes_per_step": round(marks[-1] - marks[-2]),
        **_after_backward(job),
    }
    adapter = strategy.full_adapter(model)
    handle.close()
    strategy.close()
    return found, losses, adapter


def _after_backward(job: TrainSetup) -> dict[str, int]:
    """Bytes of reduced gradients and of optimizer state, with master values that are not the adapters themselves."""
    strategy, engine = job.strategy, getattr(job.strategy, "engine", None)
    if engine is not None:
        state = zero_state.state_bytes(engine)
        return {"gradient_bytes": state["gradients"], "optimizer_bytes": state["masters"] + state["optimizer"]}
    with strategy.accumulating(job.wrapped, True):
        loss, sums = job.wrapped(collate([job.rows[strategy.rank]], 0, flat=True))
        strategy.backward(loss / sums[1], torch.amp.GradScaler("cpu", enabled=False))
    gradients = [p.grad for group in job.optimizer.param_groups for p in group["params"] if p.grad is not None]
    state_tensors = [t for state in job.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    return {"gradient_bytes": _local_bytes(gradients), "optimizer_bytes": _local_bytes(state_tensors)}


def _local_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local(tensor).nbytes for tensor in tensors)


def run_rank(rank: int, world: int, base: Path, folder: Path) -> None:
    """All strategies in this rank; rank 0 writes the result."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    torch.distributed.init_process_group("gloo")
    result = {}
    for name, make in strategies(world).items():
        held, losses, adapter = train(base, make())
        ranks: list[Any] = [None] * world
        torch.distributed.all_gather_object(ranks, held)
        # the fullest rank is what counts
        result[name] = {"held": {key: max(one[key] for one in ranks) for key in held}, "losses": losses}
        if rank == 0:
            save_file(
                {key: tensor.contiguous() for key, tensor in adapter.items()}, folder / f"{world} {name}.safetensors"
            )
    if rank == 0:
        (folder / f"{world}.json").write_text(json.dumps(result), encoding="utf-8")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def start(world: int, base: Path, folder: Path) -> None:
    """Fork the ranks and wait for them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free.getsockname()[1]))
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(rank, world, base, folder)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise SystemExit(f"{world} ranks ended with {codes}")


def compare(folder: Path, worlds: list[int]) -> list[dict[str, Any]]:
    """The table, with losses and adapters against one process without any sharding."""
    results = {world: json.loads((folder / f"{world}.json").read_text(encoding="utf-8")) for world in worlds}
    alone, losses = load_file(folder / "1 ddp.safetensors"), results[1]["ddp"]["losses"]
    table = []
    for world, found in results.items():
        for name, row in found.items():
            adapter = load_file(folder / f"{world} {name}.safetensors")
            assert adapter.keys() == alone.keys()
            values = {
                "strategy": name,
                "world_size": world,
                **row["held"],
                "loss_max_diff": max(abs(a - b) for a, b in zip(row["losses"], losses, strict=True)),
                "adapter_max_diff": max(float((adapter[key] - alone[key]).abs().max()) for key in alone),
            }
            table.append({key: values[key] for key in FIELDS})
    return table


def check(table: list[dict[str, Any]]) -> None:
    """What must hold: the same result, and shares of 1/N."""
    one = next(row for row in table if row["strategy"] == "ddp" and row["world_size"] == 1)
    for row in table:
        name, world = row["strategy"], row["world_size"]
        assert row["loss_max_diff"] <= 1e-5, row
        assert row["adapter_max_diff"] <= 1e-5, row
        cut = ("adapter_bytes", "optimizer_bytes") if name in SHARDED else ("optimizer_bytes",)
        if name != "ddp":
            share = sum(row[key] for key in cut) / sum(one[key] for key in cut)
            assert share <= 1 / world + 0.05, (name, world, share)
        if name in ("fsdp2", "zero3"):
            assert row["base_bytes"] <= one["base_bytes"] * (1 / world + 0.05), row


def main() -> None:
    """Run everything, print the table, write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 4], help="numbers of ranks; 1 is always run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    worlds = sorted({1, *options.worlds})
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        save_base(folder / "base")
        for world in worlds:
            start(world, folder / "base", folder)
        table = compare(folder, worlds)
    for row in table:
        print(
            "  ".join(
                f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
            )
        )
    check(table)
    if options.json is not None:
        found = environment()
        if importlib.util.find_spec("deepspeed") is not None:
            found["versions"]["deepspeed"] = version("deepspeed")
        options.json.write_text(json.dumps({**found, "steps": STEPS, "rows": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
