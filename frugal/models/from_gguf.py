"""`python -m frugal.models.from_gguf FILE.gguf FOLDER`: dequantise a GGUF model once and store it as safetensors.

Stored as float16: it keeps 11 significant bits and bfloat16 8. Against the exact values of SmolLM2's Q4_1 weights,
float16 is off by 0.019 % (root mean square) and bfloat16 by 0.13 %; the largest weight is 5.3, far from float16's
limit. Weights beyond that limit are refused rather than stored as infinity.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, GgufConfig

from frugal.models.stock import load_stock


def convert(gguf: Path, folder: Path) -> None:
    """Write config, float16 safetensors, tokenizer, chat template and generation config of ``gguf`` into ``folder``."""
    model = load_stock(
        str(gguf.parent), gguf_file=gguf.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
    limit = torch.finfo(torch.float16).max
    for name, parameter in model.named_parameters():
        if not bool(torch.isfinite(parameter).all()) or float(parameter.abs().max()) > limit:
            raise SystemExit(f"{name} has values that float16 cannot hold")
    model.half()
    model.config.dtype = torch.float16
    tokenizer.model_max_length = model.config.max_position_embeddings
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
