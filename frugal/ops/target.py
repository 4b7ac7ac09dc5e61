"""What a device can run, as a value: the facts that every choice of an implementation starts from."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass

import torch

OLDEST = (7, 5)  # Triton compiles for nothing older
TENSOR_CORES_IN_TRITON = (8, 0)
# What benchmarks/kernels_aot.py compiles; attention, which is built on tensor cores, from the second on.
COMPILED_FOR = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_NORM_COLUMNS = 8192  # of RMSNorm: a row lives in registers, and longer ones spill in backward
MAX_HEAD_SIZE = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # of attention


@dataclass(frozen=True)
class Target:
    """A kind of device. ``capability`` is None where it does not apply or nobody can ask."""

    kind: str
    """torch's device type: cpu, cuda, mps, xpu."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability."""
    amd: bool = False
    """A ROCm build of torch, which calls its devices cuda."""
    name: str = ""
    simulated: bool = False
    """Stands for a device that is not here: what is installed on this machine does not count."""

    @property
    def label(self) -> str:
        """sm_86 and the like; else the kind."""
        if self.amd:
            return "rocm"
        return self.kind if self.capability is None else f"sm_{self.capability[0]}{self.capability[1]}"

    @property
    def mig(self) -> bool:
        """A slice of a GPU (NVIDIA Multi-Instance GPU)."""
        return " MIG " in f"{self.name} "

    def older_than(self, capability: tuple[int, int]) -> bool:
        """Known to be an older NVIDIA GPU than ``capability``."""
        return not self.amd and self.capability is not None and self.capability < capability


def target_of(device: torch.device | str) -> Target:
    """The target of a device of this machine. A CUDA device that is not here has no capability."""
    device = torch.device(device)
    if device.type != "cuda":
        return Target(device.type)
    amd = torch.version.hip is not None
    if not torch.cuda.is_available():
        return Target("cuda", amd=amd)
    return _cuda_target(torch.cuda.current_device() if device.index is None else device.index, amd)


@functools.cache
def _cuda_target(index: int, amd: bool) -> Target:
    properties = torch.cuda.get_device_properties(index)
    return Target("cuda", None if amd else (properties.major, properties.minor), amd, properties.name)


def no_triton(target: Target, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel runs on ``target`` in ``dtype``; None when element-wise ones do."""
    if target.kind != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, this device is {target.kind}"
    if target.amd:
        return "not supported on ROCm: the kernels compile for gfx1100, but no AMD GPU ever ran them"
    if target.capability is None:
        return "no CUDA device here whose compute capability could be asked for"
    if target.capability < OLDEST:
        return f"not supported on {target.label}: Triton compiles for sm_75 and later"
    if dtype is torch.bfloat16 and target.capability < TENSOR_CORES_IN_TRITON:
        return f"bfloat16 is only emulated on {target.label}: use float16"
    return None if target.simulated else triton_missing()


def no_tensor_cores(target: Target) -> str | None:
    """Why a kernel built around matrix products must not run on ``target``; None when it may."""
    if target.older_than(TENSOR_CORES_IN_TRITON):
        return (
            f"{target.label} has no tensor-core path in Triton (tl.dot becomes single multiply-adds): matrix products "
            "are cuBLAS there"
        )
    return None


def triton_missing() -> str | None:
    """Why no kernel can be used in this environment whatever the device; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; wheels exist for Linux on x86-64)"
    return None


def attention_size_refusal(head_size: int, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot serve a head size or dtype; None when they can."""
    if dtype not in MAX_HEAD_SIZE:
        return f"dtype {dtype}: the attention kernels take float16, bfloat16 and float32"
    if head_size > MAX_HEAD_SIZE[dtype]:
        return f"head size {head_size} in {dtype}: tiles of more than {MAX_HEAD_SIZE[dtype]} columns do not fit a GPU"
    return None
