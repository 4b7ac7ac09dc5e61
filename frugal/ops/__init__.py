"""Differentiable operations that save little. Each has a plain reference, a frugal torch form and a row in `table`.

Nothing here knows transformers or peft.
"""

from frugal.ops.attention import attention, attention_reference
from frugal.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference
from frugal.ops.table import Choice, choose

__all__ = [
    "Choice",
    "attention",
    "attention_reference",
    "choose",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
]
