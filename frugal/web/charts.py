"""Charts as inline SVG: lines, or layers on top of each other; colours come from the page's CSS classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from frugal.web.pages import render

LEFT, RIGHT, BOTTOM = 56, 16, 40
MOST_POINTS = 1200
"""Points of one drawn line; longer series are thinned to the extremes of equal stretches."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Series:
    """One line or layer of a chart: finite (x, y) points in the order of x."""

    name: str
    css: str
    """Class that gives the colour."""
    points: Points
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


def smooth(points: Points, weight: float) -> list[tuple[float, float]]:
    """Exponential moving average with bias correction, as trackers draw it (Kingma & Ba 2014, section 3)."""
    mean, out = 0.0, []
    for index, (x, y) in enumerate(points, start=1):
        mean = weight * mean + (1 - weight) * y
        out.append((x, mean / (1 - weight**index)))
    return out


def thin(points: Points, most: int = MOST_POINTS) -> list[tuple[float, float]]:
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


def chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    stacked: bool = False,
    marks: Sequence[tuple[float, float, str]] = (),
    title: str = "",
    subtitle: str = "",
    style: str = "",
) -> Markup:
    """Draw one ``<svg>``, x in whole numbers; empty when there is nothing to draw.

    Args:
        stacked: the series are layers on top of each other from 0 up, with the same x in each; else they are lines.
        marks: points (x, y, text), each with a dashed line from the left to it and down to the axis.
        title: with one, the chart is larger and has title, subtitle and the names of the series inside.
        style: CSS for an image that stands alone.
    """
    drawn = [one for one in series if one.points]
    if not drawn:
        return Markup()
    width, height, top = (860, 480, 100) if title else (760, 280, 12)
    layers = _stack(drawn) if stacked else [list(one.points) for one in drawn]
    xs = [x for layer in layers for x, _ in layer]
    ys = [y for layer in layers for _, y in layer] + [y for _, y, _ in marks]
    x_low, x_high = (0.0 if stacked else min(xs)), max(xs)
    x_high = x_high if x_high > x_low else x_low + 1
    pad = (max(ys) - min(ys)) * 0.06 or abs(max(ys)) * 0.1 or 1.0
    y_low, y_high = min(ys) - pad, max(ys) + pad
    if stacked or min(ys) >= 0:
        y_low = 0.0 if stacked else max(0.0, y_low)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (width - LEFT - RIGHT)
        return round(across, 1), round(height - BOTTOM - (y - y_low) / (y_high - y_low) * (height - top - BOTTOM), 1)

    shapes = []
    below = [(x, 0.0) for x, _ in layers[0]]
    for one, layer in zip(drawn, layers, strict=True):
        edge = [at(*point) for point in (layer + below[::-1] if stacked else thin(layer))]
        dots = layer if not stacked and (one.markers or len(layer) == 1) else []
        shapes.append((one, edge, [(*at(x, y), x, y) for x, y in dots]))
        below = layer
    return render(
        "chart.svg",
        width=width,
        height=height,
        box=(LEFT, top, width - RIGHT, height - BOTTOM),
        x_ticks=[(at(value, y_low)[0], value) for value in ticks(x_low, x_high, 8, whole=True)],
        y_ticks=[(at(x_low, value)[1], value) for value in ticks(y_low, y_high)],
        shapes=shapes,
        marks=[(*at(x, y), text) for x, y, text in marks],
        label=title or f"{y_label} against {x_label}: {', '.join(one.name for one in drawn)}",
        **{"x_label": x_label, "y_label": y_label, "stacked": stacked, "title": title, "subtitle": subtitle},
        style=Markup(style),
    )


def _stack(series: Sequence[Series]) -> list[list[tuple[float, float]]]:
    """Upper edges of the layers."""
    edges: list[list[tuple[float, float]]] = []
    below = [0.0] * len(series[0].points)
    for one in series:
        below = [base + height for base, (_, height) in zip(below, one.points, strict=True)]
        edges.append([(x, y) for (x, _), y in zip(one.points, below, strict=True)])
    return edges
