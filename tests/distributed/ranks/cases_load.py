"""Cases of test_load_ranks.py: a base loaded layer by layer, each layer sharded before the next is read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD

from frugal.config import LoraSection
from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.tensors import local_bytes, whole
from frugal.memory.meter import LiveBytesMeter
from frugal.models.build import BuiltModel, ModelSpec, build
from frugal.models.resolve import ResolvedModel
from frugal.objectives import LossModule
from tests.distributed.ranks.worker import Rank

LORA = LoraSection(r=4, lora_alpha=8)
CPU = torch.device("cpu")


def source(name: str) -> ResolvedModel:
    return ResolvedModel(name, Path(os.environ["FRUGAL_TEST_MODELS"]) / name, "folder", None)


def ordinary(base: ResolvedModel, quantize: Any, lora: LoraSection = LORA) -> nn.Module:
    return LossModule(build(ModelSpec(source=base, lora=lora, seed=3, quantize=quantize)).model)


def sharded(
    base: ResolvedModel, quantize: Any, fused: bool = True, lora: LoraSection = LORA
) -> tuple[BuiltModel, FullyShard, nn.Module]:
    strategy = FullyShard(CPU)
    spec = ModelSpec(source=base, lora=lora, seed=3, quantize=quantize, fused=fused)
    filled = build(spec, "layerwise", strategy.take_layer)
    module = LossModule(filled.model, head=filled.head)
    wrapped, _ = strategy.prepare(module, lambda: SGD([p for p in module.parameters() if p.requires_grad], lr=1.0))
    return filled, strategy, wrapped


def batch(rank: int = 0) -> dict[str, Any]:
    ids = torch.randint(3, 131, (2, 17), generator=torch.Generator().manual_seed(7 + rank))
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def _compare(rank: Rank, name: str, quantize: Any, lora: LoraSection = LORA) -> dict[str, Any]:
    base = source(name)
    _, strategy, wrapped = sharded(base, quantize, lora=lora)
    want = ordinary(base, quantize, lora)
    tensors: dict[str, Tensor] = {**dict(wrapped.module.named_parameters()), **dict(wrapped.module.named_buffers())}
    wanted: dict[str, Tensor] = {**dict(want.named_parameters()), **dict(want.named_buffers())}
    different = [key for key, value in wanted.items() if not torch.equal(whole(tensors[key], CPU), value)]
    meta = [key for key, value in tensors.items() if value.is_meta]
    before = strategy.inside(wrapped, lambda: wrapped.module(batch())[0])
    expected = want(batch())[0]
    # Gradients: each rank has rows of its own, and the engine takes the mean over ranks.
    wrapped(batch(rank.rank))[0].backward()
    for each in range(rank.world):
        (want(batch(each))[0] / rank.world).backward()
    gradients = {key: p.grad for key, p in want.named_parameters() if p.grad is not None}
    got = {key: whole(p.grad, CPU) for key, p in wrapped.module.named_parameters() if p.grad is not None}
    largest = max(float((got[k] - g).abs().max()) / max(1e-3, float(g.abs().max())) for k, g in gradients.items())
    return {
        "names": sorted(tensors) == sorted(wanted),
        "different": different,
        "meta": meta,
        "loss": float(before),
        "expected": float(expected),
        "gradient_error": largest,
        "gradients": sorted(got) == sorted(gradients),
        "local": local_bytes(wrapped.parameters()),
        "whole": sum(p.nbytes for p in want.parameters()),
    }


def case_llama_tied_nf4(rank: Rank) -> dict[str, Any]:
    return _compare(rank, "llama-tied", "nf4")


def case_llama_untied_none(rank: Rank) -> dict[str, Any]:
    return _compare(rank, "llama", "none")


def case_gemma2_nf4(rank: Rank) -> dict[str, Any]:
    return _compare(rank, "gemma2", "nf4")


def case_phi3_nf4(rank: Rank) -> dict[str, Any]:
    return _compare(rank, "phi3", "nf4")


def case_llama_dora_nf4(rank: Rank) -> dict[str, Any]:
    return _compare(rank, "llama", "nf4", LoraSection(r=4, lora_alpha=8, use_dora=True))


def _peak(quantize: Any) -> dict[str, Any]:
    meter = LiveBytesMeter(device="cpu")
    with meter:
        filled, _, wrapped = sharded(source("deep"), quantize, fused=False)
    layers = filled.head.decoder.layers
    first = layers[0]
    return {
        "peak": meter.peak_bytes,
        "end": meter.report().end_bytes,
        "shards": local_bytes(layers.parameters()),
        "layer": sum(p.numel() * p.element_size() for p in first.parameters()),
        "layers": len(layers),
        "buffers": sum(b.nbytes for b in filled.model.buffers()),
        "rest": sum(p.numel() * p.element_size() for n, p in wrapped.named_parameters() if ".layers." not in n),
    }


def case_peak_nf4(rank: Rank) -> dict[str, Any]:
    return _peak("nf4")


def case_peak_none(rank: Rank) -> dict[str, Any]:
    return _peak("none")
