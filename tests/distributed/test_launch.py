"""What launchers put into the environment, the silent traps among it; and which engine a run takes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from frugal.config.shipped import launch_configs
from frugal.distributed.launch import Launch, check_group, choose, read_launch, unused_gpus
from frugal.errors import ConfigError

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "29500"}
ACCELERATE = {**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}
FSDP = {
    **ACCELERATE,
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}
DEEPSPEED = {**ACCELERATE, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}


def test_what_launchers_say() -> None:
    assert read_launch({}) == Launch("none", 1, 1)
    assert read_launch(TORCHRUN) == Launch("torchrun", 4, 2)
    assert read_launch(ACCELERATE) == Launch("accelerate launch", 4, 2)
    assert read_launch(FSDP) == Launch("accelerate launch", 4, 2, "fsdp2", reshard_after_forward=True)
    assert read_launch({**FSDP, "FSDP_OFFLOAD_PARAMS": "true"}).offload
    assert read_launch(DEEPSPEED).engine == "zero3"
    assert read_launch({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1"}).engine == "zero1"
    # one process of accelerate launch: no process group
    assert read_launch({"ACCELERATE_MIXED_PRECISION": "no"}) == Launch("accelerate launch", 1, 1)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "no", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, "started one"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2 and RANK is not set"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "mpirun started 2 processes"),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun started 8 processes"),
        ({**FSDP, "FSDP_VERSION": "1"}, "fsdp_version: 2"),
        ({**FSDP, "FSDP_ACTIVATION_CHECKPOINTING": "true"}, "memory.checkpoint"),
        ({**FSDP, "ACCELERATE_USE_DEEPSPEED": "true"}, "choose one"),
        ({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "0"}, "zero_stage 1, 2 or 3"),
        ({**ACCELERATE, "ACCELERATE_USE_MEGATRON_LM": "true"}, "Megatron-LM"),
        ({**ACCELERATE, "ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "context parallelism"),
    ],
)
def test_traps_are_errors(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_launch(environment)
    assert said in str(error.value)


def test_tasks_that_a_scheduler_counts_are_fine_with_a_launcher() -> None:
    assert read_launch({**TORCHRUN, "SLURM_STEP_NUM_TASKS": "2"}).world_size == 4


def test_what_has_no_effect_is_said() -> None:
    assert read_launch(FSDP).notes == ()
    (note,) = read_launch({**ACCELERATE, "ACCELERATE_MIXED_PRECISION": "bf16"}).notes
    assert "model.dtype decides" in note
    (note,) = read_launch(
        {**FSDP, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT", "FSDP_CPU_RAM_EFFICIENT_LOADING": "true"}
    ).notes
    assert "fsdp_state_dict_type" in note
    assert "fsdp_cpu_ram_efficient_loading" in note
    (note,) = read_launch({**ACCELERATE, "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR"}).notes
    assert "dynamo_backend: INDUCTOR" in note


@pytest.mark.parametrize(
    ("asked", "launch", "fits", "engine"),
    [
        ("auto", Launch("none", 1, 1), False, None),
        ("ddp", Launch("none", 1, 1), True, None),
        ("auto", Launch("torchrun", 2, 2), True, "ddp"),
        ("auto", Launch("torchrun", 2, 2), False, "fsdp2"),
        ("fsdp2", Launch("torchrun", 2, 2), True, "fsdp2"),
        ("auto", Launch("accelerate launch", 2, 2, "fsdp2"), True, "fsdp2"),
        ("zero2", Launch("accelerate launch", 2, 2, "zero2"), True, "zero2"),
        ("zero3", Launch("torchrun", 2, 2), True, "zero3"),
    ],
)
def test_the_engine(asked: Any, launch: Launch, fits: bool, engine: str | None) -> None:
    assert choose(asked, launch, base_fits=fits) == engine


@pytest.mark.parametrize(
    ("asked", "launch", "said"),
    [
        ("ddp", Launch("accelerate launch", 2, 2, "fsdp2"), ("distributed.strategy: ddp", "started for fsdp2")),
        ("zero2", Launch("accelerate launch", 2, 2, "zero3"), ("distributed.strategy: zero2", "started for zero3")),
        ("zero1", Launch("accelerate launch", 2, 2, "zero3"), ("zero2.yaml --zero_stage 1",)),
        ("fsdp2", Launch("none", 1, 1), ("distributed.strategy: fsdp2 shards", "there is one")),
        ("auto", Launch("accelerate launch", 1, 1, "zero3"), ("zero3 of accelerate's configuration", "zero3.yaml")),
    ],
)
def test_contradictions_name_both_sides(asked: Any, launch: Launch, said: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        choose(asked, launch, base_fits=True)
    for text in said:
        assert text in str(error.value)


def test_the_group_is_the_one_that_was_asked_for() -> None:
    check_group(Launch("torchrun", 4, 2), world_size=4, gpus=2)
    check_group(Launch("torchrun", 4, 4), world_size=4, gpus=0)  # no GPU: any number of processes
    with pytest.raises(ConfigError, match="asked for 4 processes, and 1 found each other"):
        check_group(Launch("torchrun", 4, 4), world_size=1, gpus=0)
    with pytest.raises(ConfigError, match="4 processes were started on this machine, which has 2 GPUs"):
        check_group(Launch("torchrun", 4, 4), world_size=4, gpus=2)


def test_idle_gpus_are_mentioned() -> None:
    assert unused_gpus(Launch("none", 1, 1), 1) is None
    assert unused_gpus(Launch("torchrun", 2, 2), 2) is None
    text = unused_gpus(Launch("none", 1, 1), 4)
    assert text is not None
    assert "accelerate launch --num_processes 4 -m frugal train CONFIG" in text


def test_launch_files_are_shipped_and_said_to_be(tmp_path: Path) -> None:
    files = launch_configs()
    assert set(files) == {
        f"accelerate/{name}" for name in ("ddp", "fsdp2", "fsdp2_offload", "zero2", "zero3", "zero3_offload")
    }
    for name, text in files.items():
        content = yaml.safe_load(text)
        assert content["mixed_precision"] == "no"  # not YAML's false
        assert f"configs/{name}.yaml" in text.splitlines()[1]
    done = subprocess.run(
        [sys.executable, "-m", "frugal", "configs", "copy", "accelerate/zero3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "zero3.yaml").read_text(encoding="utf-8") == files["accelerate/zero3"]
