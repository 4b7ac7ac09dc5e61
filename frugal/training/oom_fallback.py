"""Out of memory: the next cheaper way to compute the same thing, and the same step again.

The order is fixed. On a CPU: smaller chunks of the loss and tiles of the MLP, then checkpointing (recompute, disk),
then fewer rows in a micro-batch with the same rows in a step. On a GPU every tile and chunk launches its kernels and
dequantises its weights again (tiles of 64 tokens make a step five times as long), while offloading hides behind
products: there first the same once more with the cache emptied, which cures what only fragmentation caused; then
checkpointing (recompute, offload), halved tiles and chunks, fewer rows, and small tiles at the very end. Disk is for a
host that is full. None changes what is computed: the rows of a step, the loss and the gradients stay those of the
configuration, up to the order of sums.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from frugal.errors import MemoryBudgetError
from frugal.memory.checkpointing import CheckpointHandle, Policy, apply_activation_checkpointing
from frugal.memory.space import Shortage
from frugal.models.modules.fused import FrugalGatedMLP
from frugal.objectives import LossModule
from frugal.ops.gated_mlp import most_tile_tokens
from frugal.ops.linear_cross_entropy import chunk_tokens_for

HALVED_TO = 256
"""Tokens of tiles and chunks on a GPU before anything else is given up."""
MOST_REPEATS = 3
"""Steps that may be done once more for an emptied cache alone; after those, memory is too short."""
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
    tokens: int = 0
    """Of the largest training micro-batch as configured; 0: not known."""

    @property
    def on_cuda(self) -> bool:
        """Whether a step runs on a GPU."""
        return next(self.module.parameters()).device.type == "cuda"

    def _tiles(self) -> list[FrugalGatedMLP]:
        return [module for module in self.module.modules() if isinstance(module, FrugalGatedMLP)]

    def halve_chunks(self) -> str | None:
        """Compute loss and MLP over half as many tokens at a time, never fewer than `HALVED_TO`."""
        module, tiles = self.module, self._tiles()
        table = cast(Any, module.model).get_input_embeddings().weight
        on_cpu, most = not self.on_cuda, self.tokens or sys.maxsize
        chunk = min(most, module.chunk_tokens or chunk_tokens_for(table.shape[0], 4, on_cpu=on_cpu))
        widths = [cast(int, mlp.get_submodule(mlp.down_name).in_features) for mlp in tiles]
        sizes = [
            min(most, mlp.tile_tokens or most_tile_tokens(width, table.dtype.itemsize, on_cpu=on_cpu))
            for mlp, width in zip(tiles, widths, strict=True)
        ]
        if max([chunk, *sizes]) <= HALVED_TO:
            return None
        module.chunk_tokens = max(min(chunk, HALVED_TO), chunk // 2)
        for mlp, size in zip(tiles, sizes, strict=True):
            mlp.tile_tokens = max(min(size, HALVED_TO), size // 2)
        largest = max((mlp.tile_tokens or 0 for mlp in tiles), default=0)
        return f"loss in chunks of {module.chunk_tokens} tokens, MLP in tiles of {largest}"

    def shrink_chunks(self) -> str | None:
        """Compute loss and MLP over fewer tokens at a time."""
        module = self.module
        tiles = self._tiles()
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
        if policy == "offload" and not self.on_cuda:
            policy = "disk"  # on a CPU the inputs would stay in the same memory
        if policy == "disk" and self.on_cuda:
            return None  # takes from the host, not from the device
        return self._keep(policy)

    def leave_host(self) -> str | None:
        """Keep offloaded inputs in a scratch file instead of host memory."""
        return self._keep("disk") if self.checkpointing.policy == "offload" else None

    def _keep(self, policy: Policy | None) -> str | None:
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
    repeats: int = 0
    """Times that a step was done once more with the same settings."""

    def next(self, shortage: Shortage) -> None:
        """Make the next change that changes something. Raises MemoryBudgetError when there is none left."""
        reason = shortage.reason
        if self.memory.on_cuda and shortage.first and not shortage.host and self.repeats < MOST_REPEATS:
            self.repeats += 1
            self.say(f"out of memory ({_short(reason)}): the step is done once more with the device's cache emptied")
            return
        for change in self._changes(shortage.host):
            done = change()
            if done is not None:
                self.taken.append(done)
                self.say(f"out of memory ({_short(reason)}): {done}; the step is done again, with the same result")
                return
        tried = f" Tried: {', '.join(self.taken)}." if self.taken else ""
        raise MemoryBudgetError(f"the run does not fit: {_short(reason)}.{tried} {self.advice()}".rstrip())

    def _changes(self, host: bool) -> list[Callable[[], str | None]]:
        memory = self.memory
        if not memory.on_cuda:
            return [memory.shrink_chunks, memory.keep_less, memory.halve_rows]
        if host:
            return [memory.leave_host, memory.halve_rows]
        return [memory.keep_less, memory.halve_chunks, memory.halve_rows, memory.shrink_chunks]


def _short(reason: str) -> str:
    return reason.split(". ", 1)[0].strip() or "no reason given"
