"""Out of memory: the next cheaper way to compute the same thing, and the same step again.

The order is fixed: smaller chunks of the loss and tiles of the MLP, then checkpointing (recompute, offload, disk), then
fewer rows in a micro-batch with the same rows in a step. None changes what is computed: the rows of a step, the loss
and the gradients stay those of the configuration, up to the order of sums.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from frugal.errors import MemoryBudgetError
from frugal.memory.checkpointing import CheckpointHandle, Policy, apply_activation_checkpointing
from frugal.models.modules.fused import FrugalGatedMLP
from frugal.objectives import LossModule

SMALL_LOSS_CHUNK = 64
SMALL_MLP_TILE = 64
"""Tokens. Below these, products are slow on every device and the buffers no longer matter."""
_LEANER: dict[Policy, Policy] = {"none": "recompute", "recompute": "offload", "offload": "disk"}


@dataclass
class MemorySettings:
    """How much of a step exists at a time. Each method makes that less and says how, or returns None: no less."""

    module: LossModule
    micro_batch_rows: int
    """Rows of a training micro-batch on each rank."""
    eval_batch_rows: int
    checkpointing: CheckpointHandle = field(default_factory=lambda: CheckpointHandle("none"))
    scratch_dir: str | None = None

    def shrink_chunks(self) -> str | None:
        """Compute loss and MLP over fewer tokens at a time."""
        module = self.module
        tiles = [m for m in module.modules() if isinstance(m, FrugalGatedMLP)]
        small = module.chunk_tokens is not None and module.chunk_tokens <= SMALL_LOSS_CHUNK
        if small and all(m.tile_tokens is not None and m.tile_tokens <= SMALL_MLP_TILE for m in tiles):
            return None
        module.chunk_tokens = min(module.chunk_tokens or SMALL_LOSS_CHUNK, SMALL_LOSS_CHUNK)
        for mlp in tiles:
            mlp.tile_tokens = min(mlp.tile_tokens or SMALL_MLP_TILE, SMALL_MLP_TILE)
        return f"loss in chunks of {module.chunk_tokens} tokens, MLP in tiles of {SMALL_MLP_TILE}"

    def keep_less(self) -> str | None:
        """Checkpoint activations with the next leaner policy."""
        policy = _LEANER.get(self.checkpointing.policy)
        if policy == "offload" and next(self.module.parameters()).device.type != "cuda":
            policy = "disk"  # on a CPU the inputs would stay in the same memory
        if policy is None:
            return None
        self.checkpointing.close()
        self.checkpointing = apply_activation_checkpointing(self.module.model, policy, scratch_dir=self.scratch_dir)
        return f"memory.checkpoint: {policy}"

    def halve_rows(self) -> str | None:
        """Put half as many rows into a micro-batch."""
        if self.micro_batch_rows == 1 and self.eval_batch_rows == 1:
            return None
        self.micro_batch_rows = max(1, self.micro_batch_rows // 2)
        self.eval_batch_rows = max(1, self.eval_batch_rows // 2)
        return (
            f"{self.micro_batch_rows} rows a micro-batch, {self.eval_batch_rows} an evaluation batch, as many a step "
            "as before"
        )

    def close(self) -> None:
        """Undo checkpointing."""
        self.checkpointing.close()


@dataclass
class OutOfMemoryFallback:
    """Changes the memory settings of one run, one at a time."""

    memory: MemorySettings
    say: Callable[[str], None]
    advice: Callable[[], str] = lambda: ""
    """What would fit, for the error when nothing is left to change."""
    taken: list[str] = field(default_factory=list)
    """What was changed, in order."""

    def next(self, reason: str) -> None:
        """Make the next change that changes something. Raises MemoryBudgetError when there is none left."""
        memory = self.memory
        for change in (memory.shrink_chunks, memory.keep_less, memory.halve_rows):
            done = change()
            if done is not None:
                self.taken.append(done)
                self.say(f"out of memory ({_short(reason)}): {done}; the step is done again, with the same result")
                return
        tried = f" Tried: {', '.join(self.taken)}." if self.taken else ""
        raise MemoryBudgetError(f"the run does not fit: {_short(reason)}.{tried} {self.advice()}".rstrip())


def _short(reason: str) -> str:
    return reason.split(". ", 1)[0].strip() or "no reason given"
