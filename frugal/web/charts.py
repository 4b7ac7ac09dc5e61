"""Inline SVG for the run's page: a line chart and a bar chart, no script, no font, colours from the page's CSS."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 760, 280
LEFT, RIGHT, TOP, BOTTOM = 56, 16, 12, 34
MOST_POINTS = 1200
"""Points of one drawn line; longer series are thinned to the extremes of equal stretches."""


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart: finite (x, y) points in the order of x."""

    name: str
    css: str
    """Class that gives the colour."""
    points: Sequence[tuple[float, float]]
    markers: bool = False


def ticks(low: float, high: float, count: int = 5, *, whole: bool = False) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) from ``low`` to ``high``; whole ones only if asked."""
    if not math.isfinite(low) or not math.isfinite(high) or high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    if whole:
        step = max(1.0, step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def smooth(points: Sequence[tuple[float, float]], weight: float) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction, as trackers draw it (Kingma & Ba 2014, section 3)."""
    mean, out = 0.0, []
    for index, (x, y) in enumerate(points, start=1):
        mean = weight * mean + (1 - weight) * y
        out.append((x, mean / (1 - weight**index)))
    return out


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most ``most`` points: of each stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    out: list[tuple[float, float]] = []
    stretch = math.ceil(len(points) / (most // 2))
    for start in range(0, len(points), stretch):
        part = points[start : start + stretch]
        ends = {min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])}
        out += sorted(ends)
    return out


def line_chart(series: Sequence[Series], *, x_label: str, y_label: str) -> str:
    """A line chart as one ``<svg>``, x in whole numbers (steps); "" when there is nothing to draw."""
    drawn = [entry for entry in series if entry.points]
    if not drawn:
        return ""
    xs = [x for entry in drawn for x, _ in entry.points]
    ys = [y for entry in drawn for _, y in entry.points]
    x_low, x_high = min(xs), max(xs) if max(xs) > min(xs) else min(xs) + 1
    pad = (max(ys) - min(ys)) * 0.06 or abs(max(ys)) * 0.1 or 1.0
    y_low, y_high = min(ys) - pad, max(ys) + pad
    if min(ys) >= 0:
        y_low = max(0.0, y_low)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    names = ", ".join(entry.name for entry in drawn)
    label = html.escape(f"{y_label} against {x_label}: {names}")
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">']
    for value in ticks(y_low, y_high):
        _, y = at(x_low, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    for value in ticks(x_low, x_high, 8, whole=True):
        x, _ = at(value, y_low)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{value:g}</text>')
    parts.append(
        f'<text class="tick" x="{WIDTH - RIGHT}" y="{HEIGHT - 2}" text-anchor="end">{html.escape(x_label)}</text>'
    )
    for entry in drawn:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in thin(entry.points)))
        if len(entry.points) > 1:
            parts.append(f'<polyline class="line {entry.css}" points="{path}"/>')
        if entry.markers or len(entry.points) == 1:
            for x_value, y_value in entry.points:
                x, y = at(x_value, y_value)
                title = html.escape(f"{entry.name}, {x_label} {x_value:g}: {y_value:.4f}")
                parts.append(
                    f'<circle class="dot {entry.css}" cx="{x:.1f}" cy="{y:.1f}" r="4"><title>{title}</title></circle>'
                )
    return "".join(parts) + "</svg>"


def legend(series: Sequence[Series]) -> str:
    """Names of the lines beside their colours."""
    entries = [
        f'<span class="key"><span class="swatch {entry.css}"></span>{html.escape(entry.name)}</span>'
        for entry in series
        if entry.points
    ]
    return f'<p class="legend">{"".join(entries)}</p>' if entries else ""


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]]) -> str:
    """Horizontal bars, one scale for all; "" when empty. A row: (label, [(value, text beside it, css class), ...])."""
    values = [value for _, entries in rows for value, _, _ in entries]
    if not values or max(values) <= 0:
        return ""
    scale = (WIDTH - 130 - 190) / max(values)
    height = 8 + sum(len(entries) * 22 + 8 for _, entries in rows)
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="bars">']
    y = 8
    for label, entries in rows:
        parts.append(f'<text class="label" x="122" y="{y + 14}" text-anchor="end">{html.escape(label)}</text>')
        for value, text, css in entries:
            width = max(2.0, value * scale)
            parts.append(f'<rect class="bar {css}" x="130" y="{y + 2}" width="{width:.1f}" height="16" rx="3"/>')
            parts.append(f'<text class="tick" x="{138 + width:.1f}" y="{y + 14}">{html.escape(text)}</text>')
            y += 22
        y += 8
    return "".join(parts) + "</svg>"


@dataclass(frozen=True, slots=True)
class Area:
    """One layer of a stacked chart: finite (x, height) points, the same x in every layer."""

    name: str
    css: str
    points: Sequence[tuple[float, float]]


def area_chart(
    areas: Sequence[Area],
    *,
    marks: Sequence[tuple[float, float, str]],
    title: str,
    subtitle: str,
    x_label: str,
    y_label: str,
) -> str:
    """Layers on top of each other as one ``<svg>`` that stands alone; ``marks`` are points (x, y, text), each with a
    line from the left to it and down to the axis."""
    width, height, left, right, top, bottom = 860, 480, 56, 20, 100, 44
    xs = [x for x, _ in areas[0].points]
    tops = [sum(area.points[i][1] for area in areas) for i in range(len(xs))]
    x_high, y_high = max(xs), max([*tops, *(y for _, y, _ in marks)]) * 1.06

    def at(x: float, y: float) -> tuple[float, float]:
        across = left + x / x_high * (width - left - right)
        return across, height - bottom - y / y_high * (height - top - bottom)

    label = html.escape(title)
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">']
    parts.append(f'<text class="title" x="{left}" y="24">{label}</text>')
    parts.append(f'<text class="tick" x="{left}" y="44">{html.escape(subtitle)}</text>')
    for value in ticks(0, y_high):
        _, y = at(0, value)
        parts.append(f'<line class="grid" x1="{left}" x2="{width - right}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>')
    parts.append(f'<text class="tick" x="{left - 8}" y="{top - 8}" text-anchor="end">{html.escape(y_label)}</text>')
    for value in ticks(0, x_high, 8, whole=True):
        x, _ = at(value, 0)
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{height - bottom + 18}" text-anchor="middle">{value:,.0f}</text>'
        )
    parts.append(
        f'<text class="tick" x="{width - right}" y="{height - 8}" text-anchor="end">{html.escape(x_label)}</text>'
    )
    below = [0.0] * len(xs)
    for area in areas:
        above = [b + h for b, (_, h) in zip(below, area.points, strict=True)]
        edge = [at(x, y) for x, y in zip(xs, above, strict=True)]
        edge += [at(x, y) for x, y in zip(reversed(xs), reversed(below), strict=True)]
        shape = " ".join(f"{x:.1f},{y:.1f}" for x, y in edge)
        parts.append(f'<polygon class="{area.css}" points="{shape}"><title>{html.escape(area.name)}</title></polygon>')
        below = above
    for x_value, y_value, text in marks:
        x, y = at(x_value, y_value)
        parts.append(f'<path class="budget" d="M{left},{y:.1f} H{x:.1f} V{height - bottom}"/>')
        parts.append(f'<circle class="dot" cx="{x:.1f}" cy="{y:.1f}" r="4"/>')
        anchor, shift = ("end", -8) if x > left + 130 else ("start", 8)
        parts.append(
            f'<text class="mark" x="{x + shift:.1f}" y="{y - 8:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
        )
    return "".join(parts) + "</svg>"


def legend_svg(areas: Sequence[Area], *, x: int = 56, y: int = 70) -> str:
    """Names of the layers beside their colours, in one row inside an ``<svg>``."""
    parts = []
    for area in areas:
        parts.append(f'<rect class="{area.css}" x="{x}" y="{y - 10}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="tick" x="{x + 18}" y="{y}">{html.escape(area.name)}</text>')
        x += 40 + 7 * len(area.name)
    return "".join(parts)
