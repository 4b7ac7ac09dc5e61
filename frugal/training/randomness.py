"""State of the random generators that dropout draws from, as tensors."""

from __future__ import annotations

import torch


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """Generator states as uint8 tensors: `cpu`, and `cuda` when the run is on a GPU."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Put states from `rng_state` back. A GPU state is ignored on a machine that trains on the CPU."""
    torch.set_rng_state(state["cpu"].cpu())
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"].cpu(), device)


def seed_step_noise(seed: int, rank: int) -> None:
    """Seed dropout at the start of a run; ranks draw different noise, adapters were made before from one seed."""
    torch.manual_seed(seed + 1_000_003 * rank)
