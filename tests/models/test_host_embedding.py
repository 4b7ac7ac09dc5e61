"""A frozen embedding table on the host: the same bits, no parameter, and refusals that say why."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from frugal.adapters import apply_adapters
from frugal.config import LoraSection
from frugal.errors import ConfigError
from frugal.exports.registry import merge
from frugal.files import read_json
from frugal.model_structure import input_device
from frugal.models.load import load_base
from frugal.models.modules import host_embedding
from frugal.models.modules.host_embedding import HostEmbedding, decide_embedding, host_refusal, put_on_host
from frugal.models.report import count_bytes
from frugal.models.resolve import resolve_base
from frugal.models.skeleton import build_meta
from frugal.objectives import LossModule
from frugal.planning.api import plan
from frugal.run.train import train
from tests.conftest import make_llama
from tests.support import runs

CPU = torch.device("cpu")


@pytest.mark.parametrize("rows_at_once", [1, 7, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_tables_own(rows_at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_embedding, "STAGE_BYTES", rows_at_once * 24 * dtype.itemsize)
    table = torch.randn(50, 24).to(dtype)
    embedding = HostEmbedding(table, CPU, torch.float32)
    for ids in (torch.randint(0, 50, (3, 11)), torch.tensor([7]), torch.empty(0, 4, dtype=torch.int64)):
        want = nn.functional.embedding(ids, table).float()
        assert torch.equal(embedding(ids), want)
        staged = torch.empty(ids.numel(), 24, dtype=dtype)
        embedding._copy_rows(ids.reshape(-1), staged)
        assert torch.equal(staged.float().view(want.shape), want)
        if ids.dim() == 2:
            assert torch.equal(embedding(ids.mT), want.transpose(0, 1))
    with pytest.raises(IndexError):
        embedding(torch.tensor([50]))


def test_on_a_cpu_there_are_no_buffers_to_cross() -> None:
    embedding = HostEmbedding(torch.randn(50, 24), CPU, torch.float32)
    embedding(torch.randint(0, 50, (64,)))
    assert not embedding._stages


def test_the_table_stays_where_it_is() -> None:
    table = torch.randn(50, 24)
    model = nn.Sequential(HostEmbedding(table, CPU, torch.float32), nn.Linear(24, 3))
    assert [name for name, _ in model.named_parameters()] == ["1.weight", "1.bias"]
    assert list(model.state_dict()) == ["0.weight", "1.weight", "1.bias"]
    model.to(torch.bfloat16)
    assert model[0](torch.tensor([1])).dtype is torch.bfloat16
    model.to("meta")
    assert model[0].device.type == "meta"
    assert torch.equal(model[0].weight, table)
    missing = model.load_state_dict({"1.weight": torch.zeros(3, 24), "1.bias": torch.zeros(3)}, strict=False)
    assert missing.missing_keys == ["0.weight"]
    other = torch.randn(50, 24)
    model[0].load_state_dict({"weight": other})
    assert torch.equal(model[0].weight, other)


def losses(folder: Path, on_host: bool) -> tuple[Any, torch.Tensor, dict[str, torch.Tensor]]:
    loaded = load_base(resolve_base(str(folder)), quantize="nf4", host_embedding=on_host)
    model = apply_adapters(loaded.model, LoraSection(r=4), seed=0, quantize="nf4").model
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(len(name)))
    ids = torch.randint(0, 300, (2, 17), generator=torch.Generator().manual_seed(0))
    loss, _ = LossModule(model)({"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)})
    loss.backward()
    return loaded, loss.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def test_a_loaded_model_trains_to_the_same_bits(make_tiny_llama: Any) -> None:
    folder = make_tiny_llama(tie_word_embeddings=False)
    usual, loss, gradients = losses(folder, False)
    hosted, other_loss, other_gradients = losses(folder, True)
    assert torch.equal(loss, other_loss)
    assert gradients.keys() == other_gradients.keys()
    assert all(torch.equal(gradient, other_gradients[name]) for name, gradient in gradients.items())
    table = hosted.model.get_input_embeddings()
    assert isinstance(table, HostEmbedding)
    assert input_device(hosted.model) == CPU
    assert hosted.report.parameters == usual.report.parameters
    assert hosted.report.total_bytes == usual.report.total_bytes
    assert hosted.report.host_bytes == table.weight.nbytes
    assert not any("embedding" in kind for kind in count_bytes(hosted.model))
    assert "in host memory" in " ".join(hosted.report.lines())
    assert list(hosted.model.state_dict()) == list(usual.model.state_dict())


def skeleton(**changes: Any) -> Any:
    return build_meta(make_llama(tie_word_embeddings=False, **changes).config, trust_remote_code=False)


@pytest.mark.parametrize(
    ("lora", "adds_tokens", "reason"),
    [
        ({}, True, "rows of added tokens are trained"),
        ({"modules_to_save": ["embed_tokens"]}, False, "model.embed_tokens is in lora.modules_to_save"),
        ({"target_modules": ["q_proj", "embed_tokens"]}, False, "model.embed_tokens is in lora.target_modules"),
        ({"modules_to_save": ["lm_head"]}, False, None),
        ({}, False, None),
    ],
)
def test_a_table_that_is_trained_stays_on_the_device(
    lora: dict[str, Any], adds_tokens: bool, reason: str | None
) -> None:
    section = LoraSection(**lora)
    place = decide_embedding("auto", skeleton(), section, kind="cuda", adds_tokens=adds_tokens)
    assert (place.value == "host") == (reason is None)
    if reason is not None:
        assert place.reason == reason
        with pytest.raises(ConfigError, match=reason):
            decide_embedding("host", skeleton(), section, kind="cuda", adds_tokens=adds_tokens)
    assert decide_embedding("device", skeleton(), section, kind="cuda", adds_tokens=adds_tokens).value == "device"
    assert decide_embedding("auto", skeleton(), section, kind="cpu", adds_tokens=adds_tokens).value == "device"


def test_tied_and_scaling_tables_are_refused() -> None:
    assert host_refusal(make_llama(tie_word_embeddings=True)) == (
        "the table is also the head, which the device needs whole"
    )
    config = Gemma3TextConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                              num_attention_heads=2, num_key_value_heads=1, head_dim=8)  # fmt: skip
    gemma = Gemma3ForCausalLM(config)
    assert "does more than look rows up" in str(host_refusal(gemma))
    with pytest.raises(ValueError, match="does more"):
        put_on_host(gemma, CPU, torch.float32)


def test_a_run_with_the_table_on_the_host_is_the_same_run(
    make_tiny_llama: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training, samples, evaluation, checkpoints, resuming and merging; every place where a device is asked for."""
    folder, rows = make_tiny_llama(tie_word_embeddings=False), runs.write_rows(tmp_path / "rows.jsonl", 12)
    made: list[torch.device] = []
    stock = HostEmbedding.__init__

    def counted(self: HostEmbedding, weight: torch.Tensor, device: torch.device, dtype: torch.dtype) -> None:
        made.append(device)
        stock(self, weight, device, dtype)

    monkeypatch.setattr(HostEmbedding, "__init__", counted)

    def settings(name: str, where: str) -> dict[str, Any]:
        return runs.config(
            folder, rows, tmp_path / name,
            data={"eval_split": 3}, memory={"embedding": where, "checkpoint": "recompute"},
            train={"max_steps": 4, "eval_steps": 2},
            output={"dir": str(tmp_path / name), "save_steps": 2, "sample_prompts": ["hello"],
                    "sample_max_new_tokens": 3},
        )  # fmt: skip

    train(settings("device", "device"))
    assert not made
    train(settings("host", "host"))
    assert made
    runs.same_result(tmp_path / "host", tmp_path / "device")
    assert read_json(tmp_path / "host" / "samples.json") == read_json(tmp_path / "device" / "samples.json")
    assert "only the rows in use" in json.dumps(read_json(tmp_path / "host" / "manifest.json"))
    shutil.copytree(tmp_path / "host" / "checkpoint-2", tmp_path / "copy" / "checkpoint-2")
    again = settings("copy", "host")
    train(again, resume=tmp_path / "copy" / "checkpoint-2")
    got, want = (load_file(tmp_path / name / "adapter_model.safetensors") for name in ("copy", "host"))
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())
    merge(tmp_path / "host", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged["model.embed_tokens.weight"].shape == (300, 64)


def test_a_plan_sees_it(make_tiny_llama: Any) -> None:
    folder = make_tiny_llama(tie_word_embeddings=False)
    plans = {where: plan(str(folder), [f"memory.embedding={where}"], vram="8GB") for where in ("device", "auto")}
    table = 300 * 64 * 2  # bfloat16 there
    moved = plans["device"].phases["save"].bytes - plans["auto"].phases["save"].bytes
    assert moved == table
    assert plans["device"].host["embedding table"] == 0
    assert plans["auto"].host["embedding table"] == table
    assert plans["auto"].parameters == plans["device"].parameters
