"""The run's page: right numbers, nothing loaded from elsewhere, nothing from outside unescaped."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from frugal.decision import Decision
from frugal.errors import CheckpointError
from frugal.manifest import Manifest
from frugal.web.charts import Series, chart, smooth, thin, ticks
from frugal.web.report import write_report

VOID = {"meta", "line", "circle", "polyline", "rect", "br"}


class Balance(HTMLParser):
    """Every tag that opens closes, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "quick"
    folder.mkdir()
    manifest = Manifest()
    manifest.add("config", {"model": {"base": "smol", "quantize": "nf4"}})
    figures = {"train": {"rows_in": 100, "rows_out": 97}, "eval": {"rows_in": 12}}
    manifest.add(
        "data",
        {
            "figures": figures,
            "drops": [{"part": "train", "reason": "no <answer>", "rows": 3}],
            "files": ["a.json", "b.json"],
        },
    )
    manifest.decide(Decision("attention", "sdpa", "", {"flash_attn": "<not here>"}))
    manifest.peak("step", 905_000_000)
    manifest.add("forecast", {"device": {"phases": {"steady_step": {"bytes": 2 << 30}, "save": {"bytes": 1 << 20}}}})
    manifest.add("warm-up step", {"step_bytes": 2_190_433_321, "eval_bytes": 0, "save_bytes": 1 << 20, "rows": 2})
    manifest.add("seconds", {"load": 12.5, "training": 372.0})
    manifest.started()
    manifest.finished()
    manifest.write(folder)
    log = [{"step": 0, "eval_loss": 3.5}]
    log += [
        {"step": n, "loss": 3.0 - 0.1 * n, "learning_rate": 1e-4, "tokens_per_second": 100 + n} for n in range(1, 11)
    ]
    log[-1]["eval_loss"] = 2.25
    (folder / "train_log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in log))
    samples = [{"prompt": "Who <b>are</b> you?", "before": "<script>alert(1)</script>", "after": "frugal & small"}]
    (folder / "samples.json").write_text(json.dumps(samples))
    (folder / "config.yaml").write_text("model:\n  base: smol  # <here>\n")
    return folder


def test_the_page_says_what_happened(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    text = " ".join(parser.text)
    for expected in (
        "3.500 → 2.250",
        "0.84 GiB measured (process with its libraries)",
        "2.04 GiB measured (+2.0%)",
        "2.00 GiB forecast",
        "12.5 s",
        "6 min 12 s",
        "9.488",
        "finished",
    ):
        assert expected in text, expected
    for expected in (
        "sdpa; not flash_attn: <not here>",
        "frugal & small",
        "no <answer>",
        "a.json, b.json",
        "# <here>",
    ):
        assert expected in text, expected
    assert "<tr><th>rows in</th><td>100</td><td>12</td></tr>" in page
    assert "<tr><th>rows out</th><td>97</td><td></td></tr>" in page
    assert "script" not in parser.tags
    assert "<script>" not in page
    assert not re.search(r"""(src|href)=|url\(|@import""", page)
    assert "prefers-color-scheme: dark" in page
    assert parser.tags.count("svg") == 2
    assert "training loss of a step" in text
    assert page.count("held-out loss, step") == 2


def test_a_run_that_failed_early(tmp_path: Path) -> None:
    manifest = Manifest()
    manifest.started()
    manifest.failed(RuntimeError("no <room>"))
    manifest.write(tmp_path)
    parser = Balance()
    parser.feed(write_report(tmp_path).read_text(encoding="utf-8"))
    assert "no <room>" in " ".join(parser.text)
    assert "svg" not in parser.tags
    with pytest.raises(CheckpointError):
        write_report(tmp_path / "nothing")


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.93, 3.07) == [2, 2.5, 3]
    assert ticks(1, 1) == [1]
    assert ticks(0, 4, 8, whole=True) == [0, 1, 2, 3, 4]
    assert ticks(0.00012, 0.0002) == pytest.approx([0.00012, 0.00014, 0.00016, 0.00018, 0.0002])


def test_points_land_where_their_values_say() -> None:
    svg = chart([Series("a", "train", [(0, 0.0), (10, 10.0)], markers=True)], x_label="step", y_label="loss")
    circles = [(float(x), float(y)) for x, y in re.findall(r'cx="([\d.]+)" cy="([\d.]+)"', svg)]
    assert [x for x, _ in circles] == [56.0, 744.0]
    assert circles[0][1] == 240.0  # zero lies on the axis
    grid = dict(re.findall(r'y="([\d.]+)" text-anchor="end">([\d.]+)<', svg))
    y_of_ten = next(float(y) - 4 for y, label in grid.items() if label == "10")
    assert circles[1][1] == pytest.approx(y_of_ten, abs=0.2)


def test_thinning_keeps_spikes_and_smoothing_starts_unbiased() -> None:
    points = [(float(x), 1.0) for x in range(10_000)]
    points[4321] = (4321.0, 99.0)
    kept = thin(points, 100)
    assert len(kept) <= 100
    assert (4321.0, 99.0) in kept
    assert smooth([(1, 4.0), (2, 4.0)], 0.9) == [(1, pytest.approx(4.0)), (2, pytest.approx(4.0))]
    assert smooth([(1, 0.0), (2, 1.0)], 0.5)[1][1] == pytest.approx(2 / 3)


def test_bars_share_one_scale(run: Path) -> None:
    page = write_report(run).read_text(encoding="utf-8")
    time = page[page.index("<h2>Time</h2>") : page.index("<h2>Data</h2>")]
    load, training = (float(value) for value in re.findall(r"width:([\d.]+)%", time))
    assert load / training == pytest.approx(12.5 / 372, rel=0.05)


def test_phases_that_a_manifest_timed_are_shown(tmp_path: Path) -> None:
    manifest = Manifest()
    for phase in ("load", "training", "load"):
        with manifest.timed(phase):
            pass
    with pytest.raises(ValueError, match="full"), manifest.timed("saving"):
        raise ValueError("disk full")
    manifest.write(tmp_path)
    page = write_report(tmp_path).read_text(encoding="utf-8")
    time = page[page.index("<h2>Time</h2>") :]
    assert re.findall(r'<span class="n">(\w+)</span>', time) == ["load", "training", "saving"]
    assert "0.0 s" in time


def test_a_chart_without_points_is_empty() -> None:
    assert chart([Series("a", "train", [])], x_label="x", y_label="y") == ""
