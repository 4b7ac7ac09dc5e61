"""The plan as a picture: device memory by what it is against the length of a row, and how long a row may be on GPUs.

An `.svg` stands alone; an `.html` page puts the table beside it. Light and dark follow the reader's system.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from frugal.errors import ConfigError
from frugal.files import write_text
from frugal.memory.meter_report import (
    ADAPTERS,
    CATEGORIES,
    GRADIENTS,
    INPUTS,
    OPTIMIZER,
    QUANT_STATE,
    SAVED,
    TEMPORARIES,
    WEIGHTS,
)
from frugal.planning.allocation_sites import TokenLine
from frugal.planning.forecast import longest_of
from frugal.planning.host import tensor_budget
from frugal.planning.planner import Planner
from frugal.planning.simulated_model import Policy
from frugal.planning.sweep import SWEEP_GB, SweepRow, sweep
from frugal.units import GIB, gib, nominal_gib
from frugal.web.charts import Series, chart
from frugal.web.pages import render

POINTS = 96
_PARTS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("weights", (WEIGHTS, QUANT_STATE), "p1"),
    ("adapters, gradients, optimizer", (ADAPTERS, GRADIENTS, OPTIMIZER), "p2"),
    ("saved for backward", (SAVED, INPUTS), "p3"),
    ("temporaries", (TEMPORARIES,), "p4"),
)
STYLE = """
svg{font:13px system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;background:#fff}
.title{font-size:16px;font-weight:600;fill:#1b2330}.grid{stroke:#dfe4ea}.tick{fill:#5b6676;font-size:12px}
.budget{stroke:#1b2330;stroke-dasharray:5 4;fill:none}.mark{fill:#1b2330;font-size:12px}
.p1{fill:#31588f}.p2{fill:#7fa3d6}.p3{fill:#d98b3f}.p4{fill:#f0c48f}.dot{fill:#1b2330}
@media (prefers-color-scheme:dark){svg{background:#1b2129}.title,.mark{fill:#e6eaf0}.grid{stroke:#303946}
.tick{fill:#9aa6b5}.budget{stroke:#e6eaf0}.dot{fill:#e6eaf0}}
"""


@dataclass(frozen=True)
class Drawing:
    """One policy over the lengths, and the budgets' longest rows."""

    title: str
    policy: Policy
    areas: list[Series]
    budgets: list[SweepRow]


def drawing(planner: Planner) -> Drawing:
    """Everything that is drawn. The policy is that of the longest row on the planner's device."""
    found = {policy: planner.longest_row(policy) for policy in planner.policies}
    policy = longest_of(found).policy
    sizes = sorted({*SWEEP_GB, max(1, round(planner.device.total_bytes / GIB))})
    rows = [row for row in sweep(planner, policy, tuple(sizes)) if row.max_tokens]
    shown = [row for row in rows if row.total_bytes <= max(2 * planner.device.total_bytes, 16 * GIB)] or rows[:1]
    until = int(1.06 * shown[-1].max_tokens) if shown else 4 * planner.line_length
    line = planner.line(policy)
    title = f"{planner.config.model.base}: device memory of a step"
    return Drawing(title, policy, _areas(line, until), shown)


def _areas(line: TokenLine, until: int) -> list[Series]:
    lengths = [max(1, round(until * i / (POINTS - 1))) for i in range(POINTS)]
    peaks = [line.at(length) for length in lengths]
    areas = []
    for name, categories, css in _PARTS:
        values = [sum(peak.by_category.get(c, 0) for c in categories) / GIB for peak in peaks]
        areas.append(Series(name, css, list(zip(map(float, lengths), values, strict=True))))
    assert {c for _, categories, _ in _PARTS for c in categories} == set(CATEGORIES)
    return areas


def render_svg(found: Drawing, kind: str, capability: tuple[int, int] | None) -> Markup:
    """The drawing as one `<svg>`."""
    marks = [
        (
            float(row.max_tokens),
            tensor_budget(kind, capability, row.total_bytes) / GIB,
            f"{nominal_gib(row.total_bytes)}: {row.max_tokens:,}",
        )
        for row in found.budgets
    ]
    return chart(
        found.areas,
        x_label="tokens of a row",
        y_label="GiB",
        stacked=True,
        marks=marks,
        title=found.title,
        subtitle=f"against the length of a row, checkpoint: {found.policy}; dashed: the longest row of a device",
        style=STYLE,
    )


def draw(planner: Planner, path: Path) -> None:
    """Write the picture. Raises ConfigError for an ending other than .svg or .html."""
    ending = path.suffix.lower()
    if ending not in (".svg", ".html"):
        raise ConfigError(f"--picture {path}: expected a file name that ends in .svg or .html.")
    found = drawing(planner)
    picture = render_svg(found, planner.device.kind, planner.device.capability)
    if ending == ".html":
        rows = [[nominal_gib(row.total_bytes), f"{row.max_tokens:,}", gib(row.host_bytes)] for row in found.budgets]
        picture = render("plan.html", title=found.title, picture=picture, rows=rows)
    write_text(path, picture)
