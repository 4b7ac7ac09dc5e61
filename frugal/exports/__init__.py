"""What is written to disk: checkpoints, the lock on a run's folder, rotation, merged models, the model card."""
