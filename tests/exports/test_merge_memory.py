"""Host memory of a merge: at most three times the largest shard, whatever the size of the model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

SHARD = 48 << 20
LAYERS, HIDDEN, MIDDLE = 4, 1024, 4096  # about 67 M parameters, 135 MB in bfloat16; largest tensor 8 MB

MEASURE = """
import json, sys
import torch
torch.set_num_threads(1)
import bitsandbytes, peft, transformers
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama
from frugal.codecs.nf4 import quantize_nf4
from frugal.exports.registry import merge

def status(key):
    for line in open("/proc/self/status"):
        if line.startswith(key):
            return int(line.split()[1]) * 1024

quantize_nf4(torch.randn(64, 64)).dequantize_rows(0, 64, torch.float32)  # loads the kernels
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
report = merge(sys.argv[1], sys.argv[2], max_shard_bytes=int(sys.argv[3]))
print(json.dumps({"over": status("VmHWM") - before, "shards": report.shards, "n_bytes": report.n_bytes}))
"""


def write_base(folder: Path, tokenizer: Path) -> None:
    folder.mkdir()
    config = LlamaConfig(
        vocab_size=300,
        hidden_size=HIDDEN,
        intermediate_size=MIDDLE,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained(folder)
    noise = torch.randn(MIDDLE, HIDDEN).to(torch.bfloat16) * 0.02
    tensors = {"model.embed_tokens.weight": noise[:300].clone(), "model.norm.weight": torch.ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(HIDDEN)
        for name in "qkvo":
            tensors[f"{prefix}self_attn.{name}_proj.weight"] = noise[:HIDDEN].clone()
        for name in ("gate", "up"):
            tensors[f"{prefix}mlp.{name}_proj.weight"] = noise.clone()
        tensors[f"{prefix}mlp.down_proj.weight"] = noise.T.contiguous()
    save_file({key: value.to(torch.bfloat16) for key, value in tensors.items()}, folder / "model.safetensors")


def write_run(folder: Path, base: Path) -> None:
    folder.mkdir()
    r, tensors = 16, {}
    sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, HIDDEN), "v": (HIDDEN, HIDDEN), "o": (HIDDEN, HIDDEN)}
    sizes |= {"gate": (MIDDLE, HIDDEN), "up": (MIDDLE, HIDDEN), "down": (HIDDEN, MIDDLE)}
    for layer in range(LAYERS):
        for name, (out_features, in_features) in sizes.items():
            part = "self_attn" if len(name) == 1 else "mlp"
            key = f"base_model.model.model.layers.{layer}.{part}.{name}_proj.lora_"
            tensors[f"{key}A.weight"] = torch.randn(r, in_features) * 0.01
            tensors[f"{key}B.weight"] = torch.randn(out_features, r) * 0.01
    save_file(tensors, folder / "adapter_model.safetensors")
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": r,
        "lora_alpha": 32,
        "target_modules": [f"{name}_proj" for name in sizes],
        "base_model_name_or_path": str(base),
    }
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    config = {"model": {"base": str(base)}, "data": {"train": [{"path": "x"}]}, "output": {"dir": str(folder)}}
    (folder / "config.yaml").write_text(json.dumps(config))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_host_memory_is_bounded_by_the_shard(tiny_llama_folder: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    write_base(base, tiny_llama_folder)
    write_run(run, base)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(run), str(tmp_path / "out"), str(SHARD)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout.splitlines()[-1])
    assert measured["n_bytes"] > 2.5 * SHARD
    assert measured["shards"] >= 3
    assert measured["over"] <= 3 * SHARD, f"{measured['over'] / 1e6:.0f} MB over the start"
