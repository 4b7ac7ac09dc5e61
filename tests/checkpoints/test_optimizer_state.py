"""R05: optimizer state after loading is bit for bit what was saved, in a new process, and so are the next steps."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from frugal.config import TrainSection
from frugal.errors import CheckpointError
from frugal.tensor_files import read_tensors, write_tensors
from frugal.training.optim import OptimizerState, build_optimizer, load_optimizer_state, optimizer_state

KINDS = [(optim, dtype) for optim in ("adamw", "adamw_8bit") for dtype in (torch.float32, torch.bfloat16)]


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    """Large enough for 8-bit state, and one that is not."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"q.lora_A.default.weight": (16, 600), "q.lora_B.default.weight": (600, 16), "q.magnitude": (60,)}
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in shapes.items()}


def steps(optimizer: torch.optim.Optimizer, named: dict[str, nn.Parameter], seed: int) -> None:
    """Four steps with gradients that depend on ``seed`` alone."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(4):
        for parameter in named.values():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


def section(optim: str) -> TrainSection:
    return TrainSection.model_validate({"optim": optim, "learning_rate": 1e-2, "weight_decay": 0.01})


def weights(named: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def resume(folder: Path, optim: str, dtype: torch.dtype) -> None:
    """In the new process: load, save again what was loaded, do four steps, save the weights."""
    named = parameters(dtype)
    for name, tensor in load_file(folder / "weights.safetensors").items():
        named[name].data = tensor
    optimizer = build_optimizer(named, section(optim))
    load_optimizer_state(optimizer, OptimizerState(*read_tensors(folder / "state.safetensors")), "state")
    again = optimizer_state(optimizer)
    write_tensors(folder / "again.safetensors", again.tensors, again.meta)
    steps(optimizer, named, seed=2)
    save_file(weights(named), folder / "after.safetensors")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All kinds trained four steps here, resumed for four more in one new process."""
    root = tmp_path_factory.mktemp("R05")
    for optim, dtype in KINDS:
        folder = root / f"{optim}-{dtype}"
        folder.mkdir()
        named = parameters(dtype)
        optimizer = build_optimizer(named, section(optim))
        steps(optimizer, named, seed=1)
        saved = optimizer_state(optimizer)
        write_tensors(folder / "state.safetensors", saved.tensors, saved.meta)
        save_file(weights(named), folder / "weights.safetensors")
        steps(optimizer, named, seed=2)
        save_file(weights(named), folder / "expected.safetensors")
    done = subprocess.run(
        [sys.executable, __file__, str(root)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.parametrize(("optim", "dtype"), KINDS)
def test_state_and_next_steps_are_bit_equal(outcome: Path, optim: str, dtype: torch.dtype) -> None:
    folder = outcome / f"{optim}-{dtype}"
    saved, meta = read_tensors(folder / "state.safetensors")
    again, meta_again = read_tensors(folder / "again.safetensors")
    assert meta == meta_again
    assert saved.keys() == again.keys()
    for label, tensor in saved.items():
        assert (again[label].dtype, again[label].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(again[label], tensor)
    after, expected = load_file(folder / "after.safetensors"), load_file(folder / "expected.safetensors")
    assert all(torch.equal(after[name], expected[name]) for name in expected)


def test_eight_bit_state_keeps_codes_and_scales(outcome: Path) -> None:
    """With bf16 adapters: codes stay bytes, scales stay fp32 (the generic load would make both bf16)."""
    saved, meta = read_tensors(outcome / f"adamw_8bit-{torch.bfloat16}" / "again.safetensors")
    name = "q.lora_A.default.weight"
    assert saved[f"{name}|state1"].dtype == torch.uint8
    assert saved[f"{name}|absmax1"].dtype == torch.float32
    assert meta["numbers"][f"{name}|step"] == 4


def test_state_of_another_optimizer_or_count_is_refused_by_name(outcome: Path) -> None:
    state = OptimizerState(*read_tensors(outcome / f"adamw-{torch.float32}" / "state.safetensors"))
    named = parameters(torch.float32)
    with pytest.raises(CheckpointError, match="'AdamW', this run uses 'AdamW8bit'"):
        load_optimizer_state(build_optimizer(named, section("adamw_8bit")), state, "checkpoint-4")
    del named["q.magnitude"]
    with pytest.raises(CheckpointError, match=r"3 saved, 2 in this run\):\n  not in this run: q\.magnitude"):
        load_optimizer_state(build_optimizer(named, section("adamw")), state, "checkpoint-4")


if __name__ == "__main__":
    torch.set_num_threads(1)
    for kind, number in KINDS:
        resume(Path(sys.argv[1]) / f"{kind}-{number}", kind, number)
