"""What a simulation cannot see, as stated allowances: never hidden in a forecast, always a line of their own.

CUDA numbers are typical of NVIDIA drivers with torch 2.9 to 2.13 and were not measured here: a run notes its own peak
beside the forecast, which is how they are to be corrected. `docs/memory.md` says where each comes from.
"""

from __future__ import annotations

_MIB = 1 << 20
CUDA_CONTEXT_BYTES = 550 * _MIB  # context and loaded kernels of torch, cuBLAS and bitsandbytes
CUBLAS_WORKSPACE_BYTES = {True: 32 * _MIB, False: 9 * _MIB}  # compute capability 9.0 and later, earlier
ROUNDING = 0.015  # blocks are cut to 512 bytes, segments to 2 MiB, and freed ones do not always fit the next
PROCESS_BYTES = {"cpu": 600 * _MIB, "cuda": 2300 * _MIB}  # resident memory of Python, torch (and CUDA's libraries)


def device_allowance(kind: str, capability: tuple[int, int] | None, peak_bytes: int) -> dict[str, int]:
    """Bytes on the device besides tensors, by what they are; on a CPU they are the process itself."""
    if kind == "cpu":
        return {"process": PROCESS_BYTES["cpu"]}
    return {
        "context": CUDA_CONTEXT_BYTES,
        "cublas workspace": CUBLAS_WORKSPACE_BYTES[capability is None or capability >= (9, 0)],
        "rounding and fragmentation": int(ROUNDING * peak_bytes),
    }


def tensor_budget(kind: str, capability: tuple[int, int] | None, total_bytes: int) -> int:
    """Bytes that tensors may take on a device of ``total_bytes``: what `device_allowance` leaves."""
    fixed = sum(device_allowance(kind, capability, 0).values())
    return max(0, int((total_bytes - fixed) / (1.0 if kind == "cpu" else 1 + ROUNDING)))
