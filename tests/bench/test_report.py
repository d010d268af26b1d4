"""Reports: files that stand alone, and plots that say what the numbers say."""

from __future__ import annotations

import csv
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from graft.bench.report.files import html_of, write
from graft.bench.report.page import Bars, Lines, Page, Table
from graft.bench.report.svg import draw, ticks
from graft.common.errors import InvalidArgument

PAGE = Page(
    "cost",
    "Cost & <effect>",
    {"fp32": {"1": 2.5}},
    {"machine": "<two> cores"},
    [Table("Medians", ("rows", "ms"), [(1, 2.5), (2, None)]), Table("More", ("a",), [("x,y",)])],
    [
        Lines("Curve", "rows", "ms", {"fp32": [(1.0, 2.5), (8.0, 5.0)]}),
        Bars(
            "Stages", "ms", {"plain": {"forward": 3.0, "choice": 1.0}, "drafted": {"forward": 4.0}}
        ),
    ],
    ("skipped <this>",),
)


def test_every_table_is_a_csv_and_the_answer_is_json(tmp_path: Path) -> None:
    written = write(PAGE, tmp_path / "new" / "folder")
    assert [path.name for path in written] == ["cost.json", "cost.csv", "cost-2.csv", "cost.html"]
    answer = json.loads(written[0].read_text())
    assert answer == {"fp32": {"1": 2.5}, "facts": {"machine": "<two> cores"}}
    with written[1].open(newline="") as file:
        assert list(csv.reader(file)) == [["rows", "ms"], ["1", "2.5"], ["2", ""]]
    with written[2].open(newline="") as file:
        assert list(csv.reader(file)) == [["a"], ["x,y"]]


def test_the_page_loads_nothing_and_escapes_all(tmp_path: Path) -> None:
    page = html_of(PAGE)
    for outside in ("http://", "https://", "src=", "@import", "<script", "href="):
        assert outside not in page
    assert "Cost &amp; &lt;effect&gt;" in page and "skipped &lt;this&gt;" in page
    assert "<td>-</td>" in page
    assert page.count("<svg") == 2


def test_a_stack_is_as_wide_as_its_parts() -> None:
    root = ElementTree.fromstring(draw(PAGE.plots[1]))
    rects = [rect for rect in root.iter("rect") if float(rect.attrib["width"]) > 12]
    widths = [float(rect.attrib["width"]) for rect in rects]
    assert widths[0] == pytest.approx(3 * widths[1], rel=0.01)
    assert widths[2] == pytest.approx(widths[0] + widths[1], rel=0.01)


def test_a_curve_rises_on_the_page() -> None:
    root = ElementTree.fromstring(draw(PAGE.plots[0]))
    line = next(root.iter("polyline")).attrib["points"]
    (x1, y1), (x2, y2) = (tuple(map(float, point.split(","))) for point in line.split())
    assert x2 > x1 and y2 < y1


@pytest.mark.parametrize("most", [0.0, 0.013, 1.0, 7.0, 999.0, 12345.6])
def test_ticks_are_few_and_reach_the_top(most: float) -> None:
    found = ticks(most)
    assert found[0] == 0.0 and found[-1] >= most * (1 - 1e-9) and 2 <= len(found) <= 7
    assert found[-1] <= max(2.6 * most, 1.0)


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="cannot write reports to"):
        write(PAGE, tmp_path / "file")


def test_empty_plots_are_drawn() -> None:
    for plot in (Lines("none", "x", "y", {}), Bars("none", "s", {})):
        ElementTree.fromstring(draw(plot))
