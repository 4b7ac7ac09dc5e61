"""The run as one page: loss, held-out loss, memory, samples before and after, data, implementations, settings.

The page stands alone: no script, no font, no picture is loaded; light and dark follow the reader's system. All text
from outside (rows, answers, paths) is escaped.
"""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frugal.errors import CheckpointError
from frugal.files import read_json, write_text
from frugal.manifest import Manifest
from frugal.training.log import read_log
from frugal.units import gib
from frugal.web.charts import Series, bars, legend, line_chart, smooth

FILE_NAME = "report.html"

STYLE = """
:root{--page:#f6f7f9;--card:#fff;--ink:#1b2330;--soft:#5b6676;--rule:#dfe4ea;--a:#2463c9;--a-soft:#a9c3ec;--b:#c2410c;
--good:#15724a;--bad:#b3261e;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--page:#12161c;--card:#1b2129;--ink:#e6eaf0;--soft:#9aa6b5;--rule:#303946;
--a:#7fb0ff;--a-soft:#3a5480;--b:#ff9d5c;--good:#5fd39f;--bad:#ff8a80}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:880px;margin:0 auto;padding:32px 20px 64px}h1{font-size:26px;margin:0 0 4px}
h2{font-size:17px;margin:0 0 12px}p{margin:0 0 10px}.soft{color:var(--soft)}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:20px;margin-top:18px}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(220px,1fr));gap:12px;margin-top:18px}
.tile{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:12px 14px}
.tile b{display:block;font-size:20px;font-variant-numeric:tabular-nums}.tile span{color:var(--soft);font-size:13px}
table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:5px 12px 5px 0;
border-bottom:1px solid var(--rule)}tr:last-child td{border-bottom:0}th{color:var(--soft);font-weight:500;width:32%}
td{font-variant-numeric:tabular-nums;overflow-wrap:anywhere}
svg{display:block;width:100%;height:auto}.grid{stroke:var(--rule)}.tick{fill:var(--soft);font-size:12px}
.label{fill:var(--ink);font-size:13px}.line{fill:none;stroke-width:2;stroke-linejoin:round}
.train.line{stroke:var(--a)}.raw.line{stroke:var(--a-soft);stroke-width:1}.eval.line{stroke:var(--b)}
.eval.dot,.eval.bar{fill:var(--b)}.train.dot,.train.bar{fill:var(--a)}.raw.dot,.raw.bar{fill:var(--a-soft)}
.legend{margin:8px 0 0;display:flex;gap:18px;flex-wrap:wrap}.key{color:var(--soft);font-size:13px}
.swatch{display:inline-block;width:14px;height:4px;border-radius:2px;margin-right:6px;vertical-align:middle}
.swatch.train{background:var(--a)}.swatch.raw{background:var(--a-soft)}.swatch.eval{background:var(--b)}
.pair{display:grid;grid-template-columns:1fr 1fr;gap:14px;margin:6px 0 18px}.pair div{border-left:3px solid var(--rule);
padding:2px 0 2px 12px;white-space:pre-wrap;overflow-wrap:anywhere}.pair .after{border-color:var(--a)}
.pair small{display:block;color:var(--soft)}@media (max-width:560px){.pair{grid-template-columns:1fr}}
pre{overflow:auto;background:var(--page);border-radius:8px;padding:12px;font-size:13px;margin:10px 0 0}
summary{cursor:pointer;font-weight:600}.good{color:var(--good)}.bad{color:var(--bad)}
"""


def write_report(run: Path) -> Path:
    """Write ``report.html`` of a run folder from what the run left there; parts that are missing are left out.

    Raises:
        CheckpointError: the folder holds no manifest, or cannot be written.
    """
    run = Path(run)
    manifest = Manifest.read(run).content
    log = read_log(run / "train_log.jsonl") if (run / "train_log.jsonl").is_file() else []
    samples = read_json(run / "samples.json") if (run / "samples.json").is_file() else []
    config = (run / "config.yaml").read_text(encoding="utf-8") if (run / "config.yaml").is_file() else ""
    page = render_report(run.name, manifest, log, _sample_rows(samples), config)
    try:
        write_text(run / FILE_NAME, page)
    except OSError as error:
        raise CheckpointError(f"Cannot write {run / FILE_NAME}: {error}") from error
    return run / FILE_NAME


def render_report(
    name: str,
    manifest: Mapping[str, Any],
    log: Sequence[Mapping[str, Any]],
    samples: Sequence[Mapping[str, Any]],
    config: str,
) -> str:
    """The page as text.

    Args:
        log: records of train_log.jsonl (step, loss, eval_loss, learning_rate, ...).
        samples: entries with ``prompt``, ``before`` and ``after``.
        config: the resolved configuration as YAML.
    """
    rate = _points(log, "learning_rate", "learning rate", "train")
    body = [
        _header(name, manifest),
        _tiles(manifest, log),
        _section("Loss", _loss(log)),
        _section("Samples", _samples(samples)),
        _section("Memory", _memory(manifest)),
        _section("Data", _data(manifest.get("data", {}))),
        _section("Implementations", _implementations(manifest)),
        _section("Learning rate", line_chart([rate], x_label="step", y_label="learning rate")),
        _section("Time", _table({key: f"{value:.1f} s" for key, value in _numbers(manifest.get("seconds")).items()})),
        _details("Configuration", f"<pre>{html.escape(config)}</pre>" if config else ""),
        _details("Versions", _table({**manifest.get("versions", {}), **_flat({"source": manifest.get("source", {})})})),
    ]
    title = html.escape(f"{name} - frugal run")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def _sample_rows(content: Any) -> list[Mapping[str, Any]]:
    rows = content.get("samples", []) if isinstance(content, dict) else content
    return [row for row in rows if isinstance(row, dict) and "prompt" in row]


def _header(name: str, manifest: Mapping[str, Any]) -> str:
    config, status = manifest.get("config", {}), str(manifest.get("status", "unknown"))
    model = config.get("model", {}) if isinstance(config, dict) else {}
    base = str(model.get("base") or manifest.get("base", {}).get("name") or "")
    method = {"nf4": "QLoRA, NF4 base", "none": "LoRA"}.get(str(model.get("quantize")), "")
    css = "good" if status == "finished" else "bad" if status in ("failed", "interrupted") else "soft"
    facts = [part for part in (base, method, str(manifest.get("started", ""))) if part]
    error = manifest.get("error")
    message = f'<p class="bad">{html.escape(str(error.get("message", "")))}</p>' if isinstance(error, dict) else ""
    return (
        f'<h1>{html.escape(name)} <span class="{css}">{html.escape(status)}</span></h1>'
        f'<p class="soft">{html.escape(" | ".join(facts))}</p>{message}'
    )


def _tiles(manifest: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> str:
    held_out, train = _points(log, "eval_loss", "", "").points, _points(log, "loss", "", "").points
    peaks = _numbers(manifest.get("measured_peak_bytes"))
    tiles: list[tuple[str, str]] = []
    if held_out:
        first, last = held_out[0][1], held_out[-1][1]
        tiles.append((f"{first:.3f} → {last:.3f}" if len(held_out) > 1 else f"{last:.3f}", "held-out loss"))
        tiles.append((f"{math.exp(min(last, 700.0)):.4g}", "held-out perplexity"))
    if train:
        tiles.append((f"{smooth(train, 0.7)[-1][1]:.3f}", "training loss at the end, smoothed"))
        tiles.append((f"{train[-1][0]:g}", "steps"))
    if peaks:
        tiles.append((gib(max(peaks.values())), "highest measured peak"))
    rates = [value for _, value in _points(log, "tokens_per_second", "", "").points]
    if rates:
        tiles.append((f"{sorted(rates)[len(rates) // 2]:.4g}", "tokens a second (median)"))
    cells = (f'<div class="tile"><b>{html.escape(value)}</b><span>{label}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{"".join(cells)}</div>' if tiles else ""


def _points(log: Sequence[Mapping[str, Any]], key: str, name: str, css: str, markers: bool = False) -> Series:
    found = [(record.get("step"), record.get(key)) for record in log]
    return Series(
        name,
        css,
        [
            (float(x), float(y))
            for x, y in found
            if isinstance(x, int | float) and isinstance(y, int | float) and math.isfinite(y)
        ],
        markers,
    )


def _loss(log: Sequence[Mapping[str, Any]]) -> str:
    raw = _points(log, "loss", "training loss of a step", "raw")
    lines = [raw]
    if len(raw.points) > 1:
        lines.append(Series("smoothed", "train", smooth(raw.points, 0.9 if len(raw.points) > 50 else 0.7)))
    lines.append(_points(log, "eval_loss", "held-out loss", "eval", markers=True))
    return line_chart(lines, x_label="step", y_label="loss") + legend(lines)


def _samples(samples: Sequence[Mapping[str, Any]]) -> str:
    parts = []
    for sample in samples:
        before, after = (html.escape(str(sample.get(key, ""))) for key in ("before", "after"))
        parts.append(
            f"<p><b>{html.escape(str(sample['prompt']))}</b></p>"
            f'<div class="pair"><div><small>before</small>{before}</div>'
            f'<div class="after"><small>after</small>{after}</div></div>'
        )
    return "".join(parts)


def _memory(manifest: Mapping[str, Any]) -> str:
    measured = _numbers(manifest.get("measured_peak_bytes"))
    forecast = _numbers(manifest.get("forecast_peak_bytes"))
    rows = []
    for phase, value in measured.items():
        entries = [(value, f"{gib(value)} measured", "train")]
        if phase in forecast:
            apart = f", {forecast[phase] / value - 1:+.1%}" if value else ""
            entries.append((forecast[phase], f"{gib(forecast[phase])} forecast{apart}", "raw"))
        rows.append((phase, entries))
    return bars(rows)


_DATA_LABELS = {
    "template.template": "chat template",
    "template.end_token": "end of an answer",
    "template.end_trained": "end of an answer is trained",
    "template.answers": "answers",
    "template.answers_ended": "answers with their end",
    "template.stop_ids": "stop token ids",
    "template.stop_tokens": "stop tokens",
}


def _data(account: Any) -> str:
    """Counts side by side for the parts (train, eval), and below what else the account says."""
    if not isinstance(account, Mapping):
        return ""
    figures = account.get("figures")
    parts = {name: _flat(values) for name, values in figures.items()} if isinstance(figures, Mapping) else {}
    keys = list(dict.fromkeys(key for values in parts.values() for key in values))
    head = "".join(f"<th>{html.escape(str(name))}</th>" for name in parts)
    rows = "".join(
        f"<tr><th>{html.escape(key.replace('_', ' '))}</th>"
        + "".join(f"<td>{html.escape(values.get(key, ''))}</td>" for values in parts.values())
        + "</tr>"
        for key in keys
    )
    for drop in account.get("drops") or []:
        if isinstance(drop, Mapping):
            label = html.escape(f"dropped: {drop.get('reason', '')}")
            cells = (str(drop.get("rows", "")) if name == drop.get("part") else "" for name in parts)
            rows += f"<tr><th>{label}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in cells)}</tr>"
    table = f"<table><tr><th></th>{head}</tr>{rows}</table>" if rows else ""
    rest = {key: value for key, value in _flat(account).items() if not key.startswith("figures.")}
    return table + _table({_DATA_LABELS.get(key, key.replace("_", " ")): value for key, value in rest.items()})


def _implementations(manifest: Mapping[str, Any]) -> str:
    rows = []
    for part, entry in manifest.get("implementations", {}).items():
        if not isinstance(entry, Mapping):
            entry = {"chosen": entry}
        text = str(entry.get("chosen", ""))
        if entry.get("why"):
            text += f" ({entry['why']})"
        for other, why in (entry.get("rejected") or {}).items():
            text += f"; not {other}: {why}"
        rows.append((part, text))
    return _table(dict(rows))


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one level with dotted keys; lists of plain values joined."""
    out: dict[str, str] = {}
    for key, value in values.items() if isinstance(values, Mapping) else ():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out.update(_flat(value, f"{name}."))
        elif isinstance(value, list):
            if value and all(isinstance(entry, str | int | float) for entry in value) and len(value) <= 20:
                out[name] = ", ".join(str(entry) for entry in value)
        elif value is not None:
            out[name] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return out


def _numbers(values: Any) -> dict[str, float]:
    if not isinstance(values, Mapping):
        return {}
    return {str(key): float(value) for key, value in values.items() if isinstance(value, int | float)}


def _table(values: Mapping[str, Any]) -> str:
    rows = "".join(
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>" for key, value in values.items()
    )
    return f"<table>{rows}</table>" if rows else ""


def _section(title: str, content: str) -> str:
    return f"<section><h2>{title}</h2>{content}</section>" if content else ""


def _details(title: str, content: str) -> str:
    return f"<section><details><summary>{title}</summary>{content}</details></section>" if content else ""
