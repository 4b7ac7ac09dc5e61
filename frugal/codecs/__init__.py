"""How frozen weights are stored: one file and one row of `CODECS` a codec."""

from __future__ import annotations

from collections.abc import Callable

import torch

from frugal.codecs.base import Codec, EncodedModule, EncodedWeight, encoded_parts
from frugal.codecs.dense import DenseCodec
from frugal.codecs.nf4 import NF4Codec, NF4Linear, NF4Tensors, dequantize_nf4, quantize_nf4
from frugal.codecs.stacks import Cut, Piece, PiecedStack, Pieces

CODECS: dict[str, Callable[[torch.dtype, bool], Codec]] = {
    "nf4": lambda compute, double_quant: NF4Codec(double_quant),
    "none": lambda compute, double_quant: DenseCodec(compute),
}
"""``model.quantize`` -> codec, from the compute dtype and ``model.double_quant``."""

__all__ = [
    "CODECS",
    "Codec",
    "Cut",
    "DenseCodec",
    "EncodedModule",
    "EncodedWeight",
    "NF4Codec",
    "NF4Linear",
    "NF4Tensors",
    "Piece",
    "PiecedStack",
    "Pieces",
    "dequantize_nf4",
    "encoded_parts",
    "quantize_nf4",
]
