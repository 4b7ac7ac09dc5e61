"""The table of operations: which implementations there are, best first, and what each cannot do.

For attention, from compute capability 8.0 on: for a single document without window or soft cap
scaled_dot_product_attention, whose flash kernel is given a few heads at a time in backward; else flash-attn when the
user installed it (its kernels are tuned on GPUs, ours were compiled and interpreted only); our packed kernel
otherwise, because several documents are one launch. Below 8.0, where Triton has no tensor cores:
scaled_dot_product_attention's memory-efficient kernel, document by document. These are rules, not measurements;
`benchmarks/gpu.py` measures.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from frugal.device import Device

Facts = Mapping[str, Any]
"""device, dtype, and what the operation knows: window, softcap, head_size, columns, ..."""
Check = Callable[[Facts], str | None]
"""A reason against an implementation; None when nothing stands against it."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ANY_DEVICE: tuple[str, ...] = ()


def _never(facts: Facts) -> str | None:
    return None


@dataclass(frozen=True)
class Implementation:
    """One row: an implementation of one operation and what it can do."""

    name: str
    why: str
    devices: tuple[str, ...] = ANY_DEVICE
    dtypes: tuple[torch.dtype, ...] = FLOATS
    refuse: Check = _never
    limits: Check = _never
    """What it cannot do on any device: it falls back to the next row then also where it was asked for by name."""
    yields: Check = _never
    """Why a later row is preferred although this one could serve."""
    module: str = ""
    """Registers the callable when it is imported, which is when the row is first taken: Triton is optional."""

    def refusal(self, device: str, dtype: torch.dtype, facts: Facts) -> str | None:
        """Why this row cannot serve the request; None when it can."""
        if self.devices and device not in self.devices:
            return f"device {device}: only {', '.join(self.devices)}"
        if dtype not in self.dtypes:
            return f"dtype {dtype}: only {', '.join(str(d) for d in self.dtypes)}"
        return self.limits(facts) or self.refuse(facts)


OLDEST = (7, 5)  # Triton compiles for nothing older
TENSOR_CORES_IN_TRITON = (8, 0)
# What benchmarks/kernels_aot.py compiles; attention, which is built on tensor cores, from the second on.
COMPILED_FOR = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
MAX_NORM_COLUMNS = 8192  # of RMSNorm: a row lives in registers, and longer ones spill in backward
MAX_HEAD_SIZE = {torch.float16: 256, torch.bfloat16: 256, torch.float32: 128}  # of attention


FLASH_MAX_HEAD_SIZE = 256
FLASH_DTYPES = (torch.float16, torch.bfloat16)


def triton_refusal(facts: Facts) -> str | None:
    """What our packed kernels cannot do."""
    device, dtype = facts["device"], facts["dtype"]
    size = facts.get("head_size") or 0
    return attention_size_refusal(size, dtype) or no_triton(device, dtype) or no_tensor_cores(device)


def _sdpa_preferred(why: str) -> Check:
    """``why`` where a packed kernel could run, but a single document goes to scaled_dot_product_attention."""
    return lambda facts: why if facts.get("documents") == 1 and sdpa_refusal(facts) is None else None


def sdpa_refusal(facts: Facts) -> str | None:
    """What scaled_dot_product_attention cannot do without an [S, S] mask or [S, S] scores."""
    if facts.get("softcap") is not None:
        return "scaled_dot_product_attention has no soft cap"
    if facts.get("window") is not None:
        return "scaled_dot_product_attention has no window without an [S, S] mask"
    size = facts.get("head_size")
    if facts["device"].kind == "cuda" and size and size * facts["dtype"].itemsize % 16:
        return f"head size {size}: CUDA backends without [S, S] scores need heads of a multiple of 16 bytes"
    return None


def flash_attn_refusal(facts: Facts) -> str | None:
    """What flash-attn cannot do."""
    device: Device = facts["device"]
    size = facts.get("head_size") or 0
    if device.amd:
        return "not supported on ROCm: never tried"
    if device.capability is None:
        return "no CUDA device here whose compute capability could be asked for"
    if device.older_than((8, 0)):
        return f"flash-attn 2 needs compute capability 8.0, this is {device.label}"
    if size > FLASH_MAX_HEAD_SIZE or size % 8:
        return f"head size {size}: flash-attn takes multiples of 8 up to {FLASH_MAX_HEAD_SIZE}"
    return flash_attn_missing()


@functools.cache
def flash_attn_missing() -> str | None:
    """Why the package cannot be used; None when it can."""
    from frugal.ops.attention.flash_attn import load  # its package's operation imports this table

    function, reason = load()
    return None if function is not None else reason


def no_triton(device: Device, dtype: torch.dtype) -> str | None:
    """Why no Triton kernel runs on ``device`` in ``dtype``; None when element-wise ones do."""
    if device.kind != "cuda":
        return f"Triton kernels run on NVIDIA GPUs, this device is {device.kind}"
    if device.amd:
        return "not supported on ROCm: the kernels compile for gfx1100, but no AMD GPU ever ran them"
    if device.capability is None:
        return "no CUDA device here whose compute capability could be asked for"
    if device.older_than(OLDEST):
        return f"not supported on {device.label}: Triton compiles for sm_75 and later"
    if dtype is torch.bfloat16 and not device.has_bf16:
        return f"bfloat16 is only emulated on {device.label}: use float16"
    if not device.here:
        return None
    return triton_missing() or (launch_refusal(device.index) if torch.cuda.is_available() else None)


def no_tensor_cores(device: Device) -> str | None:
    """Why a kernel built around matrix products must not run on ``device``; None when it may."""
    if device.older_than(TENSOR_CORES_IN_TRITON):
        return (
            f"{device.label} has no tensor-core path in Triton (tl.dot becomes single multiply-adds): matrix products "
            "are cuBLAS there"
        )
    return None


def triton_missing() -> str | None:
    """Why no kernel can be used in this environment whatever the device; None when they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install triton; wheels exist for Linux on x86-64)"
    return None


@functools.cache
def launch_refusal(index: int) -> str | None:
    """Why no kernel can be launched on CUDA device ``index`` of this machine; None when one was.

    A launch is tried, once a process, before a run loads its base: what is missing (a C compiler, Python's headers, a
    cache folder) is seen by nothing else, and would end a run at its first kernel.
    """
    try:
        importlib.import_module("frugal.ops.first_launch").launch_once(index)
    except Exception as error:  # whatever compiler, driver and loader raise: kernels are not needed, and it is said
        return _no_launch(error)
    return None


_WAYS_OUT = (
    (
        ("c compiler", "python.h", "gcc", "clang", "cc1", "calledprocesserror"),
        "Triton compiles a small C module at its first launch: install a C compiler and Python's headers "
        "(apt install gcc python3-dev), or set CC",
    ),
    (
        ("permission", "read-only", "no space left", "cache"),
        "Triton's cache folder must be writable and have room: set TRITON_CACHE_DIR to a folder that is",
    ),
    (("libcuda", "ldconfig"), "Triton looks for libcuda.so through ldconfig: install the driver's library, or set "
     "TRITON_LIBCUDA_PATH"),
)  # fmt: skip


def _no_launch(error: Exception) -> str:
    told = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ")
    ways = [way for words, way in _WAYS_OUT if any(word in told.lower() for word in words)]
    first_line = told.split("\n", 1)[0][:300].rstrip(".")
    return f"no Triton kernel can be launched here: {first_line}. {ways[0] if ways else _ANY_WAY}"


_ANY_WAY = "Look at the versions of triton, torch and the driver (frugal doctor)"


def attention_size_refusal(head_size: int, dtype: torch.dtype) -> str | None:
    """Why the attention kernels cannot serve a head size or dtype; None when they can."""
    if dtype not in MAX_HEAD_SIZE:
        return f"dtype {dtype}: the attention kernels take float16, bfloat16 and float32"
    if head_size > MAX_HEAD_SIZE[dtype]:
        return f"head size {head_size} in {dtype}: tiles of more than {MAX_HEAD_SIZE[dtype]} columns do not fit a GPU"
    return None


def _kernel_refusal(facts: Facts) -> str | None:
    return no_triton(facts["device"], facts["dtype"])


def _triton(folder: str, why: str, limits: Check = _never) -> Implementation:
    return Implementation(
        "triton", why, devices=("cuda",), dtypes=KERNEL_DTYPES, refuse=_kernel_refusal, limits=limits,
        module=f"frugal.ops.{folder}.triton",
    )  # fmt: skip


def _norm_limits(facts: Facts) -> str | None:
    columns = facts.get("columns", 0)
    return (
        f"{columns} columns: the kernel holds rows of at most {MAX_NORM_COLUMNS}"
        if columns > MAX_NORM_COLUMNS
        else None
    )


def _loss_limits(facts: Facts) -> str | None:
    return facts.get("fp32_logits")


def _update_limits(facts: Facts) -> str | None:
    columns = facts.get("columns", 0)
    return f"{columns} columns are no multiple of 64" if columns % 64 else None


def cpu_flash_refusal(facts: Facts) -> str | None:
    """What torch's CPU flash attention cannot do."""
    if facts.get("softcap") is not None:
        return "torch's CPU flash attention has no soft cap"
    if not facts.get("causal", True) and facts.get("window") is not None:
        return "a window without causality"
    return None


def _lora_refusal(facts: Facts) -> str | None:
    if facts.get("use_dora"):
        return "DoRA's norm term needs the merged weight: left to PEFT"
    return None


_REFERENCE = Implementation("reference", "plain and slow: the definition the others are compared with")
_TORCH = "autograd function that saves little; any device"

ROWS: dict[str, tuple[Implementation, ...]] = {
    "linear_cross_entropy": (
        _triton(
            "linear_cross_entropy",
            "chunks as in torch; loss and gradient of a chunk in one launch, in place, each logit read once",
            _loss_limits,
        ),
        Implementation("torch", "chunks of tokens, gradients taken chunk by chunk; never all logits"),
        _REFERENCE,
    ),
    "attention": (
        Implementation(
            "flash_attn",
            "flash-attn is installed: packed documents in one launch, tuned kernels",
            devices=("cuda",),
            dtypes=FLASH_DTYPES,
            refuse=flash_attn_refusal,
            yields=_sdpa_preferred(
                "one document without window or cap: torch's flash kernel is the same, and takes a few heads at a time"
            ),
        ),
        Implementation(
            "triton",
            "packed documents in one launch, window and soft cap included",
            devices=("cuda",),
            dtypes=KERNEL_DTYPES,
            refuse=triton_refusal,
            yields=_sdpa_preferred(
                "one document without window or cap: scaled_dot_product_attention is one launch too, of a tuned kernel"
            ),
        ),
        Implementation(
            "cpu_flash",
            "torch's CPU flash attention, by document; a window by blocks of rows",
            devices=("cpu",),
            refuse=cpu_flash_refusal,
        ),
        Implementation(
            "sdpa",
            "the best scaled_dot_product_attention backend, document by document",
            devices=("cuda", "xpu", "mps", "cpu"),
            refuse=sdpa_refusal,
        ),
        Implementation("blockwise", "online softmax over blocks of keys, recomputed in backward; any device"),
        _REFERENCE,
    ),
    "lora_linear": (
        Implementation("torch", _TORCH, refuse=_lora_refusal),
        Implementation("reference", "plain linear plus low-rank update", refuse=_lora_refusal),
    ),
    "gated_mlp": (
        _triton("gated_mlp", "tiles as in torch; activation, product and their gradients fused and in place"),
        Implementation("torch", _TORCH),
        _REFERENCE,
    ),
    "experts": (
        Implementation("torch", "tokens sorted by expert, one expert decoded at a time; any device"),
        _REFERENCE,
    ),
    "rms_norm": (
        _triton("rms_norm", "one pass over the row", _norm_limits),
        Implementation("torch", _TORCH),
        _REFERENCE,
    ),
    "rope": (_triton("rope", "rotates q and k in one launch"), Implementation("torch", _TORCH), _REFERENCE),
    "nf4_rows": (
        _triton("weights", "codes and both levels of scales in one launch"),
        Implementation("torch", "bitsandbytes' kernel on GPUs, a table of value pairs on CPUs"),
    ),
    "nf4_rows_with_update": (
        _triton("weights", "codes, scales and the adapter's product in one launch", _update_limits),
        Implementation("torch", "rows of nf4_rows, then a product added in place"),
    ),
    "adam8bit": (
        _triton("adam8bit", "parameter, gradient, moments and scales in one launch; each moment gets its nearest code"),
        Implementation("bitsandbytes", "bitsandbytes' operation: the numbers of its optimizer", dtypes=KERNEL_DTYPES),
    ),
}
PARAMETER_OPS = ("adam8bit",)
"""Work on trained parameters, which are float32 whatever a run computes in."""
