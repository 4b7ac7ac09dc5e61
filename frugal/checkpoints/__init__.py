"""Checkpoints, whole or absent: what is written, the lock of a run folder, rotation, resume."""
