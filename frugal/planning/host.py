"""Host memory and disk of a run, from sizes: what is pinned, read, written, and when."""

from __future__ import annotations

from dataclasses import dataclass

from frugal.memory.offload import SLAB_BYTES
from frugal.memory.space import Regions
from frugal.models.materialize import LoadedTensor
from frugal.planning.overhead import PROCESS_BYTES

MERGE_BLOCKS = 3  # one tensor of the base in its dtype, and fp32 blocks of it and of the update


@dataclass(frozen=True)
class Sizes:
    """What host and disk depend on."""

    kind: str
    layers: int
    hidden_size: int
    itemsize: int
    """Bytes of one element of a hidden state."""
    tokens: int
    """Of one micro-batch."""
    policy: str
    trained_bytes: int
    checkpoint_bytes: int
    kept_checkpoints: int
    base_parameters: int
    dataset_bytes: int = 0
    embedding_bytes: int = 0
    """Of an embedding table that waits on the host."""
    shards_bytes: int = 0
    """Of a rank's shards and optimizer state that rest on the host."""


def offloaded_bytes(sizes: Sizes) -> int:
    """Pinned slabs that hold the stored inputs, as `frugal.memory.offload` takes them."""
    buffers, each = stored_inputs(sizes)
    return -(-buffers * Regions.rounded(each) // SLAB_BYTES) * SLAB_BYTES


def stored_inputs(sizes: Sizes) -> tuple[int, int]:
    """(buffers, bytes of each) for the inputs of all layers but the last, which stays on the device."""
    return max(0, sizes.layers - 1), sizes.tokens * sizes.hidden_size * sizes.itemsize


def host_bytes(sizes: Sizes, parts: list[LoadedTensor]) -> dict[str, int]:
    """Host memory by purpose. On a CPU run tensors are counted with the device, and this is what comes on top."""
    on_gpu = sizes.kind != "cpu"
    largest = max((part.read_bytes for part in parts), default=0)
    return {
        "process": PROCESS_BYTES[sizes.kind] if on_gpu else 0,
        "largest tensor while loading": largest if on_gpu else 0,
        "offloaded layer inputs": offloaded_bytes(sizes) if on_gpu and sizes.policy == "offload" else 0,
        "embedding table": sizes.embedding_bytes,
        "shards": sizes.shards_bytes,
        "data": sizes.dataset_bytes,
        "checkpoint being written": sizes.checkpoint_bytes if on_gpu else 0,
    }


def host_phases(by_purpose: dict[str, int], merge_bytes: int, ranks: int = 1) -> dict[str, int]:
    """Peak of host memory in each phase, of ``ranks`` processes on one machine; the first one alone writes."""
    rest = by_purpose["process"] + by_purpose["data"] + by_purpose["embedding table"] + by_purpose["shards"]
    step = ranks * (rest + by_purpose["offloaded layer inputs"])
    return {
        "load": ranks * (rest + by_purpose["largest tensor while loading"]),
        "step": step,
        "save": step + by_purpose["checkpoint being written"],
        "merge": by_purpose["process"] + merge_bytes,
    }


def merge_bytes(parts: list[LoadedTensor]) -> int:
    """Host memory of a merge besides the process: one tensor at a time."""
    return MERGE_BLOCKS * max((part.read_bytes for part in parts), default=0)


def disk_bytes(sizes: Sizes) -> dict[str, int]:
    """Disk by purpose."""
    buffers, each = stored_inputs(sizes)
    return {
        "checkpoints": sizes.checkpoint_bytes * (sizes.kept_checkpoints + 1),
        "scratch": buffers * Regions.rounded(each) if sizes.policy == "disk" else 0,
        "adapter": sizes.trained_bytes,
        "merged export": 2 * sizes.base_parameters,
    }
