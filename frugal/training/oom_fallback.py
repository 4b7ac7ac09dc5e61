"""Out of memory: the next cheaper way to compute the same thing, and the same step again.

The order is fixed: smaller chunks of the loss and tiles of the MLP, then checkpointing (recompute, offload, disk), then
fewer rows in a micro-batch with the same rows in a step. None changes what is computed: the rows of a step, the loss
and the gradients stay those of the configuration, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frugal.errors import MemoryBudgetError
from frugal.memory.checkpointing import CheckpointHandle, Policy, apply_activation_checkpointing
from frugal.models.modules.fused import FrugalGatedMLP
from frugal.training.job import Job

SMALL_LOSS_CHUNK = 64
SMALL_MLP_TILE = 64
"""Tokens. Below these, products are slow on every device and the buffers no longer matter."""


@dataclass
class Ladder:
    """The rungs of one run, and those taken."""

    job: Job
    handle: CheckpointHandle
    scratch_dir: str | None
    on_cuda: bool
    say: Callable[[str], None]
    advice: Callable[[], str] = lambda: ""
    """What would fit, for the error at the end of the ladder."""
    taken: list[str] = field(default_factory=list)

    def next(self, reason: str) -> None:
        """Take the next rung that changes something.

        Raises MemoryBudgetError when there is none left.
        """
        for rung in (self._chunks, self._checkpoint, self._rows):
            done = rung()
            if done is not None:
                self.taken.append(done)
                self.say(f"out of memory ({_short(reason)}): {done}; the step is done again, with the same result")
                return
        tried = f" Tried: {', '.join(self.taken)}." if self.taken else ""
        raise MemoryBudgetError(f"the run does not fit: {_short(reason)}.{tried} {self.advice()}".rstrip())

    def close(self) -> None:
        """Undo checkpointing."""
        self.handle.close()

    def _chunks(self) -> str | None:
        module = self.job.module
        tiles = [m for m in module.modules() if isinstance(m, FrugalGatedMLP)]
        small = module.chunk_tokens is not None and module.chunk_tokens <= SMALL_LOSS_CHUNK
        if small and all(m.tile_tokens is not None and m.tile_tokens <= SMALL_MLP_TILE for m in tiles):
            return None
        module.chunk_tokens = min(module.chunk_tokens or SMALL_LOSS_CHUNK, SMALL_LOSS_CHUNK)
        for mlp in tiles:
            mlp.tile_tokens = min(mlp.tile_tokens or SMALL_MLP_TILE, SMALL_MLP_TILE)
        return f"loss in chunks of {module.chunk_tokens} tokens, MLP in tiles of {SMALL_MLP_TILE}"

    def _checkpoint(self) -> str | None:
        after: dict[Policy, Policy] = {"none": "recompute", "recompute": "offload", "offload": "disk"}
        policy = after.get(self.handle.policy)
        if policy == "offload" and not self.on_cuda:  # on a CPU the inputs would stay in the same memory
            policy = "disk"
        if policy is None:
            return None
        self.handle.close()
        self.handle = apply_activation_checkpointing(self.job.module.model, policy, scratch_dir=self.scratch_dir)
        return f"memory.checkpoint: {policy}"

    def _rows(self) -> str | None:
        train = self.job.train
        rows = train.per_device_train_batch_size
        evaluated = train.per_device_eval_batch_size
        if rows == 1 and evaluated == 1:
            return None
        fewer, fewer_evaluated = max(1, rows // 2), max(1, evaluated // 2)
        update: dict[str, Any] = {"per_device_train_batch_size": fewer, "per_device_eval_batch_size": fewer_evaluated}
        self.job.train = train.model_copy(update=update)
        return f"{fewer} rows a micro-batch, {fewer_evaluated} an evaluation batch, as many a step as before"


def _short(reason: str) -> str:
    return reason.split(". ", 1)[0].strip() or "no reason given"
