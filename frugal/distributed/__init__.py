"""Several processes: launch, groups, the strategies (one process, DDP, FSDP2, ZeRO), checks before the first step."""
