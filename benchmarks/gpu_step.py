"""One QLoRA step of Llama-3.1-8B's shapes with random weights, on frugal's side and on its peers'. Part of gpu.py.

Weights are made on the device, one matrix at a time, quantised at once and dropped, from the same seed on every side:
the host never holds a model, and the sides' first losses must agree.
"""

from __future__ import annotations

import gc
import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from transformers import LlamaConfig

from frugal.adapters import apply_adapters
from frugal.codecs import NF4Linear
from frugal.codecs.dense import upcast_on_use
from frugal.config import LoraSection
from frugal.memory import apply_activation_checkpointing
from frugal.memory.meter import LiveBytesMeter
from frugal.models.attention import register, use_attention
from frugal.models.replacement import replace_modules
from frugal.models.skeleton import build_meta, fill_buffers, insert_nf4, linear_kinds
from frugal.objectives import LossModule

RANK, ALPHA = 32, 64
SIDES = ("frugal", "peer", "liger")


def llama_8b() -> LlamaConfig:
    """Llama-3.1-8B's sizes."""
    return LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0, tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )  # fmt: skip


def tiny() -> LlamaConfig:
    """The same family at a size for `--dry-run`."""
    return LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4096, tie_word_embeddings=False, dtype=torch.float32,
    )  # fmt: skip


@dataclass
class Side:
    """A model ready to train."""

    name: str
    model: nn.Module
    loss: Callable[[Tensor], Tensor]
    optimizer: torch.optim.Optimizer
    note: str = ""

    def step(self, ids: Tensor) -> float:
        """Forward, backward, AdamW on ids [1, tokens], every token trained on."""
        loss = self.loss(ids)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


def random_weights(model: nn.Module, names: list[str], device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """A function of each linear layer's place that gives its matrix, so that no two live at once."""

    def maker(index: int, shape: torch.Size) -> Callable[[], Tensor]:
        def make() -> Tensor:
            generator = torch.Generator(device=device).manual_seed(index)
            return torch.randn(shape, generator=generator, device=device, dtype=dtype).mul_(0.02)

        return make

    return {name: maker(i, model.get_submodule(name).weight.shape) for i, name in enumerate(names)}


def fill_dense(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Give memory and values to what is still on the meta device: tables, head, norms."""
    generator = torch.Generator(device=device).manual_seed(10_000)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type != "meta":
                continue
            if parameter.ndim == 1:
                value = torch.ones(parameter.shape, device=device, dtype=dtype)
            else:
                value = torch.randn(parameter.shape, generator=generator, device=device, dtype=dtype).mul_(0.02)
            setattr(module, name, nn.Parameter(value, requires_grad=False))


def frugal_side(config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Side:
    """As `frugal train` sets it up: proven attention and modules, chunked loss, recomputed layers."""
    base = build_meta(config, trust_remote_code=False)
    names = linear_kinds(base)[0]
    weights = random_weights(base, names, device, dtype)
    insert_nf4(base, names, True)
    fill_buffers(base, device)
    for name in names:
        layer = base.get_submodule(name)
        assert isinstance(layer, NF4Linear)
        layer.encode_("weight", weights[name]())
    fill_dense(base, device, dtype)
    base.requires_grad_(False)
    upcast_on_use(base, dtype)
    base.eval()
    attention = use_attention(base)
    section = LoraSection(r=RANK, lora_alpha=ALPHA)
    model = apply_adapters(base, section, seed=0, quantize="nf4").model.train()
    replace_modules(model, compute_dtype=dtype)
    apply_activation_checkpointing(model, "recompute")
    module = LossModule(model).train()

    def loss(ids: Tensor) -> Tensor:
        total, sums = module({"input_ids": ids, "labels": ids})
        return total / sums[1]

    kinds = ", ".join(f"{kind}: {choice.value}" for kind, choice in attention.by_layer.items())
    return Side("frugal", model, loss, adamw(model), f"attention {attention.value} ({kinds})")


def peer_side(config: LlamaConfig, device: torch.device, dtype: torch.dtype, *, liger: bool) -> Side:
    """PEFT + bitsandbytes + transformers with SDPA, as their documentation sets them up; or Liger's kernels besides."""
    if liger:
        module = importlib.import_module("liger_kernel.transformers")
        module.apply_liger_kernel_to_llama()
    config._attn_implementation = "sdpa"
    base = build_meta(config, trust_remote_code=False)
    names = linear_kinds(base)[0]
    weights = random_weights(base, names, device, dtype)
    fill_buffers(base, device)
    for name in names:
        old = base.get_submodule(name)
        layer = bitsandbytes.nn.Linear4bit(
            old.in_features, old.out_features, bias=False, compute_dtype=dtype, compress_statistics=True,
            quant_type="nf4", device="meta",
        )  # fmt: skip
        stored = bitsandbytes.nn.Params4bit(
            weights[name](), requires_grad=False, compress_statistics=True, quant_type="nf4", module=layer
        )
        layer.weight = stored.to(device)
        base.set_submodule(name, layer)
    fill_dense(base, device, dtype)
    base.is_loaded_in_4bit = True
    base.config.use_cache = False
    base = prepare_model_for_kbit_training(
        base, use_gradient_checkpointing=True, gradient_checkpointing_kwargs={"use_reentrant": False}
    )
    torch.manual_seed(0)
    lora = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(base, lora).train()

    def loss(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            result: Tensor = model(input_ids=ids, labels=ids).loss
        return result

    return Side(
        "liger" if liger else "peer", model, loss, adamw(model), "NF4, double quantisation, SDPA, checkpointing"
    )


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW over what is trained, the same on every side."""
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5)


def build_side(name: str, config: LlamaConfig, device: torch.device, dtype: torch.dtype) -> Side:
    """One of `SIDES`."""
    if name == "frugal":
        return frugal_side(config, device, dtype)
    return peer_side(config, device, dtype, liger=name == "liger")


class Memory:
    """Peak bytes of a step, and a cap on them. On CUDA the allocator's; elsewhere live bytes, with a cap of our own so
    that `--dry-run` goes through the search."""

    def __init__(self, side: Side, device: torch.device) -> None:
        self.side, self.device = side, device
        self.cap_bytes: int | None = None

    def cap(self, limit: int | None) -> None:
        """Let the process use at most ``limit`` bytes of the device; None lifts it."""
        self.cap_bytes = limit
        if self.device.type == "cuda":
            total = torch.cuda.get_device_properties(self.device).total_memory
            torch.cuda.set_per_process_memory_fraction(1.0 if limit is None else min(1.0, limit / total), self.device)

    def step(self, ids: Tensor) -> tuple[float, int, float]:
        """(loss, peak bytes, seconds) of one step. Raises ``torch.OutOfMemoryError`` beyond the cap."""
        start = time.perf_counter()
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            torch.cuda.synchronize(self.device)
            start = time.perf_counter()
            loss = self.side.step(ids)
            torch.cuda.synchronize(self.device)
            return loss, torch.cuda.max_memory_allocated(self.device), time.perf_counter() - start
        with LiveBytesMeter(self.side.model, self.side.optimizer) as meter:
            loss = self.side.step(ids)
        peak = meter.report().peak_bytes
        if self.cap_bytes is not None and peak > self.cap_bytes:
            raise torch.OutOfMemoryError(f"{peak} bytes, {self.cap_bytes} allowed")
        return loss, peak, time.perf_counter() - start

    def clear(self) -> None:
        """Give back what the last step left."""
        self.side.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def measure(
    side: Side, device: torch.device, lengths: tuple[int, int], caps: list[int], vocab: int,
    left: Callable[[], float], emit: Callable[[dict[str, Any]], None], *, multiple: int, repeats: int,
) -> None:  # fmt: skip
    """Peak bytes and tokens/s at two lengths, bytes per token from them, then the longest context under each cap."""
    memory = Memory(side, device)

    def ids(tokens: int) -> Tensor:
        return torch.randint(0, vocab, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)

    first = memory.step(ids(multiple))[0]  # optimizer state, compiled kernels
    emit({"phase": "step", "side": side.name, "tokens": multiple, "first_loss": first, "note": side.note})
    peaks: dict[int, int] = {}
    rate = 0.0
    for tokens in lengths:
        try:
            memory.step(ids(tokens))
            results = [memory.step(ids(tokens)) for _ in range(repeats)]
        except torch.OutOfMemoryError:
            memory.clear()
            emit({"phase": "step", "side": side.name, "tokens": tokens, "out_of_memory": True})
            return
        peaks[tokens] = max(peak for _, peak, _ in results)
        seconds = sorted(seconds for *_, seconds in results)[len(results) // 2]
        rate = tokens / seconds
        emit({"phase": "step", "side": side.name, "tokens": tokens, "peak_bytes": peaks[tokens], "seconds": seconds,
              "tokens_per_second": rate})  # fmt: skip
        memory.clear()
    short, long = lengths
    slope = (peaks[long] - peaks[short]) / (long - short)
    fixed = peaks[short] - slope * short
    emit({"phase": "memory", "side": side.name, "bytes_per_token": slope, "fixed_bytes": fixed})
    for limit in caps:
        longest(memory, ids, limit, slope, fixed, multiple, rate, left, emit)
    memory.cap(None)


def longest(
    memory: Memory, ids: Callable[[int], Tensor], limit: int, slope: float, fixed: float, multiple: int, rate: float,
    left: Callable[[], float], emit: Callable[[dict[str, Any]], None],
) -> None:  # fmt: skip
    """The longest context of one step under ``limit`` bytes: predicted from the slope, then run, longer or shorter."""
    row: dict[str, Any] = {"phase": "context", "side": memory.side.name, "cap_bytes": limit}
    guess = int((limit - fixed) / max(slope, 1.0)) // multiple * multiple
    if guess < multiple:
        emit({**row, "longest_tokens": 0, "why": "the fixed part alone is larger"})
        return
    ran, failed = 0, None
    step = max(multiple, guess // 16 // multiple * multiple)
    tries = 0
    while guess >= multiple and tries < 5 and (failed is None or guess < failed) and guess > ran:
        if guess / max(rate, 1.0) * 2 > left():
            break
        tries += 1
        memory.clear()
        memory.cap(limit)
        try:
            memory.step(ids(guess))
            ran, guess = guess, guess + step
        except torch.OutOfMemoryError:
            failed, guess = guess, guess - step
        memory.cap(None)
        memory.clear()
    complete = failed is not None and ran > 0
    emit({**row, "longest_tokens": ran, "shortest_failed": failed, "tries": tries, "complete": complete})


def triton_attention(side: Side) -> None:
    """Switch frugal's side to its own packed kernel."""
    model: Any = side.model
    base = model.get_base_model()
    base.set_attn_implementation(register("triton"))
    side.name, side.note = "frugal_triton", "attention: frugal's Triton kernel"
