"""4-bit NF4 storage of frozen linear layers."""

from frugal.codecs.nf4 import NF4Linear, NF4Tensors, dequantize_nf4, dequantize_rows, quantize_nf4

__all__ = ["NF4Linear", "NF4Tensors", "dequantize_nf4", "dequantize_rows", "quantize_nf4"]
