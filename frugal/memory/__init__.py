"""What a step keeps between forward and backward, and where: activation checkpointing, offload, scratch files."""

from frugal.memory.checkpointing import CheckpointHandle, apply_activation_checkpointing

__all__ = ["CheckpointHandle", "apply_activation_checkpointing"]
