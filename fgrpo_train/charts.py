"""Charts as inline SVG: lines and heat maps. Colours and dashes are those of assets/report.css.

A run keeps its number in every chart; number n is drawn in colour n and with dash n, so that runs
can be told apart without colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 12, 34
NUM_STYLES = 8
MAX_POINTS = 500
"""Of a curve, about as many as a screen can show of a chart."""
MAX_COLUMNS, MAX_ROWS = 60, 33
"""Cells of a heat map."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Curve:
    """Points (x, y) in order of x, drawn in the style of run number `run`.

    kind: "mean", the line that counts; "each", the pale values under it; "dots", a line with marked
    values; "before", the same for what the others are compared with; "points", marks alone.
    """

    name: str
    points: Sequence[Point]
    run: int | None = 0
    """None: of all runs together."""
    kind: str = "mean"
    intervals: dict[float, tuple[float, float]] = field(default_factory=dict)
    """{x: (low, high)}, drawn as bars."""

    @property
    def classes(self) -> str:
        return f"{style(self.run)} {self.kind}"


def style(run: int | None) -> str:
    """CSS classes of a run: its colour and its dash; the pairs repeat after 64 runs."""
    if run is None:
        return "all"
    return f"c{run % NUM_STYLES} d{(run + run // NUM_STYLES) % NUM_STYLES}"


def line_chart(curves: Sequence[Curve], *, x_label: str, log2_x: bool = False) -> str:
    """An SVG of the curves. Their values stand in data-x and data-y, for the page's script."""
    points = [point for curve in curves for point in curve.points]
    if not points:
        return '<p class="none">no values</p>'
    xs, ys = zip(*points, strict=True)
    bounds = [bound for curve in curves for pair in curve.intervals.values() for bound in pair]
    low, high = min(*ys, *bounds, ys[0]), max(*ys, *bounds, ys[0])
    far_from_zero = 0.8 * high < low < 0.999 * high
    y_ticks = ticks(low if far_from_zero else min(0.0, low), high, 5)
    x_ticks = (
        sorted(set(xs))
        if log2_x
        else [x for x in ticks(min(xs), max(xs), 6) if min(xs) <= x <= max(xs)]
    )
    x_scale = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT, log2=log2_x)
    y_scale = _scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}">']
    for y in y_ticks:
        at = y_scale(y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{at + 4}" text-anchor="end">{y:g}</text>')
    for x in x_ticks:
        parts.append(
            f'<text x="{x_scale(x)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{x:g}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{escape(x_label)}</text>'
    )
    parts += [_curve(curve, x_label, x_scale, y_scale) for curve in curves]
    return "".join(parts) + "</svg>"


def _curve(
    curve: Curve, x_label: str, x_scale: Callable[[float], float], y_scale: Callable[[float], float]
) -> str:
    name, points = escape(curve.name), thin(curve.points)
    path = " ".join(f"{x_scale(x)},{y_scale(y)}" for x, y in points)
    data_x = " ".join(f"{x:.9g}" for x, _ in points)
    data_y = " ".join(f"{y:.4g}" for _, y in points)
    parts = [
        f'<polyline class="{curve.classes}" points="{path}" data-name="{name}" '
        f'data-x="{data_x}" data-y="{data_y}"/>'
    ]
    for x, (low, high) in curve.intervals.items():
        parts.append(
            f'<line class="{curve.classes} interval" x1="{x_scale(x)}" x2="{x_scale(x)}" '
            f'y1="{y_scale(low)}" y2="{y_scale(high)}"/>'
        )
    # A line of one point cannot be seen.
    if curve.kind in ("dots", "before", "points") or len(points) == 1:
        for x, y in points:
            label = f"{name}, {escape(x_label)} {x:g}: {y:.4g}"
            if x in curve.intervals:
                label += " ({:.4g} to {:.4g})".format(*curve.intervals[x])
            parts.append(
                f'<circle class="{curve.classes}" cx="{x_scale(x)}" cy="{y_scale(y)}" r="4">'
                f"<title>{label}</title></circle>"
            )
    return "".join(parts)


def thin(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points: means over equally many neighbours, at the x of the last of them."""
    size = math.ceil(len(points) / most) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(y for _, y in part) / len(part)) for part in parts]


def trailing_means(points: Sequence[Point], window: int) -> list[Point]:
    """The mean of each point and the window - 1 before it, fewer at the start."""
    sums = [0.0, *accumulate(y for _, y in points)]
    return [
        (x, (sums[end] - sums[max(0, end - window)]) / min(end, window))
        for end, (x, _) in enumerate(points, start=1)
    ]


def heat_map(columns: Sequence[tuple[float, Sequence[float]]], *, most: float, title: str) -> str:
    """An SVG of the share of groups by step and number correct, 0 at the bottom.

    Args:
        columns: (step, counts of groups by number correct, 0..G), in order of step.
        most: the share that is drawn darkest; shades go with the root, so that rare cells show.
    """
    cells = heat_cells(columns)
    group_size = len(columns[0][1]) - 1
    num_rows = len(cells[0][2])
    cell_width = (WIDTH - RIGHT - LEFT) / len(cells)
    cell_height = (HEIGHT - BOTTOM - TOP) / num_rows
    parts = [f'<svg class="heat" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    parts.append(f"<title>{escape(title)}</title>")
    parts.append(
        f'<rect class="frame" x="{LEFT}" y="{TOP}" width="{WIDTH - RIGHT - LEFT}" '
        f'height="{HEIGHT - BOTTOM - TOP}"/>'
    )
    for column, (first, last, shares) in enumerate(cells):
        for row, share in enumerate(shares):
            if share == 0:
                continue
            low, high = row_range(row, group_size)
            steps = f"step {first:g}" if first == last else f"steps {first:g} to {last:g}"
            number = f"{low}" if low == high else f"{low} to {high}"
            parts.append(
                f'<rect x="{LEFT + column * cell_width:.2f}" '
                f'y="{HEIGHT - BOTTOM - (row + 1) * cell_height:.2f}" '
                f'width="{cell_width:.2f}" height="{cell_height:.2f}" '
                f'fill-opacity="{math.sqrt(share / most):.2f}"><title>{steps}: {number} of '
                f"{group_size} correct in {share:.1%} of groups</title></rect>"
            )
    for row in range(0, num_rows, math.ceil(num_rows / 9)):
        y = HEIGHT - BOTTOM - (row + 0.5) * cell_height + 4
        label = row_range(row, group_size)[0]
        parts.append(f'<text x="{LEFT - 7}" y="{y:.1f}" text-anchor="end">{label}</text>')
    steps_of = [cells[0][0], *(last for _, last, _ in cells[1:])]
    for index in sorted({0, len(cells) // 2, len(cells) - 1}):
        x = LEFT + (index + 0.5) * cell_width
        parts.append(
            f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
            f"{steps_of[index]:g}</text>"
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">step</text>')
    return "".join(parts) + "</svg>"


def heat_cells(
    columns: Sequence[tuple[float, Sequence[float]]],
) -> list[tuple[float, float, list[float]]]:
    """(first step, last step, share of groups in each row), neighbours put together to fit."""
    size = math.ceil(len(columns) / MAX_COLUMNS)
    height = _row_height(len(columns[0][1]) - 1)
    cells = []
    for start in range(0, len(columns), size):
        part = columns[start : start + size]
        counts = [sum(column) for column in zip(*(counts for _, counts in part), strict=True)]
        rows = [sum(counts[row : row + height]) for row in range(0, len(counts), height)]
        total = sum(rows) or 1
        cells.append((part[0][0], part[-1][0], [row / total for row in rows]))
    return cells


def _row_height(group_size: int) -> int:
    return math.ceil((group_size + 1) / MAX_ROWS)


def row_range(row: int, group_size: int) -> tuple[int, int]:
    """The numbers correct, first and last, that a row of the heat map stands for."""
    height = _row_height(group_size)
    return row * height, min((row + 1) * height - 1, group_size)


def ticks(low: float, high: float, count: int) -> list[float]:
    """At most about `count` round numbers that cover [low, high]."""
    span = (high - low) or abs(high) or 1.0
    power = 10.0 ** math.floor(math.log10(span / count))
    step = next(power * m for m in (1, 2, 5, 10) if span / (power * m) <= count)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [float(f"{n * step:.12g}") for n in range(first, max(last, first + 1) + 1)]


def _scale(
    low: float, high: float, start: float, end: float, *, log2: bool = False
) -> Callable[[float], float]:
    transform = math.log2 if log2 else float
    origin, span = transform(low), (transform(high) - transform(low)) or 1.0
    return lambda value: round(start + (transform(value) - origin) / span * (end - start), 2)
