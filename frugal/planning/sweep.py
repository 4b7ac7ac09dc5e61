"""The longest sequence for every size of device, and the cheapest settings for a wish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frugal.planning.planner import POLICIES, Planner, Policy
from frugal.planning.simulated_model import Shape

SWEEP_GB = (8, 12, 16, 24, 32, 40, 48, 80)


@dataclass(frozen=True)
class SweepRow:
    """One size of device."""

    total_bytes: int
    max_tokens: int
    """Longest single row; 0: not even a short one."""
    host_bytes: int
    """Host memory at that length."""

    def to_json(self) -> dict[str, int]:
        """Plain values."""
        return {"total_bytes": self.total_bytes, "max_tokens": self.max_tokens, "host_bytes": self.host_bytes}


def sweep(planner: Planner, policy: Policy, sizes_gb: tuple[int, ...] = SWEEP_GB) -> list[SweepRow]:
    """Longest row under ``policy`` on devices of ``sizes_gb``."""
    rows = []
    for size in sizes_gb:
        total = size << 30
        found = planner.longest_row(policy, planner.tensor_budget(total))
        rows.append(SweepRow(total, found.tokens, found.host_bytes if found.tokens else 0))
    return rows


@dataclass(frozen=True)
class Measure:
    """One way to need less, and what it brings."""

    settings: dict[str, Any]
    """Keys of the configuration, dotted, with their values."""
    costs: str
    """What it costs in time."""
    peak_bytes: int
    host_bytes: int
    fits: bool

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"settings": self.settings, "costs": self.costs, "peak_bytes": self.peak_bytes,
                "host_bytes": self.host_bytes, "fits": self.fits}  # fmt: skip


_COSTS: dict[Policy, str] = {
    "none": "nothing",
    "recompute": "about a quarter more time",
    "offload": "as recompute; copies overlap with computing",
    "disk": "as recompute, at the speed of the disk",
}


def solve(planner: Planner, tokens: int | None = None) -> list[Measure]:
    """Settings from the cheapest on, the last of which fits (if any does): policies at the configured micro-batch, then
    one row a micro-batch with more accumulation (the same step, the same loss), then NF4.

    ``tokens``: the length wished for instead of data.max_length.
    """
    length = (tokens or planner.config.data.max_length) * planner.answers
    train = planner.config.train
    tried: list[Measure] = []
    steps: list[tuple[Planner, int, dict[str, Any], str]] = [(planner, train.per_device_train_batch_size, {}, "")]
    if train.per_device_train_batch_size > 1:
        step_rows = train.per_device_train_batch_size * train.gradient_accumulation_steps
        settings = {"train.per_device_train_batch_size": 1, "train.gradient_accumulation_steps": step_rows}
        steps.append((planner, 1, settings, ", smaller products"))
    if planner.config.model.quantize == "none":
        model = planner.config.model.model_copy(update={"quantize": "nf4"})
        quantised = planner.with_config(planner.config.model_copy(update={"model": model}))
        steps.append((quantised, 1, {**steps[-1][2], "model.quantize": "nf4"}, ", weights in 4 bits (another result)"))
    for one, rows, settings, extra in steps:
        for policy in POLICIES:
            if policy == "offload" and planner.device.kind == "cpu":
                continue
            peak = one.step_peak(policy, Shape(rows, length)).bytes
            host = one.host(policy, rows * length).peak_bytes
            roomy = planner.device.host_bytes == 0 or host <= planner.device.host_bytes
            fits = peak <= planner.budget_bytes and roomy
            wanted = {"memory.checkpoint": policy, **settings}
            tried.append(Measure(wanted, _COSTS[policy] + extra, peak, host, fits))
            if fits:
                return tried
    return tried
