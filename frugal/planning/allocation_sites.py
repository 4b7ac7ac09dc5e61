"""Peaks by allocation site: what was live at each site's highest moment, extrapolated over layers and tokens.

Every site's own peak is extrapolated linearly. The largest site *after* that is the peak: which one it is may well
change with layers or tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from frugal.memory.meter import LiveBytesMeter, MeterDispatch
from frugal.memory.meter_report import CATEGORIES, GRADIENTS

Site = tuple[str, str]
"""(module with layer numbers as *, operation); ("", "at rest") is what exists before a phase begins."""
AT_REST: Site = ("", "at rest")
Sites = dict[Site, tuple[float, dict[str, float]]]
"""Site -> (highest total in bytes, its categories)."""


class _AnswersForValues(MeterDispatch):
    """Answers those who read a value of a tensor without memory.

    transformers asks whether a row is one document (fake tensors are left out there, plain meta tensors are not). Yes:
    documents are told by their offsets. A training step reads loss, number of targets and norm, outside of the model:
    1, so that it goes on. What a model reads besides is an error, as without this: its memory might depend on it.
    """

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            if args[0].is_meta and args[0].dtype is torch.bool:
                return True
            if not self.meter.inside_module:
                return 1.0 if args[0].dtype.is_floating_point else 1
        return super()._call(func, args, kwargs)


class SiteMeter(LiveBytesMeter):
    """A live-bytes meter that remembers, for every allocation site, the highest total at which it stood."""

    dispatch_class = _AnswersForValues

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._best: dict[tuple[str, str, Any], tuple[int, int]] = {}
        super().__init__(*args, **kwargs)

    def _add(self, tensor: torch.Tensor, category: str, site: tuple[str, str, Any], existing: bool = False) -> None:
        super()._add(tensor, category, site, existing)
        if not existing:
            best = self._best.get(site)
            if best is None or self._total > best[0]:
                self._best[site] = (self._total, self._clock)

    def sites(self) -> Sites:
        """Totals and categories of every site's highest moment."""
        found: dict[Site, tuple[int, int]] = {AT_REST: (self._start, 0)}
        for (module, node, func), best in self._best.items():
            name = ".".join("*" if part.isdigit() else part for part in module.split("."))
            op = str(func).removesuffix(".default")
            key = (name, f"{node} > {op}" if node else op)
            if best[0] > found.get(key, (0, 0))[0]:
                found[key] = best
        # bytes came and went at clock ticks: one sweep gives the categories at every tick that is asked for
        wanted = {clock for _, clock in found.values()}
        events: dict[int, list[tuple[str, int]]] = {}
        for record in self._records:
            events.setdefault(record.born, []).append((record.category, record.nbytes))
            if record.died != -1:
                events.setdefault(record.died + 1, []).append((record.category, -record.nbytes))
        now: Counter[str] = Counter()
        at: dict[int, dict[str, float]] = {}
        for clock in range(self._clock + 1):
            for category, nbytes in events.get(clock, ()):
                now[category] += nbytes
            if clock in wanted:
                at[clock] = {c: float(now[c]) for c in CATEGORIES if now[c]}
        return {site: (float(total), at[clock]) for site, (total, clock) in found.items()}


@dataclass(frozen=True)
class Peak:
    """A forecast peak."""

    bytes: int
    by_category: dict[str, int]
    module: str
    """Innermost module at the peak, layer numbers as *; "" outside modules."""
    op: str
    """The operation, after the autograd node in backward."""


def subtract(sites: Sites, category: str, nbytes: float) -> Sites:
    """Take ``nbytes`` of ``category`` off every moment."""
    return {
        site: (total - nbytes, {**cats, category: cats.get(category, 0.0) - nbytes})
        for site, (total, cats) in sites.items()
    }


def rest_without_gradients(sites: Sites) -> Sites:
    """Take gradients off what exists before a step: its second micro-batch finds them, the first does not."""
    total, cats = sites[AT_REST]
    rest = {name: count for name, count in cats.items() if name != GRADIENTS}
    return {**sites, AT_REST: (total - cats.get(GRADIENTS, 0.0), rest)}


def merge(runs: Iterable[Sites]) -> Sites:
    """Join the parts of a phase: what exists before the first part, and of each site its highest moment in any."""
    found: Sites = {}
    for part in runs:
        for site, moment in part.items():
            if site not in found or (site != AT_REST and moment[0] > found[site][0]):
                found[site] = moment
    return found


def extrapolate(x1: float, x2: float, low: Sites, high: Sites, x: float) -> Sites:
    """Extrapolate every site linearly through two points to ``x``. Sites that only one run has stay out."""

    def at(a: float, b: float) -> float:
        return a + (b - a) * (x - x1) / (x2 - x1)

    found: Sites = {}
    for site in low.keys() & high.keys():
        (total1, cats1), (total2, cats2) = low[site], high[site]
        cats = {c: at(cats1.get(c, 0.0), cats2.get(c, 0.0)) for c in cats1.keys() | cats2.keys()}
        found[site] = (at(total1, total2), cats)
    return found


def highest(sites: Sites) -> Peak:
    """The largest site."""
    site = max(sites, key=lambda s: (sites[s][0], s))
    total, cats = sites[site]
    return Peak(round(total), {c: round(cats[c]) for c in CATEGORIES if round(cats.get(c, 0))}, *site)


@dataclass(frozen=True)
class TokenLine:
    """The peak of a phase as a function of the tokens of a micro-batch."""

    tokens1: int
    tokens2: int
    low: Sites
    high: Sites

    def at(self, tokens: float) -> Peak:
        """Forecast at ``tokens``."""
        return highest(extrapolate(self.tokens1, self.tokens2, self.low, self.high, tokens))

    def slope_and_fixed(self, tokens: int) -> tuple[float, float]:
        """(bytes per further token, bytes without tokens) of the site that is the highest at ``tokens``."""
        peak = self.at(tokens)
        site = (peak.module, peak.op)
        slope = (self.high[site][0] - self.low[site][0]) / (self.tokens2 - self.tokens1)
        return slope, self.low[site][0] - slope * self.tokens1

    def most_tokens(self, budget_bytes: float) -> int:
        """The largest number of tokens whose peak stays within ``budget_bytes``; 0 when nothing fits.

        Every site is a straight line, and none falls: the answer is the smallest of the sites' own.
        """
        most = float(1 << 40)
        for site in self.low.keys() & self.high.keys():
            slope = (self.high[site][0] - self.low[site][0]) / (self.tokens2 - self.tokens1)
            fixed = self.low[site][0] - slope * self.tokens1
            # the peak is rounded to whole bytes
            if slope > 0:
                most = min(most, (budget_bytes + 0.5 - fixed) / slope)
            elif fixed + slope > budget_bytes + 0.5:
                return 0
        found = int(most)
        while found > 0 and self.at(found).bytes > budget_bytes:
            found -= 1
        return max(found, 0)
