"""What a step keeps between forward and backward, and where: activation checkpointing, offload, scratch files."""

from frugal.memory.checkpoint import CheckpointHandle, apply_activation_checkpointing

__all__ = ["CheckpointHandle", "apply_activation_checkpointing"]
