"""What a launcher's DeepSpeed configuration may say, and what makes DeepSpeed impossible here. Needs no DeepSpeed."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.distributed.zero import config as zero_config
from frugal.distributed.zero.config import (
    ZeroSettings,
    check_given,
    engine_config,
    launched_with,
    offloads,
    stage_of,
    without_auto,
)
from frugal.errors import ConfigError, UnsupportedError

THREE = ZeroSettings(stage=3, micro_batch=2, accumulation=4, max_grad_norm=1.0)
CPU = torch.device("cpu")


def refused(given: dict[str, Any], settings: ZeroSettings = THREE, world_size: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        check_given(given, settings, world_size=world_size)
    return str(caught.value)


def test_what_repeats_the_run_is_taken() -> None:
    check_given(
        {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": 4,
            "train_batch_size": 16,
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
            "fp16": {"enabled": False},
            "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7, "offload_param": {"device": "none"}},
        },
        THREE,
        world_size=2,
    )


def test_all_contradictions_at_once_with_both_sides() -> None:
    message = refused(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 8,
            "train_batch_size": 17,
            "gradient_clipping": 0.3,
            "optimizer": {"type": "AdamW"},
            "scheduler": {"type": "WarmupLR"},
            "bf16": {"enabled": True},
            "amp": {"enabled": True},
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {"device": "cpu", "ratio": 0.5},
                "offload_param": {"device": "nvme"},
                "zero_quantized_weights": True,
            },
        }
    )
    for part in (
        "zero_optimization.stage is 2, distributed.strategy is 3",
        "train_micro_batch_size_per_gpu is 1, train.per_device_train_batch_size is 2",
        "gradient_accumulation_steps is 8, train.gradient_accumulation_steps is 4",
        "train_batch_size is 17, micro-batch x accumulation x 2 ranks is 16",
        "gradient_clipping is 0.3, train.max_grad_norm is 1.0",
        "optimizer: the run has its own (train.optim",
        "scheduler: the run has its own (train.lr_scheduler_type",
        "bf16.enabled: it would cast adapters",
        "amp: not used by frugal",
        "zero_optimization.offload_optimizer.device is cpu",
        "zero_optimization.offload_optimizer.ratio: not used",
        "zero_optimization.offload_param.device is nvme",
        "zero_optimization.zero_quantized_weights: not used",
    ):
        assert part in message, part


def test_auto_says_nothing() -> None:
    given = without_auto(
        {
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "fp16": {"enabled": "auto"},
            "optimizer": {"a": "auto"},
        }
    )
    assert given == {}
    check_given(given, THREE, world_size=2)


def test_yaml_fields_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("ACCELERATE"):
            monkeypatch.delenv(name)
    assert launched_with() is None
    for name, value in {
        "USE_DEEPSPEED": "true",
        "DEEPSPEED_ZERO_STAGE": "3",
        "CONFIG_DS_FIELDS": "zero_stage,offload_optimizer_device",
        "DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "GRADIENT_ACCUMULATION_STEPS": "1",
        "DEEPSPEED_CONFIG_FILE": "none",
    }.items():
        monkeypatch.setenv(f"ACCELERATE_{name}", value)
    given = launched_with()
    assert given == {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    assert stage_of(given) == 3
    assert offloads(given) == (True, False)
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage,gradient_accumulation_steps,gradient_clipping")
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "1.0")
    given = launched_with()
    assert given is not None
    assert given["gradient_accumulation_steps"] == 1
    assert given["gradient_clipping"] == 1.0


def test_a_json_file_of_the_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 2}, "train_batch_size": "auto"}), encoding="utf-8")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(path))
    assert launched_with() == {"zero_optimization": {"stage": 2}}
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"ds\.json"):
        launched_with()


def test_nothing_is_left_to_defaults_that_harm() -> None:
    config = engine_config(
        ZeroSettings(3, 2, 4, 0.0, offload_parameters=True),
        None,
        world_size=2,
        trained=5000,
        layer=900,
        pin_memory=False,
    )
    assert config["gradient_clipping"] == 0.0
    assert config["fp16"] == config["bf16"] == {"enabled": False}
    assert config["train_batch_size"] == config["train_micro_batch_size_per_gpu"] * 2
    zero = config["zero_optimization"]
    assert zero["memory_efficient_linear"] is False
    assert zero["reduce_bucket_size"] == 5000
    assert zero["stage3_max_live_parameters"] == 1800
    assert zero["stage3_param_persistence_threshold"] == 0
    assert zero["offload_param"] == {"device": "cpu", "pin_memory": False}
    assert "offload_optimizer" not in zero


def test_tuning_of_the_launcher_is_taken_over() -> None:
    given = {"zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 7, "overlap_comm": False}}
    config = engine_config(THREE, given, world_size=2, trained=5000, layer=900, pin_memory=False)
    assert config["zero_optimization"]["stage3_prefetch_bucket_size"] == 7
    assert config["zero_optimization"]["overlap_comm"] is False


def test_without_deepspeed_one_sentence_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"pip install 'frugal-lora\[deepspeed\]'"):
        zero_config.require_deepspeed(CPU)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if DeepSpeed were there and processes had found each other."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.19.8")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    return monkeypatch


def test_another_device_in_the_environment(installed: pytest.MonkeyPatch) -> None:
    installed.setenv("DS_ACCELERATOR", "cuda")
    with pytest.raises(UnsupportedError, match="DS_ACCELERATOR=cuda"):
        zero_config.require_deepspeed(CPU)


class MissingCUDAException(Exception):
    """As DeepSpeed's op_builder raises it where nvcc is missing."""


@pytest.mark.parametrize(
    "error",
    [
        MissingCUDAException("CUDA_HOME does not exist, unable to compile CUDA op(s)"),
        FileNotFoundError(2, "No such file or directory: '/usr/local/cuda/bin/nvcc'"),
        ImportError("cannot import name 'log' from 'torch.distributed.elastic.agent.server.api'"),
    ],
)
def test_no_nvcc_beside_a_gpu(error: Exception, installed: pytest.MonkeyPatch) -> None:
    """B7: torch's wheels bring CUDA's libraries, not its compiler, which DeepSpeed asks for when it is imported."""

    def fails(name: str) -> None:
        raise error

    installed.setattr(importlib, "import_module", fails)
    with pytest.raises(UnsupportedError, match=r"needs CUDA's toolkit, whose compiler is nvcc.*fsdp2 shards the same"):
        zero_config.require_deepspeed(torch.device("cuda"))


def test_other_faults_of_deepspeed_keep_their_traceback() -> None:
    with pytest.raises(AssertionError, match="of our own"), zero_config.told():
        raise AssertionError("of our own")


def test_an_old_version(installed: pytest.MonkeyPatch) -> None:
    installed.setattr(importlib.metadata, "version", lambda name: "0.17.6")
    with pytest.raises(UnsupportedError, match=r"0\.17\.6"):
        zero_config.require_deepspeed(CPU)


def test_no_compiler_on_a_cpu(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    installed.setenv("CXX", "no-such-compiler")
    with pytest.raises(UnsupportedError, match="no-such-compiler was not found"):
        zero_config.require_deepspeed(CPU)
    folder = tmp_path / "deepspeed_shm_comm"
    folder.mkdir()
    (folder / "build.ninja").touch()
    (folder / "deepspeed_shm_comm.so").touch()
    zero_config.require_deepspeed(CPU)


def test_a_lock_that_a_killed_build_left(installed: pytest.MonkeyPatch, tmp_path: Path) -> None:
    installed.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    lock = folder / "lock"
    lock.touch()
    zero_config.require_deepspeed(CPU)  # another process may be building now
    old = time.time() - 3600
    os.utime(lock, (old, old))
    with pytest.raises(UnsupportedError, match="delete that file"):
        zero_config.require_deepspeed(CPU)


def test_a_lock_beside_a_built_operation_is_waited_for_a_minute_at_most(
    installed: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    folder = tmp_path / "py311_cpu" / "deepspeed_shm_comm"
    folder.mkdir(parents=True)
    (folder / "deepspeed_shm_comm.so").touch()
    lock = folder / "lock"
    lock.touch()
    threading.Timer(1.0, lock.unlink).start()
    zero_config.require_deepspeed(CPU)
    assert not lock.exists()
    lock.touch()
    installed.setattr(zero_config, "_CHECK_SECONDS", 1)
    with pytest.raises(UnsupportedError, match="delete that file"):
        zero_config.require_deepspeed(CPU)
