"""Curves over k with interval bands, as an SVG file that stands alone (in a browser, a README)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from fgrpo_train.charts import ticks
from fgrpo_train.evaluation_statistics import Estimate

BLUE, ORANGE, GREY = "#0072b2", "#d55e00", "#7d8794"
WIDTH, PANEL = 520, 300
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 58, 36
"""Margins of a panel around its curves; title and legend stand in the top one."""

_CSS = (
    "text { font: 12px system-ui, sans-serif; fill: #55657a; } "
    ".title { font-size: 15px; font-weight: 600; fill: #14202e; } "
    "line { stroke: #e6ebf0; } line.zero { stroke: #7d8794; }"
)


@dataclass(frozen=True)
class Band:
    """One curve: an estimate at each k."""

    name: str
    estimates: dict[int, Estimate]
    colour: str


@dataclass(frozen=True)
class Panel:
    """Curves on common axes."""

    title: str
    bands: Sequence[Band]


def plot(panels: Sequence[Panel]) -> str:
    """The panels, one below the other; k on a logarithmic axis, values in percent."""
    height = PANEL * len(panels)
    drawn = "".join(
        f'<g transform="translate(0 {PANEL * number})">{_panel(panel)}</g>'
        for number, panel in enumerate(panels)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}"><style>{_CSS}</style>'
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>{drawn}</svg>'
    )


def _panel(panel: Panel) -> str:
    ks = sorted({k for band in panel.bands for k in band.estimates})
    estimates = [e for band in panel.bands for e in band.estimates.values()]
    low, high = min(e.low for e in estimates), max(e.high for e in estimates)
    marks = ticks(min(0.0, 100 * low), 100 * high, 5)
    octaves = max(math.log2(ks[-1] / ks[0]), 1)

    def x(k: int) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * math.log2(k / ks[0]) / octaves, 1)

    def y(value: float) -> float:
        share = (100 * value - marks[0]) / (marks[-1] - marks[0])
        return round(PANEL - BOTTOM - (PANEL - TOP - BOTTOM) * share, 1)

    parts = [f'<text class="title" x="14" y="24">{escape(panel.title)}</text>']
    for mark in marks:
        at = y(mark / 100)
        zero = ' class="zero"' if mark == 0 else ""
        parts.append(f'<line{zero} x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4}" text-anchor="end">{mark:g}%</text>')
    for k in ks:
        parts.append(f'<text x="{x(k)}" y="{PANEL - 18}" text-anchor="middle">{k}</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{PANEL - 4}" text-anchor="end">k</text>')
    for number, band in enumerate(panel.bands):
        left = 14 + number * (WIDTH - 28) // len(panel.bands)
        parts.append(f'<rect x="{left}" y="39" width="16" height="4" fill="{band.colour}"/>')
        parts.append(f'<text x="{left + 22}" y="45">{escape(band.name)}</text>')
    parts += [_interval(band, x, y) for band in panel.bands]
    parts += [_curve(band, x, y) for band in panel.bands]  # above all intervals
    return "".join(parts)


def _interval(band: Band, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    lows = [f"{x(k)},{y(e.low)}" for k, e in band.estimates.items()]
    highs = [f"{x(k)},{y(e.high)}" for k, e in band.estimates.items()]
    edge = " ".join([*lows, *reversed(highs)])
    return f'<polygon points="{edge}" fill="{band.colour}" fill-opacity="0.2"/>'


def _curve(band: Band, x: Callable[[int], float], y: Callable[[float], float]) -> str:
    path = " ".join(f"{x(k)},{y(e.value)}" for k, e in band.estimates.items())
    parts = [f'<polyline points="{path}" fill="none" stroke="{band.colour}"/>']
    for k, e in band.estimates.items():
        value, low, high = (f"{100 * number:.2f}" for number in (e.value, e.low, e.high))
        parts.append(
            f'<circle cx="{x(k)}" cy="{y(e.value)}" r="3.5" fill="{band.colour}"><title>'
            f"{escape(band.name)}, k = {k}: {value}% ({low} to {high})</title></circle>"
        )
    return "".join(parts)
