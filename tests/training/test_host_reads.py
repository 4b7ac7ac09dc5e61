"""A micro-batch reads nothing back from the device: what is asked for on the host, collate knew (S4)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from frugal.config import ObjectiveSection
from frugal.memory.checkpointing import apply_activation_checkpointing
from frugal.models.attention import use_attention
from frugal.models.masks import documents_known, frugal_mask
from frugal.models.replacement import replace_modules
from frugal.objectives import LossModule, configured_objective, make_objective
from frugal.ops import host_values, linear_cross_entropy
from frugal.ops.host_values import known, remember
from tests.support import training as toy
from tests.support.preference import pairs
from tests.support.tiny_models import tiny_model

READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal.default")


def _where() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and not any(part in frame.f_code.co_filename for part in ("/frugal/", "/transformers/")):
        frame = frame.f_back
    return "?" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class _Copies(TorchFunctionMode):
    """Copies to the host that on a CPU, which stands in for the device, are no operation."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in ("tolist", "cpu", "numpy") and all(args[0] is not host for _, host in host_values._KNOWN.values()):
            self.found.append(f"{name} at {_where()}")
        return func(*args, **(kwargs or {}))


class _Operations(TorchDispatchMode):
    """Operations whose result the host waits for."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in str(func) for name in READS):
            self.found.append(f"{func} at {_where()}")
        return func(*args, **(kwargs or {}))


def gradients(module: LossModule, batch: dict[str, Any], *, remembered: bool) -> tuple[list[str], list[torch.Tensor]]:
    """Reads of device values in forward, recomputation and backward of a micro-batch; loss and gradients."""
    moved = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in batch.items()}
    if remembered:
        for key, value in batch.items():
            if isinstance(value, torch.Tensor):
                remember(moved[key], value)
    found: list[str] = []
    module.zero_grad()
    with _Copies(found), _Operations(found):
        loss, _ = module(moved)
        (loss / 10).backward()
    trained = [parameter.grad for parameter in module.parameters() if parameter.requires_grad]
    return found, [loss.detach(), *(grad for grad in trained if grad is not None)]


def job(family: str, checkpoint: Any, objective: Any) -> LossModule:
    model = tiny_model(family)
    model.requires_grad_(False)
    assert use_attention(model).value == "frugal"
    torch.manual_seed(0)
    targets = r".*\.(q_proj|v_proj|gate_proj|down_proj)"
    wrapped: Any = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    replace_modules(wrapped, compute_dtype=torch.float32)
    module = LossModule(wrapped, objective)
    module.train()
    apply_activation_checkpointing(wrapped, checkpoint)
    return module


@pytest.mark.parametrize("checkpoint", ["none", "recompute"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_no_device_value_is_read(family: str, checkpoint: str) -> None:
    """Three rows joined, some tokens without a target: 9 reads forward and one a layer in recomputation, before."""
    objective = make_objective(flat=True)
    module = job(family, checkpoint, objective)
    batch = objective.collate(toy.rows([4, 7, 12]), [0, 1, 2])
    assert "cu_seq_lens_q" in batch
    found, got = gradients(module, batch, remembered=True)
    assert found == []
    reads, want = gradients(module, batch, remembered=False)
    assert reads, "the modes see reads where nothing is known"
    assert len(got) == len(want) > 4
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other), "what is known on the host changes nothing"


def test_preference_pairs_read_nothing_either(tmp_path: Path) -> None:
    """The reference pass, the policy's, and the head's second computation of each chunk in the backward pass."""
    objective = configured_objective(ObjectiveSection.model_validate({"name": "dpo"}), flat=True)
    module = job("llama", "recompute", objective)
    batch = objective.collate(pairs(tmp_path), [0, 2])
    batch = {**batch, "input_ids": batch["input_ids"] % 131, "labels": batch["labels"].clamp(max=130)}
    found, got = gradients(module, batch, remembered=True)
    assert found == []
    _, want = gradients(module, batch, remembered=False)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


def test_labels_outside_of_the_vocabulary_are_seen_on_the_host() -> None:
    labels = torch.tensor([1, 9, -100])
    moved = remember(labels.clone(), labels)
    with pytest.raises(IndexError, match=r"labels must be -100 or in \[0, 5\); got -100 to 9"):
        linear_cross_entropy(torch.zeros(3, 4), torch.zeros(5, 4), moved)


def test_a_tensor_that_was_changed_is_not_known() -> None:
    host = torch.arange(3)
    moved = remember(host.clone(), host)
    assert known(moved) is host
    moved += 1
    assert known(moved) is None


def test_a_pattern_beside_the_documents_is_kept() -> None:
    """A mask function that is not plain (a border at 4) adds its borders to the batch's documents."""
    model = tiny_model("llama")
    assert use_attention(model).value == "frugal"
    ids = torch.zeros(1, 8, dtype=torch.int64)
    inputs = {"input_ids": ids, "cu_seq_lens_q": (0, 3, 8)}
    with documents_known(model, inputs) as given:
        assert bool(given["attention_mask"].all())
        plain: Any = frugal_mask(1, 8, 8, attention_mask=given["attention_mask"])
        other: Any = frugal_mask(
            1, 8, 8, mask_function=lambda b, h, q, k: (k <= q) & (q // 4 == k // 4), allow_is_causal_skip=False
        )
    assert plain.cu_seqlens == (0, 3, 8)
    assert other.cu_seqlens == (0, 3, 4, 8)
    assert frugal_mask(1, 8, 8) is None, "outside, nothing is known"
    with documents_known(model, {**inputs, "attention_mask": torch.ones_like(ids)}) as given:
        assert frugal_mask(1, 8, 8, attention_mask=given["attention_mask"]) is None
