"""Charts as SVG: things stand where their values are."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from fgrpo_train.charts import (
    MAX_COLUMNS,
    MAX_ROWS,
    Curve,
    heat_cells,
    heat_map,
    line_chart,
    row_range,
    style,
    thin,
    ticks,
    trailing_means,
)


def test_points_stand_where_their_values_are():
    chart = line_chart([Curve("a", [(0, 0.0), (5, 0.25), (10, 1.0)])], x_label="x")
    svg = ElementTree.fromstring(chart)
    points = [tuple(map(float, p.split(","))) for p in svg.find("polyline").get("points").split()]
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x1 == pytest.approx((x0 + x2) / 2)
    assert y1 == pytest.approx(y0 + 0.25 * (y2 - y0)) and y2 < y0, "up is smaller in SVG"
    grid = [float(line.get("y1")) for line in svg.findall("line")]
    assert y0 == max(grid) and y2 == min(grid), "0 and 1 lie on grid lines"


def test_intervals_are_bars_between_their_bounds():
    curve = Curve("a", [(1, 0.5), (2, 1.0)], kind="dots", intervals={1: (0.0, 1.0)})
    svg = ElementTree.fromstring(line_chart([curve], x_label="k", log2_x=True))
    (bar,) = (line for line in svg.findall("line") if "interval" in line.get("class"))
    grid = [float(line.get("y1")) for line in svg.findall("line") if line.get("class") == "grid"]
    assert {float(bar.get("y1")), float(bar.get("y2"))} == {max(grid), min(grid)}
    assert bar.get("x1") == bar.get("x2") == svg.find("circle").get("cx")
    assert svg.find("circle/title").text == "a, k 1: 0.5 (0 to 1)"


def test_a_chart_of_one_point_one_value_or_nothing_is_drawn():
    for points in ([(3, 0.0)], [(1, 2.0), (2, 2.0)], [(1, -1.0), (2, -1.0)], [(1, 0.1), (2, 0.1)]):
        svg = ElementTree.fromstring(line_chart([Curve("a", points)], x_label="x"))
        for pair in svg.find("polyline").get("points").split():
            assert all(math.isfinite(float(number)) for number in pair.split(","))
        assert (svg.find("circle") is not None) == (len(points) == 1), "else it could not be seen"
    assert "no values" in line_chart([], x_label="x")


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 0.017, [0, 0.005, 0.01, 0.015, 0.02]),
        (0, 3e-13, [0, 1e-13, 2e-13, 3e-13]),
        (1, 120, [0, 20, 40, 60, 80, 100, 120]),
        (0, 0, [0, 0.2]),
    ],
)
def test_ticks_are_round_and_cover_the_range(low, high, expected):
    assert ticks(low, high, 6 if high == 120 else 5) == expected


def test_trailing_means_and_thinning_by_hand():
    points = [(1, 1.0), (2, 3.0), (3, 5.0), (4, 1.0)]
    assert trailing_means(points, 2) == [(1, 1.0), (2, 2.0), (3, 4.0), (4, 3.0)]
    assert thin(points, 4) == points
    assert thin(points, 3) == [(2, 2.0), (4, 3.0)], "pairs: threes would be fewer than needed"


def test_runs_are_told_apart_without_colours():
    assert len({style(run).split()[1] for run in range(8)}) == 8
    assert len({style(run) for run in range(64)}) == 64


def test_a_heat_map_has_the_shares_of_each_step():
    columns = [(1, [3, 1, 0]), (2, [0, 2, 2])]
    svg = ElementTree.fromstring(heat_map(columns, most=0.75, title="a"))
    cells = {rect.find("title").text: rect for rect in svg.findall("rect")[1:]}
    assert list(cells) == [
        "step 1: 0 of 2 correct in 75.0% of groups",
        "step 1: 1 of 2 correct in 25.0% of groups",
        "step 2: 1 of 2 correct in 50.0% of groups",
        "step 2: 2 of 2 correct in 50.0% of groups",
    ]
    first, second, _, last = cells.values()
    assert first.get("fill-opacity") == "1.00"
    assert second.get("fill-opacity") == f"{math.sqrt(1 / 3):.2f}"
    assert float(last.get("y")) < float(second.get("y")) < float(first.get("y")), "0 at the bottom"
    assert float(last.get("x")) > float(first.get("x")) == float(second.get("x"))


def test_a_long_run_and_a_large_group_are_put_together():
    group_size = 100
    columns = [(step, [1] * (group_size + 1)) for step in range(1, 1001)]
    cells = heat_cells(columns)
    assert len(cells) <= MAX_COLUMNS and len(cells[0][2]) <= MAX_ROWS
    assert (cells[0][0], cells[-1][1]) == (1, 1000)
    assert all(sum(shares) == pytest.approx(1) for _, _, shares in cells)
    ranges = [row_range(row, group_size) for row in range(len(cells[0][2]))]
    assert ranges[0] == (0, 3) and ranges[-1] == (100, 100)
    assert cells[0][2][0] == pytest.approx(4 / 101)
