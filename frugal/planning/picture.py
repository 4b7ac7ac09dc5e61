"""The plan as a picture: device memory by what it is against the length of a row, and how long a row may be on GPUs.

An `.svg` stands alone; an `.html` page puts the table beside it. Light and dark follow the reader's system.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from pathlib import Path

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
from frugal.planning.overhead import tensor_budget
from frugal.planning.planner import Planner
from frugal.planning.simulated_model import Policy
from frugal.planning.sweep import SWEEP_GB, SweepRow, sweep
from frugal.units import GIB, gib, nominal_gib
from frugal.web.charts import Area, area_chart, legend_svg

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
    areas: list[Area]
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


def _areas(line: TokenLine, until: int) -> list[Area]:
    lengths = [max(1, round(until * i / (POINTS - 1))) for i in range(POINTS)]
    peaks = [line.at(length) for length in lengths]
    areas = []
    for name, categories, css in _PARTS:
        values = [sum(peak.by_category.get(c, 0) for c in categories) / GIB for peak in peaks]
        areas.append(Area(name, css, list(zip(map(float, lengths), values, strict=True))))
    assert {c for _, categories, _ in _PARTS for c in categories} == set(CATEGORIES)
    return areas


def render(found: Drawing, kind: str, capability: tuple[int, int] | None) -> str:
    """The drawing as one `<svg>`."""
    marks = [
        (
            float(row.max_tokens),
            tensor_budget(kind, capability, row.total_bytes) / GIB,
            f"{nominal_gib(row.total_bytes)}: {row.max_tokens:,}",
        )
        for row in found.budgets
    ]
    body = area_chart(
        found.areas,
        marks=marks,
        title=found.title,
        subtitle=f"against the length of a row, checkpoint: {found.policy}; dashed: the longest row of a device",
        x_label="tokens of a row",
        y_label="GiB",
    )
    keys = legend_svg(found.areas)
    return body.replace("</svg>", f"{keys}</svg>").replace(">", f"><style>{STYLE}</style>", 1)


def draw(planner: Planner, path: Path) -> None:
    """Write the picture. Raises ConfigError for an ending other than .svg or .html."""
    ending = path.suffix.lower()
    if ending not in (".svg", ".html"):
        raise ConfigError(f"--picture {path}: pictures are written as .svg or .html. Name the file so.")
    found = drawing(planner)
    svg = render(found, planner.device.kind, planner.device.capability)
    write_text(path, svg if ending == ".svg" else _page(found, svg))


def _page(found: Drawing, svg: str) -> str:
    rows = "".join(
        f"<tr><td>{nominal_gib(row.total_bytes)}</td><td>{row.max_tokens:,}</td><td>{gib(row.host_bytes)}</td></tr>"
        for row in found.budgets
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(found.title)}</title>'
        "<style>body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;"
        "color-scheme:light dark}td,th{text-align:right;padding:4px 14px}</style></head><body>"
        f"{svg}<table><tr><th>device</th><th>longest row</th><th>host</th></tr>{rows}</table></body></html>\n"
    )
