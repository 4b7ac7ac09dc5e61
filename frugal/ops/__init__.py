"""Differentiable operations that save little. Each has a plain reference, a frugal torch form and a row in `rows`.

Nothing here knows transformers or peft.
"""

from frugal.ops.attention import attention, attention_reference
from frugal.ops.experts import ExpertStack, experts, experts_reference
from frugal.ops.gated_mlp import gated_mlp, gated_mlp_reference
from frugal.ops.linear_cross_entropy import IGNORE_INDEX, linear_cross_entropy, linear_cross_entropy_reference
from frugal.ops.lora_linear import lora_linear, lora_linear_reference
from frugal.ops.projection import Projection
from frugal.ops.registry import choose
from frugal.ops.rms_norm import rms_norm, rms_norm_reference
from frugal.ops.rope import rope, rope_joint, rope_pair, rope_reference

__all__ = [
    "IGNORE_INDEX",
    "ExpertStack",
    "Projection",
    "attention",
    "attention_reference",
    "choose",
    "experts",
    "experts_reference",
    "gated_mlp",
    "gated_mlp_reference",
    "linear_cross_entropy",
    "linear_cross_entropy_reference",
    "lora_linear",
    "lora_linear_reference",
    "rms_norm",
    "rms_norm_reference",
    "rope",
    "rope_joint",
    "rope_pair",
    "rope_reference",
]
