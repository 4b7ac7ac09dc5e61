"""`frugal plan`: which question was asked, and how its answer is printed."""

from __future__ import annotations

import json

from frugal.config import Config
from frugal.errors import FrugalError
from frugal.planning.api import make_planner
from frugal.planning.planner import Plan, Planner, Policy
from frugal.planning.show import lines, measure_lines, sweep_lines
from frugal.planning.sweep import solve as solved
from frugal.planning.sweep import sweep as swept


def run(planner: Planner, *, as_json: bool, sweep: bool, solve: bool) -> bool:
    """Print the plan, the sweep or the solution; returns whether something fits."""
    if sweep:
        asked = planner.config.memory.checkpoint
        policy: Policy = ("disk" if planner.device.kind == "cpu" else "offload") if asked == "auto" else asked
        rows = swept(planner, policy)
        _print([row.to_json() for row in rows], sweep_lines(rows, planner.config.model.base, policy), as_json)
        return True
    if solve:
        measures = solved(planner)
        _print([measure.to_json() for measure in measures], measure_lines(measures), as_json)
        return measures[-1].fits
    found: Plan = planner.plan()
    _print(found.to_json(), lines(found), as_json)
    return found.fits


def as_comments(config: Config) -> list[str]:
    """The plan for the device found here, as lines of YAML comments; a base that cannot be had is said, no error."""
    try:
        # what `frugal train` forecasts too; `frugal plan` has the longest sequence and every phase
        text = lines(make_planner(config).plan(with_line=False, simulated=("steady_step", "evaluation")))
    except FrugalError as error:
        text = [f"no plan: {error}"]
    return [f"# {line}".rstrip() for line in text]


def _print(values: object, text: list[str], as_json: bool) -> None:
    print(json.dumps(values, indent=2) if as_json else "\n".join(text))
