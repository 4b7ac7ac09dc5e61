"""What the simulated tensors leave out: stated allowances on the device, host memory and disk by purpose.

CUDA numbers are typical of NVIDIA drivers with torch 2.9 to 2.13 and were not measured here: a run notes its own peak
beside the forecast, which is how they are to be corrected. `docs/memory.md` says where each comes from.
"""

from __future__ import annotations

from dataclasses import dataclass

from frugal.memory.device_memory import CUDA_CONTEXT_BYTES
from frugal.memory.offload import SLAB_BYTES
from frugal.memory.space import Regions
from frugal.models.materialize import LoadedTensor

_MIB = 1 << 20
CUBLAS_WORKSPACE_BYTES = {True: 32 * _MIB, False: 9 * _MIB}  # compute capability 9.0 and later, earlier
NCCL_BYTES = 400 * _MIB  # buffers of one communicator: 200 to 500 over PCIe, more with NVLS
ROUNDING = 0.015  # blocks are cut to 512 bytes, segments to 2 MiB, and freed ones do not always fit the next
PROCESS_BYTES = {"cpu": 600 * _MIB, "cuda": 2300 * _MIB}  # resident memory of Python, torch (and CUDA's libraries)
MERGE_BLOCKS = 3  # one tensor of the base in its dtype, and fp32 blocks of it and of the update


def device_allowance(kind: str, capability: tuple[int, int] | None, peak_bytes: int, ranks: int = 1) -> dict[str, int]:
    """Bytes on the device besides tensors, by what they are; on a CPU they are the process itself."""
    if kind == "cpu":
        return {"process": PROCESS_BYTES["cpu"]}
    return {
        "context": CUDA_CONTEXT_BYTES,
        "cublas workspace": CUBLAS_WORKSPACE_BYTES[capability is None or capability >= (9, 0)],
        "rounding and fragmentation": int(ROUNDING * peak_bytes),
        **({"nccl": NCCL_BYTES} if ranks > 1 else {}),
    }


def tensor_budget(kind: str, capability: tuple[int, int] | None, total_bytes: int, ranks: int = 1) -> int:
    """Bytes that tensors may take on a device of ``total_bytes``: what `device_allowance` leaves."""
    fixed = sum(device_allowance(kind, capability, 0, ranks).values())
    return max(0, int((total_bytes - fixed) / (1.0 if kind == "cpu" else 1 + ROUNDING)))


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
    ranks: int = 1
    """Of the run on this machine."""


@dataclass(frozen=True)
class HostForecast:
    """Host memory and disk of a run, in bytes."""

    by_purpose: dict[str, int]
    """Host memory of one rank."""
    phases: dict[str, int]
    """Peak of all ranks of a machine in each phase."""
    disk: dict[str, int]

    @property
    def peak_bytes(self) -> int:
        """The highest phase."""
        return max(self.phases.values())


def forecast(sizes: Sizes, tensors: list[LoadedTensor]) -> HostForecast:
    """Host memory and disk of a run of these ``sizes`` that loads ``tensors``."""
    by_purpose = host_bytes(sizes, tensors)
    return HostForecast(by_purpose, host_phases(by_purpose, merge_bytes(tensors), sizes.ranks), disk_bytes(sizes))


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
