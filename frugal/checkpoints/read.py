"""Read checkpoints, and put one back into a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from torch.optim import Optimizer

from frugal.checkpoints.complete import ADAPTER_FILE, FORMAT, why_incomplete
from frugal.distributed import group as ranks
from frugal.distributed.optimizer_state import OptimizerState
from frugal.distributed.strategy import Strategy
from frugal.errors import CheckpointError
from frugal.files import read_json
from frugal.tensor_files import read_tensors, refuse_pickles_in
from frugal.training.setup import LoopState, seed_step_noise, set_rng_state


@dataclass
class LoadedCheckpoint:
    """A complete checkpoint, verified and read. The adapter's tensors stay in `folder / adapter_model.safetensors`."""

    folder: Path
    step: int
    optimizer: OptimizerState
    rng: dict[str, torch.Tensor]
    state: dict[str, Any]


def load_checkpoint(folder: Path, *, hashes: bool = True) -> LoadedCheckpoint:
    """Verify and read a checkpoint. Raises CheckpointError for one that is incomplete or holds a pickle.

    ``hashes``: compare contents too; not needed for one that `find_latest` or `starting_point` has just chosen.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"there is no checkpoint folder {folder}")
    refuse_pickles_in(folder)
    reason = why_incomplete(folder, hashes=hashes)
    if reason is not None:
        raise CheckpointError(f"{folder} is not a complete checkpoint: {reason}")
    tensors, meta = read_tensors(folder / "optimizer.safetensors")
    rng, _ = read_tensors(folder / "rng.safetensors")
    state = _read_state(folder)
    return LoadedCheckpoint(folder, int(state["step"]), OptimizerState(tensors, meta), rng, state)


def _read_state(folder: Path) -> dict[str, Any]:
    path = folder / "trainer_state.json"
    try:
        state = read_json(path)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        found = state.get("format") if isinstance(state, dict) else None
        raise CheckpointError(f"{path} has format {found!r}, this version of frugal reads {FORMAT}")
    return state


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


def restore(
    checkpoint: LoadedCheckpoint,
    strategy: Strategy,
    model: PeftModel,
    optimizer: Optimizer,
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
        set_rng_state(generators, strategy.device)
    else:
        say(f"{checkpoint.folder} was written by another number of processes: dropout draws new random numbers")
        seed_step_noise(seed + checkpoint.step, ranks.rank())
    return LoopState(**checkpoint.state["loop"])
