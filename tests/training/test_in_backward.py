"""memory.optimizer_in_backward in whole runs: the ordinary step's weights and records, refused where it cannot be."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from frugal.config import load_config
from frugal.distributed.strategy import replicated
from frugal.errors import ConfigError, FrugalError, MemoryBudgetError
from frugal.files import read_json
from frugal.run.train import train
from frugal.tensor_files import read_tensors
from frugal.training.loop import train_loop
from frugal.training.optim import trainable
from frugal.training.setup import Hooks, LoopState
from frugal.training.signals import StopRequest
from frugal.training.step import OptimizerStep, optimizer_in_backward
from tests.support import runs
from tests.support import training as toy

ONE = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 0.0, "max_steps": 12}
VARIANTS: dict[str, dict[str, Any]] = {
    "adamw": {"train": {}},
    "8 bit, LoRA+, decay": {
        "train": {"optim": "adamw_8bit", "loraplus_lr_ratio": 4.0, "weight_decay": 0.1},
        "lora": {"r": 64},  # matrices of 4096 values and more, which have their moments in 8 bits
    },
    "DoRA, head, no checkpointing": {
        "train": {},
        "lora": {"use_dora": True, "modules_to_save": ["lm_head"]},
        "memory": {"checkpoint": "none"},
    },
    "new tokens, packed, stock modules": {
        "train": {},
        "model": {"add_tokens": ["<a>", "<b>"]},
        "data": {"packing": True},
        "memory": {"fused": False},
    },
}


def one_run(base: Path, root: Path, name: str, variant: dict[str, Any], inside: bool | str) -> Path:
    rows = root / "rows.jsonl"
    if not rows.exists():
        runs.write_rows(rows)
    sections = {**variant, "train": {**ONE, **variant["train"]}}
    sections["memory"] = {**variant.get("memory", {}), "optimizer_in_backward": inside}
    config = runs.config(base, rows, root / name, **sections)
    config["output"].update(save_steps=6, save_total_limit=None)
    train(config)
    return root / name


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_weights_and_records_as_the_ordinary_step(
    tiny_llama_folder: Path, make_tiny_llama: Any, tmp_path: Path, name: str
) -> None:
    base = make_tiny_llama(tie_word_embeddings=False) if "head" in name else tiny_llama_folder
    after = one_run(base, tmp_path, "after", VARIANTS[name], False)
    inside = one_run(base, tmp_path, "inside", VARIANTS[name], "auto")
    runs.same_result(inside, after)
    assert len(runs.records(inside)) == 12
    chosen = [read_json(folder / "manifest.json")["implementations"]["optimizer step"] for folder in (after, inside)]
    assert [choice["chosen"] for choice in chosen] == ["after backward", "inside backward"]
    ops = read_json(after / "manifest.json")["implementations"]
    if VARIANTS[name].get("memory", {}).get("fused", True):
        assert ops["op rms_norm"]["chosen"] == ("triton" if torch.cuda.is_available() else "torch")
    else:
        assert "op rms_norm" not in ops
    assert ("op adam8bit" in ops) == ("8 bit" in name)
    # the state in the checkpoints is the ordinary step's too
    for step in (6, 12):
        (first, meta), (second, meta_inside) = (
            read_tensors(folder / f"checkpoint-{step}" / "optimizer.safetensors") for folder in (after, inside)
        )
        assert meta == meta_inside
        assert first.keys() == second.keys()
        assert all(torch.equal(tensor, second[key]) for key, tensor in first.items())


def test_resume_is_bit_equal(tiny_llama_folder: Path, tmp_path: Path) -> None:
    variant = VARIANTS["8 bit, LoRA+, decay"]
    whole = one_run(tiny_llama_folder, tmp_path, "whole", variant, True)
    part = tmp_path / "part"
    part.mkdir()
    shutil.copytree(whole / "checkpoint-6", part / "checkpoint-6")
    shutil.copy(whole / "train_log.jsonl", part)
    config = runs.config(
        tiny_llama_folder, tmp_path / "rows.jsonl", part, train={**ONE, **variant["train"]}, lora=variant["lora"]
    )
    config["memory"] = {"optimizer_in_backward": True}
    config["output"].update(save_steps=6)
    train(config, resume=True)
    runs.same_result(part, whole)


def test_true_where_it_cannot_be_says_why_and_writes_nothing(tiny_llama_folder: Path, tmp_path: Path) -> None:
    config = runs.config(tiny_llama_folder, tmp_path / "no rows needed", tmp_path / "run")
    config["memory"] = {"optimizer_in_backward": True}
    with pytest.raises(ConfigError) as caught:
        train(config)
    for part in (
        "memory.optimizer_in_backward",
        "train.gradient_accumulation_steps is 2",
        "set it to 1",
        "max_grad_norm is 1.0",
        "set it to 0",
    ):
        assert part in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_auto_steps_inside_only_where_nothing_needs_all_gradients() -> None:
    free: dict[str, Any] = {"gradient_accumulation_steps": 1, "max_grad_norm": 0.0}
    assert optimizer_in_backward("auto", **free).value
    assert not optimizer_in_backward(False, **free).value
    for change, told in (
        ({"gradient_accumulation_steps": 8}, "gradient_accumulation_steps is 8"),
        ({"max_grad_norm": 1.0}, "max_grad_norm is 1.0"),
        ({"loss_scaling": True}, "loss scaling"),
        ({"world_size": 2}, "2 ranks"),
    ):
        place = optimizer_in_backward("auto", **{**free, **change})
        assert not place.value
        assert told in place.reason


@pytest.mark.parametrize(("written", "meant"), [("auto", "auto"), ("true", True), ("false", False), (True, True)])
def test_the_key_is_read_as_written(written: Any, meant: Any, tmp_path: Path) -> None:
    text = f"model: {{base: m}}\ndata: {{train: r}}\noutput: {{dir: o}}\nmemory: {{optimizer_in_backward: {written}}}\n"
    (tmp_path / "c.yaml").write_text(text.replace("True", '"true"'))
    assert load_config(tmp_path / "c.yaml").memory.optimizer_in_backward is meant
    sections = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}
    assert load_config({**sections, "memory": {"optimizer_in_backward": written}}).memory.optimizer_in_backward == meant


def test_a_wrong_word_names_what_is_allowed() -> None:
    sections = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}}
    with pytest.raises(ConfigError, match="must be auto, true or false"):
        load_config({**sections, "memory": {"optimizer_in_backward": "always"}})


def test_smaller_micro_batches_add_up_before_the_step() -> None:
    """After micro-batches became smaller a step has two, and the step waits for both."""
    found = []
    for inside, micro in ((False, 2), (True, 2), (True, 1)):
        model = toy.tiny_model()
        job = toy.make_job(
            model, toy.rows([3, 5, 2, 6]), per_device_train_batch_size=2, gradient_accumulation_steps=1,
            max_grad_norm=0.0, learning_rate=1e-2, num_train_epochs=2,
        )  # fmt: skip
        job = replace(job, step_in_backward=inside)
        job.memory.micro_batch_rows = micro
        train_loop(job, Hooks(lambda record: None, lambda state: None, StopRequest()), LoopState())
        found.append({name: p.detach().clone() for name, p in trainable(model).items()})
    for name, tensor in found[0].items():
        assert torch.equal(found[1][name], tensor), name
        torch.testing.assert_close(found[2][name], tensor, rtol=1e-4, atol=1e-5)


class Module(torch.nn.Module):
    """Two layers; the gradient of the second arrives first."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
        self.factor = factor
        self.broken: Exception | None = None

    def forward(self, batch: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(batch["x"])
        if self.broken is not None:

            def fail(grad: torch.Tensor) -> torch.Tensor:
                assert self.broken is not None
                raise self.broken

            hidden.register_hook(fail)
        loss = (self.second(hidden) * self.factor).sum()
        return loss, torch.stack([loss.detach().double(), torch.tensor(3.0).double()])


def step_of(module: Module) -> OptimizerStep:
    optimizer = torch.optim.AdamW(module.parameters())
    return OptimizerStep(module, optimizer, replicated(torch.device("cpu")), max_grad_norm=0.0)


def test_a_loss_that_is_not_finite_changes_nothing() -> None:
    module = Module(float("inf"))
    before = [p.detach().clone() for p in module.parameters()]
    with pytest.raises(FrugalError, match="the loss is"):
        step_of(module).forward_backward_update({"x": torch.ones(3, 4)}, 3)
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))


def test_out_of_memory_after_an_update_is_not_tried_again() -> None:
    """Half of the parameters have moved: the same step again would be another one."""
    module = Module(1.0)
    module.broken = MemoryError("no room")
    step = step_of(module)
    with pytest.raises(MemoryBudgetError, match=r"after 2 parameters .*optimizer_in_backward: false"):
        step.forward_backward_update({"x": torch.ones(3, 4)}, 3)
    module.broken = None
    step.forward_backward_update({"x": torch.ones(3, 4)}, 3)  # its hooks are gone
    assert all(p.grad is None for p in module.parameters())
