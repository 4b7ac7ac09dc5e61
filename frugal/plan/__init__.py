"""What a run will need, before it starts and without a GPU: the run's own code on tensors without memory."""
