"""The plan's picture: well-formed, the areas add up to the forecast, the marks are the sweep's rows."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.planning import make_planner
from frugal.planning.picture import GIB, drawing
from frugal.planning.simulated_model import Shape
from frugal.web.charts import Series, chart


def test_areas_and_marks(tiny_llama_folder: Path) -> None:
    planner = make_planner(str(tiny_llama_folder), ["memory.checkpoint=recompute"], vram="2GB")
    found = drawing(planner)
    assert [row.total_bytes for row in found.budgets][:2] == [2 * GIB, 8 * GIB]
    lengths = [x for x, _ in found.areas[0].points]
    assert lengths == sorted(lengths)
    assert lengths[-1] >= found.budgets[-1].max_tokens
    tokens = next(x for x in lengths if x > planner.line_length)
    total = sum(dict(area.points)[tokens] for area in found.areas) * GIB
    direct = planner.step_peak("recompute", Shape(1, int(tokens))).bytes
    assert total == pytest.approx(direct, rel=0.01)


def test_files(tiny_llama_folder: Path, tmp_path: Path) -> None:
    words = ["plan", str(tiny_llama_folder), "--vram", "2GB", "--sweep", "memory.checkpoint=recompute", "--picture"]
    for name in ("plan.svg", "plan.html"):
        result = CliRunner().invoke(app, [*words, str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        text = (tmp_path / name).read_text()
        assert "tokens of a row" in text
        assert "8 GiB: " in text
    root = ElementTree.fromstring((tmp_path / "plan.svg").read_text())
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    wrong = CliRunner().invoke(app, [*words, str(tmp_path / "plan.png")])
    assert wrong.exit_code == 2
    assert ".svg or .html" in wrong.output


def test_a_stacked_chart() -> None:
    areas = [Series("a", "p1", [(0.0, 1.0), (10.0, 1.0)]), Series("<b>", "p2", [(0.0, 0.0), (10.0, 3.0)])]
    marks = [(5.0, 2.5, "half")]
    text = chart(areas, stacked=True, marks=marks, title="t & t", subtitle="s", x_label="x", y_label="y")
    root = ElementTree.fromstring(text)
    shapes = [element.attrib["points"].split() for element in root if element.tag.endswith("polygon")]
    assert len(shapes) == 2
    assert shapes[0][:2] == list(reversed(shapes[1][2:]))  # the second lies on the first
    (dot,) = [element for element in root if element.tag.endswith("circle")]
    right = [float(point.split(",")[0]) for point in shapes[0]]
    assert float(dot.attrib["cx"]) == pytest.approx((min(right) + max(right)) / 2, abs=0.1)
