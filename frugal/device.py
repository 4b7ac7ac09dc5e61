"""The device: what it can do, its memory, the dtype to compute in, and a table of GPUs. Nothing here runs at import."""

from __future__ import annotations

import difflib
import functools
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from frugal import host_memory
from frugal.decision import Decision
from frugal.errors import ConfigError, UnsupportedError
from frugal.units import GIB

BF16_FROM = (8, 0)
"""Compute capability from which NVIDIA GPUs have bfloat16 (and tensor cores that Triton uses)."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Device:
    """One device: one that a run computes on, or one that is only described and need not be here."""

    kind: str
    """torch's device type: cpu, cuda, mps, xpu."""
    index: int = 0
    name: str = ""
    total_bytes: int = 0
    """Memory of the device; of the machine for a CPU; 0 where nobody asked."""
    capability: tuple[int, int] | None = None
    """CUDA compute capability, for example (7, 5) for a T4; None where it does not apply or nobody can ask."""
    amd: bool = False
    """A ROCm build of torch, which calls its devices cuda."""
    here: bool = True
    """False: a plan's, and what is installed on this machine does not count."""

    def older_than(self, capability: tuple[int, int]) -> bool:
        """Known to be an NVIDIA GPU older than ``capability``."""
        return self.capability is not None and self.capability < capability

    @property
    def has_bf16(self) -> bool:
        """bfloat16 arithmetic in hardware: AMD's GPUs, and NVIDIA's from compute capability 8.0 on (7.5 only emulates
        it). False for CPUs, where it is 20 to 150 times slower than float32 without special instructions."""
        return self.kind == "cuda" and (self.amd or (self.capability is not None and not self.older_than(BF16_FROM)))

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

    def to_json(self) -> dict[str, Any]:
        """Plain values for manifests and `frugal doctor`."""
        kept = ("kind", "index", "name", "total_bytes", "capability", "has_bf16")
        return {key: getattr(self, key) for key in kept}

    @property
    def torch_device(self) -> torch.device:
        """The device as torch names it."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device("cuda", self.index)


def probe() -> Device:
    """The device this process would train on: the current CUDA device, else the CPU."""
    return describe("cuda" if torch.cuda.is_available() else "cpu")


def usable() -> Device:
    """`probe`, where this process can compute on it. Call this before any download.

    Raises UnsupportedError for a GPU that this torch has no kernels for, and for one that torch does not see although
    it is there: training would silently run on the CPU.
    """
    device = probe()
    reason = no_kernels(device) if device.kind == "cuda" else unseen_gpu()
    if reason is not None:
        raise UnsupportedError(reason)
    return device


def asked_for_cpu() -> bool:
    """Whether the environment says to leave GPUs alone, as CUDA and accelerate understand it."""
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    by_accelerate = os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes", "on")
    return by_accelerate or (hidden is not None and hidden.strip() in ("", "-1", "NoDevFiles"))


OLDEST_DRIVER = {11: 450, 12: 525, 13: 580}
"""CUDA's major version, of a torch build -> the oldest driver that runs it."""
_CPU_ALL_THE_SAME = "To use the CPU all the same, unset all GPUs: CUDA_VISIBLE_DEVICES= frugal ..."


def unseen_gpu() -> str | None:
    """What to do about an NVIDIA GPU of this machine that torch cannot use; None without one, or where the CPU was
    asked for."""
    if torch.cuda.is_available() or asked_for_cpu() or torch.version.hip is not None:
        return None
    found = _by_driver()
    if found is None:
        return None
    name, driver = found
    told = f"This machine has an NVIDIA GPU ({name}{f', driver {driver}' if driver else ''})"
    cuda = torch.version.cuda
    if cuda is None:
        return (
            f"{told}, and torch {torch.__version__} is a build without CUDA: the run would be on the CPU. Install "
            f"torch for CUDA (pytorch.org has the command). {_CPU_ALL_THE_SAME}"
        )
    needed = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    major = int(driver.split(".")[0]) if driver.split(".")[0].isdigit() else None
    if needed is not None and major is not None and major < needed:
        older = [version for version, oldest in OLDEST_DRIVER.items() if oldest <= major]
        other = f", or install a torch built for CUDA {max(older)} (pytorch.org has the command)" if older else ""
        return (
            f"{told}, and torch {torch.__version__} is built for CUDA {cuda}, which needs driver {needed} or later: "
            f"the run would be on the CPU. Update the driver{other}. {_CPU_ALL_THE_SAME}"
        )
    return (
        f"{told}, and torch {torch.__version__} (CUDA {cuda}) cannot start CUDA on it ({_why_not_started()}): the run "
        f"would be on the CPU. `nvidia-smi` must work here, in a container too (docker run --gpus all). "
        f"{_CPU_ALL_THE_SAME}"
    )


def _by_driver() -> tuple[str, str] | None:
    """(name, driver's version) of the first NVIDIA GPU, asked of the driver, not of torch; None without one."""
    tool = shutil.which("nvidia-smi")
    if tool is not None:
        asked = [tool, "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            done = subprocess.run(asked, capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.SubprocessError):
            return None
        first = next((line for line in done.stdout.splitlines() if line.count(",") == 1), None)
        # it answers with a complaint where there is a driver and no GPU
        return None if done.returncode or first is None else (first.split(",")[0].strip(), first.split(",")[1].strip())
    return ("/dev/nvidia0", "") if Path("/dev/nvidia0").exists() else None


def _why_not_started() -> str:
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).strip().split("\n", 1)[0][:200].rstrip(".") or type(error).__name__
    return "no reason given"


def no_kernels(device: Device) -> str | None:
    """Why this torch cannot compute on ``device``, a CUDA device that it sees; None when it can."""
    built = torch.cuda.get_arch_list()
    if device.capability is None or not built or any(_runs(arch, device.capability) for arch in built):
        return None
    older = "An older torch has them" if device.capability < (7, 5) else "A torch built for a newer CUDA has them"
    return (
        f"{device.name}{_capability(device)}: torch {torch.__version__} has no kernels for it, only for "
        f"{', '.join(built)}. {older} (pytorch.org lists which). {_CPU_ALL_THE_SAME}"
    )


def _runs(arch: str, capability: tuple[int, int]) -> bool:
    """Whether code built for ``arch`` runs on a GPU of ``capability``: binaries within the major version on the same or
    a later minor one (with the suffix a: on the same alone), PTX (compute_) on anything later."""
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
    if found is None:
        return False
    made = (int(found[2]), int(found[3]))
    if found[4] == "a":
        return made == capability
    return made <= capability if found[1] == "compute" else made[0] == capability[0] and made <= capability


def describe(device: torch.device | str) -> Device:
    """A device of this machine. A CUDA device that is not here has neither name, memory nor capability."""
    device = torch.device(device)
    if device.type == "cpu":
        return Device("cpu", 0, "CPU", host_memory.total_bytes())
    if device.type != "cuda":
        return Device(device.type, device.index or 0)
    amd = torch.version.hip is not None
    if not torch.cuda.is_available():
        return Device("cuda", device.index or 0, amd=amd)
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index, amd)


@functools.cache
def _cuda_device(index: int, amd: bool) -> Device:
    found = torch.cuda.get_device_properties(index)
    # AMD's devices report numbers of their own
    capability = None if amd else (found.major, found.minor)
    return Device("cuda", index, found.name, found.total_memory, capability, amd)


def needs_loss_scaling(compute: torch.dtype) -> bool:
    """float16 has 5 exponent bits: small gradients vanish unless the loss is scaled up first."""
    return compute is torch.float16


def resolve_dtype(asked: str, device: Device) -> Decision[torch.dtype]:
    """The dtype a run computes in on ``device``, for ``model.dtype``: auto, bfloat16, float16 or float32.

    Adapters and optimizer state are float32 whatever it is.

    Raises:
        UnsupportedError: bfloat16 was asked for by name on a GPU that has none. Call this before any download.
    """
    decided = partial(Decision[torch.dtype], "model.dtype")
    if asked == "auto":
        if device.kind == "cpu":
            return decided(torch.float32, "CPU: 16-bit matrix products are many times slower than float32")
        if device.has_bf16:
            return decided(torch.bfloat16, f"{device.name} has bfloat16")
        return decided(torch.float16, f"{device.name}{_capability(device)} has no bfloat16: float16 with loss scaling")
    dtype = _DTYPES.get(asked)
    if dtype is None:
        raise UnsupportedError(f"model.dtype is {asked!r}; allowed: auto, {', '.join(_DTYPES)}.")
    if dtype is torch.bfloat16 and device.kind == "cuda" and not device.has_bf16:
        raise UnsupportedError(
            f"model.dtype: bfloat16 was asked for, but {device.name}{_capability(device)} has no bfloat16 (compute "
            "capability 8.0 and later have it). Write `model.dtype: auto` (float16 with loss scaling here) or "
            "`model.dtype: float32` (slower, needs no scaling)."
        )
    slow = "; on a CPU many times slower than float32" if device.kind == "cpu" and dtype is not torch.float32 else ""
    return decided(dtype, f"asked for by model.dtype{slow}")


def _capability(device: Device) -> str:
    return "" if device.capability is None else f" (compute capability {device.capability[0]}.{device.capability[1]})"


# name -> (GiB, compute capability)
_TABLE: dict[str, tuple[float, tuple[int, int]]] = {
    "GTX 1660": (6, (7, 5)), "RTX 2060": (6, (7, 5)), "RTX 2070": (8, (7, 5)), "RTX 2080": (8, (7, 5)),
    "RTX 2080 Ti": (11, (7, 5)), "T4": (15, (7, 5)), "V100 16GB": (16, (7, 0)), "V100 32GB": (32, (7, 0)),
    "RTX 3050": (8, (8, 6)), "RTX 3060": (12, (8, 6)), "RTX 3060 Ti": (8, (8, 6)), "RTX 3070": (8, (8, 6)),
    "RTX 3080": (10, (8, 6)), "RTX 3080 12GB": (12, (8, 6)), "RTX 3090": (24, (8, 6)), "RTX A4000": (16, (8, 6)),
    "RTX A5000": (24, (8, 6)), "RTX A6000": (48, (8, 6)), "A10": (24, (8, 6)), "A10G": (22.5, (8, 6)),
    "A16": (16, (8, 6)), "A40": (48, (8, 6)), "A30": (24, (8, 0)), "A100 40GB": (40, (8, 0)),
    "A100 80GB": (80, (8, 0)), "RTX 4060": (8, (8, 9)), "RTX 4060 Ti 16GB": (16, (8, 9)), "RTX 4070": (12, (8, 9)),
    "RTX 4070 Ti Super": (16, (8, 9)), "RTX 4080": (16, (8, 9)), "RTX 4090": (24, (8, 9)), "L4": (22.5, (8, 9)),
    "L40S": (45, (8, 9)), "RTX 6000 Ada": (48, (8, 9)), "H100 80GB": (80, (9, 0)), "H200": (140, (9, 0)),
    "B200": (180, (10, 0)), "RTX 5060 Ti 16GB": (16, (12, 0)), "RTX 5070": (12, (12, 0)),
    "RTX 5070 Ti": (16, (12, 0)), "RTX 5080": (16, (12, 0)), "RTX 5090": (32, (12, 0)),
    "RTX PRO 6000": (96, (12, 0)),
}  # fmt: skip

GPUS: dict[str, Device] = {
    name: Device("cuda", 0, name, int(size * GIB), capability, here=False)
    for name, (size, capability) in _TABLE.items()
}
"""For plans made where the GPU is not. Memory as the driver reports it: for some less than the printed size."""


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_gpu(name: str) -> Device:
    """A GPU by its name, written loosely: "rtx3060", "NVIDIA GeForce RTX 3060", "a100" (the smaller one).

    Raises ConfigError naming close ones.
    """
    keys = {_key(known): gpu for known, gpu in GPUS.items()}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted]
    sized = sorted(
        (gpu.total_bytes, key) for key, gpu in keys.items() if re.fullmatch(re.escape(wanted) + r"\d+gb", key)
    )
    if sized and wanted:
        return keys[sized[0][1]]
    close = difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    shown = ", ".join(keys[key].name for key in close) or ", ".join(GPUS)
    raise ConfigError(f"--gpu {name!r} is not in the table. Close: {shown}. Any other: give its memory, --vram 12GB.")
