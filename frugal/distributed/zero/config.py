"""DeepSpeed's prerequisites, and its configuration for a run: what the launcher was given and what frugal decides.

frugal's configuration is the one that counts: batch sizes, accumulation, clipping, optimizer, schedule and dtypes are
its own. A launcher's file may repeat them, tune ZeRO's buckets and prefetching, and choose stage and offload; what
contradicts the run, or would change its arithmetic, is an error that names both sides.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

from frugal.errors import ConfigError, UnsupportedError

Given = dict[str, Any]
"""A DeepSpeed configuration as nested dictionaries, without what was left to `auto`."""

_TUNING = {
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "ignore_unused_parameters",
    "overlap_comm", "reduce_bucket_size", "reduce_scatter", "round_robin_gradients", "stage3_allgather_sequential",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold",
    "stage3_model_persistence_threshold", "stage3_prefetch_bucket_size", "sub_group_size",
    "use_multi_rank_bucket_allreduce",
}  # fmt: skip
"""Keys of `zero_optimization` that change speed and memory alone: taken over."""
_OURS = {
    "optimizer": "train.optim, train.learning_rate and train.weight_decay",
    "scheduler": "train.lr_scheduler_type and train.warmup_ratio",
}
_HARMLESS = {
    "steps_per_print", "wall_clock_breakdown", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization", "dump_state", "memory_breakdown",
}  # fmt: skip
_ZERO_HANDLED = {"stage", "offload_optimizer", "offload_param"}
_NO_MATTER = {
    "stage3_gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save", "load_from_fp32_weights",
    "elastic_checkpoint", "memory_efficient_linear",
}  # fmt: skip
"""Keys of `zero_optimization` about DeepSpeed's own files, which frugal does not write, and one that patches torch."""


OLDEST = "0.19.8"
"""The DeepSpeed that frugal was tried with; 0.19.0 cannot reduce the gradients of a window together."""
PIP = "pip install 'frugal-lora[deepspeed]'"
_BUILD_SECONDS = 600
_CHECK_SECONDS = 60


@dataclass(frozen=True)
class ZeroSettings:
    """What a run asks of DeepSpeed."""

    stage: int
    """1: optimizer state is partitioned, 2: gradients too, 3: parameters too."""
    micro_batch: int
    """Rows of a micro-batch on each rank."""
    accumulation: int
    """Micro-batches of an optimizer step on each rank."""
    max_grad_norm: float
    """0: no clipping."""
    offload_optimizer: bool = False
    """Master values and optimizer state in host memory, the update on the host."""
    offload_parameters: bool = False
    """Partitions of the parameters in host memory (stage 3)."""


def launched_with() -> Given | None:
    """The DeepSpeed configuration that `accelerate launch` was started with; None when it was started without one.

    Fields of accelerate's YAML (`zero_stage`, `offload_optimizer_device`, ...) reach a process as environment
    variables, a `deepspeed_config_file` as its path. Only what was given is in the result: accelerate's own defaults
    (1 accumulation step, clipping at 1.0) are not.

    Raises ConfigError for a file that cannot be read.
    """
    env = os.environ
    if env.get("ACCELERATE_USE_DEEPSPEED", "false").lower() != "true":
        return None
    path = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path.lower() != "none":
        return without_auto(_read_file(path))
    fields = {field.strip() for field in env.get("ACCELERATE_CONFIG_DS_FIELDS", "").split(",")}
    zero: Given = {"stage": int(env.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for key, device in (("offload_optimizer", "OFFLOAD_OPTIMIZER_DEVICE"), ("offload_param", "OFFLOAD_PARAM_DEVICE")):
        where = env.get(f"ACCELERATE_DEEPSPEED_{device}", "none").lower()
        if where != "none" or f"{key}_device" in fields:
            zero[key] = {"device": where}
    given: Given = {"zero_optimization": zero}
    clipping = env.get("ACCELERATE_GRADIENT_CLIPPING")
    if clipping not in (None, "auto", "none"):
        given["gradient_clipping"] = float(clipping)
    steps = env.get("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto")
    if steps.isdigit() and (int(steps) != 1 or "gradient_accumulation_steps" in fields):
        given["gradient_accumulation_steps"] = int(steps)
    return without_auto(given)


def _read_file(path: str) -> Given:
    """A JSON file, or, as accelerate allows too, its base64 text."""
    try:
        text = (
            Path(path).read_text(encoding="utf-8") if Path(path).exists() else base64.urlsafe_b64decode(path).decode()
        )
        found = json.loads(text)
    except (OSError, ValueError) as error:
        raise ConfigError(f"deepspeed_config_file {path} is not a JSON file that can be read: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"deepspeed_config_file {path} holds a {type(found).__name__}, expected an object")
    return found


def without_auto(given: Mapping[str, Any]) -> Given:
    """``given`` without values `auto` and without sections that are empty then."""
    kept: Given = {}
    for key, value in given.items():
        if isinstance(value, Mapping):
            inner = without_auto(value)
            if inner or not value:
                kept[key] = inner
        elif value != "auto" and value is not None:
            kept[key] = value
    return kept


def stage_of(given: Given) -> int:
    """The ZeRO stage of a launcher's configuration."""
    return int(given.get("zero_optimization", {}).get("stage", 0))


def offloads(given: Given) -> tuple[bool, bool]:
    """Whether a launcher's configuration puts (optimizer, parameters) into host memory."""
    zero = given.get("zero_optimization", {})
    return _device(zero, "offload_optimizer") == "cpu", _device(zero, "offload_param") == "cpu"


def _device(zero: Given, key: str) -> str:
    return str(zero.get(key, {}).get("device", "none")).lower()


def check_given(given: Given, settings: ZeroSettings, *, world_size: int) -> None:
    """Raise ConfigError, with all faults at once, when a launcher's configuration contradicts the run's."""
    faults = [*_contradictions(given, settings, world_size), *_not_ours(given)]
    if faults:
        raise ConfigError(
            "DeepSpeed's configuration, as given to the launcher, does not fit this run:\n  "
            + "\n  ".join(faults)
            + "\nSet the keys to auto or take them out: frugal fills them in."
        )


def _contradictions(given: Given, settings: ZeroSettings, world_size: int) -> list[str]:
    zero = given.get("zero_optimization", {})
    batch = settings.micro_batch * settings.accumulation * world_size
    rows: list[tuple[str, Any, Any, str]] = [
        ("zero_optimization.stage", zero.get("stage"), settings.stage, "distributed.strategy"),
        (
            "train_micro_batch_size_per_gpu",
            given.get("train_micro_batch_size_per_gpu"),
            settings.micro_batch,
            "train.per_device_train_batch_size",
        ),
        (
            "gradient_accumulation_steps",
            given.get("gradient_accumulation_steps"),
            settings.accumulation,
            "train.gradient_accumulation_steps",
        ),
        ("train_batch_size", given.get("train_batch_size"), batch, f"micro-batch x accumulation x {world_size} ranks"),
        ("gradient_clipping", given.get("gradient_clipping"), settings.max_grad_norm, "train.max_grad_norm"),
    ]
    faults = [f"{key} is {got}, {ours} is {want}" for key, got, want, ours in rows if got is not None and got != want]
    for key, wanted in (
        ("offload_optimizer", settings.offload_optimizer),
        ("offload_param", settings.offload_parameters),
    ):
        device = _device(zero, key)
        if device not in ("none", "cpu"):
            faults.append(f"zero_optimization.{key}.device is {device}: frugal offloads to cpu or not at all")
        elif key in zero and (device == "cpu") != wanted:
            ours = "cpu" if wanted else "none"
            faults.append(f"zero_optimization.{key}.device is {device}, distributed.offload makes it {ours}")
        extra = sorted(set(zero.get(key, {})) - {"device", "pin_memory", "nvme_path"})
        faults += [f"zero_optimization.{key}.{name}: not used by frugal" for name in extra]
    return faults


def _not_ours(given: Given) -> list[str]:
    """Faults about keys that would change the run's arithmetic, or that nothing here would honour."""
    faults = [f"{key}: the run has its own ({ours})" for key, ours in _OURS.items() if key in given]
    for key in ("fp16", "bf16"):
        if given.get(key, {}).get("enabled"):
            faults.append(f"{key}.enabled: it would cast adapters and stored weights; set model.dtype instead")
    known = {
        "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping",
        "fp16", "bf16", *_HARMLESS, *_OURS,
    }  # fmt: skip
    faults += [f"{key}: not used by frugal" for key in sorted(given.keys() - known)]
    allowed = _TUNING | _ZERO_HANDLED | _NO_MATTER
    foreign = sorted(given.get("zero_optimization", {}).keys() - allowed)
    return faults + [f"zero_optimization.{key}: not used by frugal" for key in foreign]


def engine_config(
    settings: ZeroSettings, given: Given | None, *, world_size: int, trained: int, layer: int, pin_memory: bool
) -> dict[str, Any]:
    """The configuration of the engine.

    ``trained``: elements of all trained parameters; ``layer``: elements, as stored, of the largest decoder layer. Both
    size what DeepSpeed would otherwise make as large as for full fine-tuning: a bucket of 500 million fp32 gradients,
    a billion live parameters. ``pin_memory``: whether host memory can be page-locked (there is a GPU).

    The engine is told one micro-batch a step: a window's micro-batches reach it as one (`Zero.accumulating`), and the
    loss has been divided already. Neither fp16 nor bf16 is enabled: the engine would cast every parameter, widening or
    rounding what is stored on purpose; so nothing is cast, and adapters, gradients and what is sent of them are fp32.
    """
    zero: dict[str, Any] = {
        "stage": settings.stage,
        "contiguous_gradients": True,
        "overlap_comm": settings.stage == 3,
        "reduce_bucket_size": max(1024, min(trained, 1 << 24)),
        "allgather_bucket_size": max(1024, min(trained, 1 << 26)),
        "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear in the whole process
    }
    if settings.stage == 3:
        zero.update(
            {
                # fetch one layer ahead, keep nothing for later: no rank holds more than two layers
                "stage3_prefetch_bucket_size": layer,
                "stage3_max_live_parameters": 2 * layer,
                "stage3_max_reuse_distance": 0,
                "stage3_param_persistence_threshold": 0,
            }
        )
    tuned = (given or {}).get("zero_optimization", {})
    zero.update({key: value for key, value in tuned.items() if key in _TUNING})
    host = {"device": "cpu", "pin_memory": pin_memory}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = dict(host)
    if settings.offload_parameters:
        zero["offload_param"] = dict(host)
    return {
        "train_micro_batch_size_per_gpu": settings.micro_batch,
        "gradient_accumulation_steps": 1,
        "train_batch_size": settings.micro_batch * world_size,
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # torch's AdamW, not one that is compiled at the start
        "fp16": {"enabled": False},
        "bf16": {"enabled": False},
    }


# ---- prerequisites ---------------------------------------------------------------------------------------------------


def require_deepspeed(device: torch.device) -> None:
    """Raise UnsupportedError, saying what to install or set, unless DeepSpeed can train on ``device``."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UnsupportedError(
            f"distributed.strategy: zero needs DeepSpeed, which is not installed: {PIP} (torch must be there first). "
            "distributed.strategy: fsdp2 shards the same without it."
        )
    version = importlib.metadata.version("deepspeed")
    if Version(version) < Version(OLDEST):
        raise UnsupportedError(f"DeepSpeed {version} is installed, frugal needs {OLDEST} or newer: {PIP} --upgrade")
    if not torch.distributed.is_initialized():
        raise UnsupportedError(
            "distributed.strategy: zero shares a run between processes: start it with `accelerate launch` or torchrun."
        )
    chosen = os.environ.get("DS_ACCELERATOR")
    if chosen is not None and chosen != device.type:
        raise UnsupportedError(
            f"DS_ACCELERATOR={chosen} in the environment, and this run computes on {device.type}: unset it, or set it "
            f"to {device.type}."
        )
    if device.type == "cpu":
        _require_compiler()
    else:
        import_deepspeed()  # now, before a base is loaded


def import_deepspeed() -> Any:
    """The package. With a GPU in sight parts of it look for CUDA's toolkit when they are imported, which torch's own
    wheels do not bring.

    Raises UnsupportedError with what to install, whatever importing raises.
    """
    with told():
        return importlib.import_module("deepspeed")


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Around DeepSpeed's own code that looks for compilers: what it raises becomes one message with the way out."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()}".rstrip(": ").split("\n", 1)[0][:300].rstrip(".")
        if isinstance(error, ImportError) or any(word in text.lower() for word in _TOOLKIT):
            raise UnsupportedError(
                f"DeepSpeed cannot start here ({text}). With a GPU it needs CUDA's toolkit, whose compiler is nvcc, in "
                f"the version of torch's CUDA ({torch.version.cuda or 'none'}): install it and set CUDA_HOME. "
                "distributed.strategy: fsdp2 shards the same with torch alone."
            ) from error
        raise


_TOOLKIT = ("missingcuda", "cuda_home", "nvcc", "cuda toolkit", "cudamismatch", "ninja")


def _require_compiler() -> None:
    """On CPUs DeepSpeed compiles one operation (one to two minutes) before its first start."""
    from torch.utils.cpp_extension import get_default_build_root  # it imports setuptools: only where it is needed

    place = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root())
    folders = [found.parent for found in place.glob("**/deepspeed_shm_comm/*") if found.name in ("lock", "build.ninja")]
    built = any(next(folder.glob("*.so"), None) is not None for folder in folders)
    compiler = os.environ.get("CXX", "c++")
    if not built and shutil.which(compiler) is None:
        raise UnsupportedError(
            f"DeepSpeed on a CPU compiles an operation at its first start and needs a C++ compiler; {compiler} was not "
            "found. Install one (g++ or clang++), or use distributed.strategy: fsdp2."
        )
    for folder in set(folders):
        _refuse_left_lock(folder / "lock", built=built)


def _refuse_left_lock(lock: Path, *, built: bool) -> None:
    """Every start takes the lock, for seconds once the operation is built; one that nobody gives back is waited for
    without end inside torch, so it is waited for here."""
    limit = _CHECK_SECONDS if built else _BUILD_SECONDS
    while lock.exists():
        with contextlib.suppress(FileNotFoundError):
            age = time.time() - lock.stat().st_mtime
            if age > limit:
                raise UnsupportedError(
                    f"{lock} is left from a start of DeepSpeed that was killed, and every later start waits for it: "
                    "delete that file."
                )
        if not built:  # another process may be compiling
            return
        time.sleep(0.5)
