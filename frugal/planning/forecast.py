"""What a plan says: peaks of every phase, what fits, the longest row, host, disk and network."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from frugal.planning.allocation_sites import Peak, TokenLine
from frugal.planning.inputs import Planned
from frugal.planning.sharding import Network, Sharing
from frugal.planning.simulated_model import Policy, Shape


@dataclass(frozen=True)
class Longest:
    """The longest single row of a micro-batch under one policy, within the budgets of device and host."""

    policy: Policy
    tokens: int
    """0: not even a short one."""
    bytes_per_token: float
    fixed_bytes: float
    host_bytes: int
    """Host memory at that length."""
    confirmed: bool = False
    """A direct run of that length stays within the budget (and comes close to it)."""
    held_by: str = "device"
    """Whose memory ends it: device or host."""

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"max_tokens": self.tokens, "bytes_per_token": round(self.bytes_per_token),
                "fixed_bytes": round(self.fixed_bytes), "host_bytes": self.host_bytes, "held_by": self.held_by,
                "confirmed": self.confirmed}  # fmt: skip


MOST_RUNS = 8
CLOSE = 0.002
"""How near to the budget the longest row is looked for."""


def longest_row(
    policy: Policy,
    line: TokenLine,
    *,
    budget_bytes: int,
    exact_from: int,
    peak_bytes: Callable[[int], int],
    host_need: Callable[[int], int],
    host_bytes: int,
    confirm: bool = False,
) -> Longest:
    """Find the longest row under ``policy``: by the line over the tokens, and by direct runs at the answer.

    A line is exact from ``exact_from`` tokens on, once every workspace has its full size. Below that length, and with
    ``confirm``, direct runs (``peak_bytes`` of a row of so many tokens) lead to the answer. ``host_need`` of so many
    tokens stays within ``host_bytes`` (0: not known).
    """
    slope, fixed = line.slope_and_fixed(max(line.most_tokens(budget_bytes), 2 * exact_from))
    guess, most, confirmed = line.most_tokens(budget_bytes), 0, False
    if guess >= exact_from and not confirm:
        most = guess
    for _ in range(MOST_RUNS):
        if guess <= most:
            break
        gap = budget_bytes - peak_bytes(guess)
        if gap >= 0:
            most, confirmed = guess, gap <= CLOSE * budget_bytes
            if confirmed:
                break
        guess += round(gap / slope) if gap >= 0 else min(-1, math.floor(gap / slope))
    held_by = "device"
    if host_bytes and host_need(most) > host_bytes:
        held_by, low = "host", 0
        while most - low > 1:
            middle = (low + most) // 2
            low, most = (middle, most) if host_need(middle) <= host_bytes else (low, middle)
        most = low
    return Longest(policy, most, slope, fixed, host_need(most), confirmed, held_by)


def longest_of(rows: dict[Policy, Longest]) -> Longest:
    """That of the fastest policy that comes within 2 % of the longest of all; ``rows`` begin with the fastest."""
    most = max(row.tokens for row in rows.values())
    return next(row for row in rows.values() if row.tokens >= 0.98 * most)


@dataclass
class Plan:
    """One forecast. Bytes everywhere; `to_json` is its machine-readable form."""

    base: str
    device: Planned
    policy: Policy
    asked_policy: str
    shape: Shape
    phases: dict[str, Peak]
    """load, first_step, steady_step, evaluation, save, merge: on the device."""
    longest: dict[Policy, Longest]
    """The longest row under each policy that was asked about; the fastest policies first. Empty: not asked."""
    budget_bytes: int
    """What tensors may take on the device."""
    allowance: dict[str, int]
    host: dict[str, int]
    host_phases: dict[str, int]
    disk: dict[str, int]
    parameters: int
    trained: int
    compute: str
    tried: dict[str, int] = field(default_factory=dict)
    """Policy -> peak of a step, of those looked at."""
    sharing: Sharing | None = None
    """How several ranks share the run; None for one."""
    strategy_reason: str = ""
    network: Network | None = None
    """What a rank sends."""
    ranks_per_host: int = 1
    """Ranks that `host_phases` counts together."""
    answers: int = 1
    """Documents of a row: 2 for a pair, each of data.max_length."""
    max_positions: int | None = None
    """What the model was made for, a row; None: its configuration says nothing."""

    @property
    def best(self) -> Longest | None:
        """The longest row, see `longest_of`."""
        return longest_of(self.longest) if self.longest else None

    @property
    def max_tokens(self) -> int:
        """Tokens of a micro-batch that fit."""
        return self.best.tokens if self.best is not None else 0

    @property
    def peak(self) -> Peak:
        """The highest phase."""
        return max(self.phases.values(), key=lambda peak: peak.bytes)

    @property
    def peak_phase(self) -> str:
        """Its name."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)

    @property
    def need_bytes(self) -> int:
        """Peak and allowance."""
        return self.peak.bytes + sum(self.allowance.values())

    @property
    def fits_device(self) -> bool:
        """Every phase is within the budget."""
        return self.peak.bytes <= self.budget_bytes

    @property
    def host_bytes(self) -> int:
        """The highest phase on the host."""
        return max(self.host_phases.values())

    @property
    def fits_host(self) -> bool:
        """True also where the host's memory is not known."""
        return self.device.host_bytes == 0 or self.host_bytes <= self.device.host_bytes

    @property
    def fits(self) -> bool:
        """Device and host."""
        return self.fits_device and self.fits_host

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        peak = self.peak
        return {
            "base": self.base,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "checkpoint": self.policy,
            "fits": self.fits,
            "device": {
                "name": self.device.name,
                "kind": self.device.kind,
                "compute_dtype": self.compute,
                "total_bytes": self.device.total_bytes,
                "others_bytes": self.device.others_bytes,
                "budget_bytes": self.budget_bytes,
                "allowance": self.allowance,
                "peak_bytes": peak.bytes,
                "peak_phase": self.peak_phase,
                "need_bytes": self.need_bytes,
                "headroom_bytes": self.device.total_bytes - self.device.others_bytes - self.need_bytes,
                "fits": self.fits_device,
                "rows": self.shape.rows,
                "length": self.shape.length,
                "phases": {
                    name: {"bytes": p.bytes, "by_category": p.by_category, "module": p.module, "op": p.op}
                    for name, p in self.phases.items()
                },
                **self._longest_json(),
                "breakdown": peak.by_category,
                "tried": self.tried,
                "sharding": None
                if self.sharing is None
                else {**self.sharing.to_json(), "reason": self.strategy_reason},
            },
            "host": {
                "total_bytes": self.device.host_bytes,
                "peak_bytes": self.host_bytes,
                "ranks": self.ranks_per_host,
                "fits": self.fits_host,
                "breakdown": self.host,
                "phases": self.host_phases,
            },
            "disk": {**self.disk, "total_bytes": sum(self.disk.values())},
            "network": None if self.network is None else self.network.to_json(),
        }

    def _longest_json(self) -> dict[str, Any]:
        best = self.best
        return {
            "bytes_per_token": round(best.bytes_per_token) if best else 0,
            "fixed_bytes": round(best.fixed_bytes) if best else 0,
            "max_tokens": self.max_tokens,
            "max_tokens_checkpoint": best.policy if best else None,
            "max_tokens_confirmed": best.confirmed if best else False,
            "max_length": min(
                self.max_tokens // (self.shape.rows * self.answers), self.max_positions or self.max_tokens
            ),
            "max_positions": self.max_positions,
            "longest": {policy: row.to_json() for policy, row in self.longest.items()},
        }
