"""Checkpoints of one run: gathers what a checkpoint holds, writes, rotates, and puts it back on resume."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.optim import Optimizer

from frugal.adapters import save_adapter
from frugal.checkpoints.lock import RunLock
from frugal.checkpoints.resume import config_hash
from frugal.checkpoints.rotation import aside, rotate
from frugal.checkpoints.side_files import save_side_files
from frugal.checkpoints.write import ADAPTER_FILE, CheckpointParts, LoadedCheckpoint, save_checkpoint
from frugal.config import Config, OutputSection, dump_yaml
from frugal.distributed import group as ranks
from frugal.distributed.strategy import Strategy
from frugal.errors import CheckpointError
from frugal.files import write_text
from frugal.tensor_files import read_tensors
from frugal.training.randomness import rng_state, seed_step_noise, set_rng_state
from frugal.training.schedule import TrainPlan
from frugal.training.setup import LoopState


@dataclass
class CheckpointWriter:
    """Writes the checkpoints of one run. Every rank calls `save`, rank 0 writes, all meet the same outcome."""

    run_dir: Path
    strategy: Strategy
    model: PeftModel
    optimizer: Optimizer
    plan: TrainPlan
    config: dict[str, Any]
    """The resolved configuration, as plain values."""
    data_fingerprint: str
    output: OutputSection
    device: torch.device
    lock: RunLock | None
    say: Callable[[str], None] = print
    side_files: Callable[[Path], None] | None = None
    """Writes what a checkpoint needs to be used without its run; see `side_files`."""
    base_fingerprint: str | None = None

    def save(self, state: LoopState) -> None:
        """Write `checkpoint-<step>`, then delete what `save_total_limit` has no room for."""
        adapter, parts = self._gather(state)
        ranks.on_first(lambda: self._write(state, adapter, parts))

    def rehearse(self, state: LoopState) -> None:
        """Write a checkpoint as `save` does, into a folder beside where it would lie, and remove it.

        What does not fit (device, host or disk) shows before the first step.
        """
        _, parts = self._gather(state)
        ranks.on_first(lambda: self._write_and_remove(state.step, parts))

    def _write_and_remove(self, step: int, parts: CheckpointParts) -> None:
        folder = aside(self.run_dir, step, "tmp")
        try:
            save_checkpoint(folder, step, parts)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _gather(self, state: LoopState) -> tuple[dict[str, torch.Tensor], CheckpointParts]:
        """The whole adapter and all else that a checkpoint holds; on every rank, with tensors on the first."""
        generators = ranks.gather({key: tensor.cpu() for key, tensor in rng_state(self.device).items()})
        adapter = self.strategy.full_adapter(self.model)
        optimizer = self.strategy.full_optimizer_state(self.optimizer)
        rng = {f"{rank}.{key}": tensor for rank, found in enumerate(generators) for key, tensor in found.items()}
        content = {
            "config": self.config,
            "config_sha256": config_hash(self.config),
            "plan": self.plan.as_dict(),
            "data_fingerprint": self.data_fingerprint,
            "world_size": ranks.world_size(),
            "loop": asdict(state),
        }
        return adapter, CheckpointParts(lambda folder: self._write_adapter(folder, adapter), optimizer, rng, content)

    def _write(self, state: LoopState, adapter: dict[str, torch.Tensor], parts: CheckpointParts) -> None:
        if self.lock is not None:
            self.lock.alive()
        try:
            save_checkpoint(self.run_dir, state.step, parts)
        except CheckpointError as error:
            raise CheckpointError(f"{error} {self._rescue(state.step, adapter)}") from error
        best = state.best_step if self.output.keep_best else None
        rotate(self.run_dir, limit=self.output.save_total_limit, best_step=best)

    def _write_adapter(self, folder: Path, adapter: dict[str, torch.Tensor]) -> None:
        save_adapter(self.model, folder, tensors=adapter, base_fingerprint=self.base_fingerprint)
        if self.side_files is not None:
            self.side_files(folder)

    def _rescue(self, step: int, adapter: dict[str, torch.Tensor]) -> str:
        """Save the adapter in the system's temporary folder, so that its training is not lost. Returns a sentence."""
        folder = Path(tempfile.mkdtemp(prefix=f"frugal-{self.run_dir.name}-step-{step}-"))
        try:
            save_adapter(self.model, folder, tensors=adapter)
        except Exception as error:  # whatever it is, the first error is the one to report
            return f"The adapter of step {step} could not be saved in {folder} either ({error})."
        return f"The adapter of step {step} (without optimizer state) was saved in {folder}."


def side_files(tokenizer: Any, *, base: Path, config: Config) -> Callable[[Path], None]:
    """Writes tokenizer, chat template, stop ids and config.yaml: a checkpoint alone can be chatted with and merged."""

    def write(folder: Path) -> None:
        try:
            save_side_files(folder, tokenizer, base=base)
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):  # told as any other file of the checkpoint that cannot be written
                raise error.__cause__ from None
            raise
        write_text(folder / "config.yaml", dump_yaml(config))

    return write


def put_adapter(strategy: Strategy, model: PeftModel, folder: Path) -> None:
    """Load a checkpoint's adapter into the adapter that the model has already, bit for bit; each rank its part.

    Nothing is wrapped again. Raises CheckpointError when names or shapes differ.
    """
    path = folder / ADAPTER_FILE
    tensors, _ = read_tensors(path)
    shapes = strategy.adapter_shapes(model)
    unlike = sorted(
        name
        for name in tensors.keys() | shapes.keys()
        if name not in tensors or name not in shapes or tuple(tensors[name].shape) != shapes[name]
    )
    if unlike:
        raise CheckpointError(
            f"{path} does not fit this run's adapter: {len(unlike)} tensors differ in name or shape, the first is "
            f"{unlike[0]}. Set the lora section back to what it was."
        )
    strategy.load_adapter(model, tensors)
    put = strategy.full_adapter(model)
    ranks.on_first(lambda: _refuse_other(put, tensors, path))


def _refuse_other(put: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor], path: Path) -> None:
    for name, tensor in put.items():
        if not torch.equal(tensor, tensors[name].to(tensor.dtype)):
            raise AssertionError(f"{name} is not what {path} holds after loading")


def restore(
    checkpoint: LoadedCheckpoint,
    strategy: Strategy,
    model: PeftModel,
    optimizer: Optimizer,
    device: torch.device,
    *,
    seed: int,
    say: Callable[[str], None] = print,
) -> LoopState:
    """Put adapter, optimizer and random generators back; returns the loop's state."""
    put_adapter(strategy, model, checkpoint.folder)
    where = str(checkpoint.folder / "optimizer.safetensors")
    strategy.load_optimizer_state(optimizer, checkpoint.optimizer, where)
    prefix = f"{ranks.rank()}."
    generators = {name.removeprefix(prefix): t for name, t in checkpoint.rng.items() if name.startswith(prefix)}
    if checkpoint.state.get("world_size") == ranks.world_size() and "cpu" in generators:
        set_rng_state(generators, device)
    else:
        say(f"{checkpoint.folder} was written by another number of processes: dropout draws new random numbers")
        seed_step_noise(seed + checkpoint.step, ranks.rank())
    return LoopState(**checkpoint.state["loop"])
