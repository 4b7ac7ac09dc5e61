"""Runs built without training: an adapter with random weights over a base held in NF4, by stock transformers + PEFT."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from frugal.adapters.peft_model import WEIGHTS, base_record
from frugal.checkpoints.side_files import save_side_files
from frugal.codecs.nf4 import dequantize_nf4, quantize_nf4
from frugal.config import dump_yaml, load_config
from frugal.files import write_json, write_text
from frugal.manifest import Manifest
from frugal.model_structure import stacked_experts
from frugal.models.resolve import base_fingerprint
from frugal.tensor_files import read_all, write_tensors

IDS = torch.tensor([[1, 17, 45, 200, 13, 99, 150, 7]])

RELOAD = """
import sys, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
torch.set_num_threads(1)
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
with torch.no_grad():
    logits = model(torch.tensor([[1, 17, 45, 200, 13, 99, 150, 7]])).logits
save_file({"logits": logits}, sys.argv[2])
"""


def experts_in_nf4(module: Any) -> None:
    """A stock experts module with the values that NF4 leaves: of gate and up apart where they are halves."""
    for part in ("gate_up_proj", "down_proj"):
        halves = 2 if part == "gate_up_proj" and module.is_concatenated else 1
        for matrix in module.get_parameter(part).data:
            for piece in (matrix.t() if module.is_transposed else matrix).chunk(halves):
                piece.copy_(dequantize_nf4(quantize_nf4(piece), torch.float32))


def held_in_nf4(model: nn.Module, quantize: str, *, experts: bool = True) -> nn.Module:
    """Every linear layer but the head with the values that its NF4 form has; the quantised base in stock modules."""
    head = model.get_output_embeddings()
    if quantize == "nf4":
        for module in model.modules():
            if type(module) is nn.Linear and module is not head:
                module.weight.data = dequantize_nf4(quantize_nf4(module.weight.data), torch.float32)
        for module in model.modules() if experts else ():
            if stacked_experts(module):
                experts_in_nf4(module)
    return model


def make_run(
    folder: Path,
    base: Path,
    *,
    quantize: str = "nf4",
    experts: bool = True,
    size: float = 0.05,
    seed: int = 1,
    vocab: int | None = None,
    tokenizer: Any = None,
    **lora: Any,
) -> PeftModel:
    """Write a run folder and return its model (float32, eval mode): what the merged model must equal.

    Without ``experts`` as frugal 0.1.0 wrote it: stacks of experts dense, and nothing said about them.
    """
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    if vocab is not None:
        model.resize_token_embeddings(vocab, mean_resizing=False)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    held_in_nf4(model, quantize, experts=experts)
    stacks = experts and quantize == "nf4" and any(stacked_experts(module) for module in model.modules())
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **{**settings, **lora}))
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            noise = torch.randn(parameter.shape, generator=generator) * size
            whole = "modules_to_save" in name or "magnitude" in name
            parameter.data = parameter.data + noise if whole else noise
    model.save_pretrained(str(folder), save_embedding_layers=False)
    weights = folder / WEIGHTS
    write_tensors(weights, read_all(weights), texts=base_record(quantize, experts=stacks))
    config = {"model": {"base": str(base), "quantize": quantize}, "data": {"train": "x.jsonl"}}
    write_text(folder / "config.yaml", dump_yaml(load_config({**config, "output": {"dir": str(folder)}})))
    manifest = Manifest()
    manifest.add("base", {"name": str(base), "fingerprint": base_fingerprint(base)})
    manifest.finished()
    manifest.write(folder)
    tokenizer = tokenizer or AutoTokenizer.from_pretrained(base)
    save_side_files(folder, tokenizer, base=base)
    write_json(folder / "samples.json", [{"prompt": "a | b", "before": "x", "after": "<b>y</b>"}])
    return model.eval()


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    """Logits [1, 8, vocab] in float32."""
    return model(IDS).logits.float()


def logits_in_new_process(folder: Path, scratch: Path) -> torch.Tensor:
    """Logits of stock transformers on ``folder`` in a fresh interpreter."""
    from safetensors.torch import load_file

    out = scratch / f"{folder.name}-logits.safetensors"
    subprocess.run([sys.executable, "-c", RELOAD, str(folder), str(out)], check=True, capture_output=True)
    return load_file(out)["logits"]


def logits_here(folder: Path) -> torch.Tensor:
    """Logits of stock transformers on ``folder`` in this process."""
    return logits_of(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())
