"""Write the run as one page: loss, memory, time, samples before and after, data, implementations, settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from frugal.assets import weights_note
from frugal.errors import CheckpointError
from frugal.files import read_json, write_text
from frugal.manifest import Manifest
from frugal.training.log import read_log
from frugal.units import gib, seconds
from frugal.web.charts import Series, chart, smooth
from frugal.web.pages import render

FILE_NAME = "report.html"

Rows = list[list[Any]]


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
    status, loss = str(manifest.get("status", "unknown")), _loss(log)
    rate = Series("learning rate", "train", _points(log, "learning_rate"))
    counts, facts = _data(_mapping(manifest.get("data")))
    versions = {**_mapping(manifest.get("versions")), **_flat({"source": manifest.get("source", {})})}
    return render(
        "report.html",
        name=name,
        status=status,
        status_css={"finished": "good", "failed": "bad", "interrupted": "bad"}.get(status, "soft"),
        about=_about(manifest),
        error=_mapping(manifest.get("error")).get("message", ""),
        tiles=_tiles(manifest, log),
        loss=chart(loss, x_label="step", y_label="loss"),
        loss_lines=[one for one in loss if one.points],
        samples=samples,
        memory=_memory(manifest),
        data_heads=["", *counts[0][1:]] if counts else [],
        data_counts=counts[1:],
        data_facts=facts,
        implementations=_implementations(manifest),
        rate=chart([rate], x_label="step", y_label="learning rate"),
        time=_time(manifest),
        config=config,
        versions=[list(row) for row in versions.items()],
    )


def _sample_rows(content: Any) -> list[Mapping[str, Any]]:
    rows = content.get("samples", []) if isinstance(content, dict) else content
    return [row for row in rows if isinstance(row, dict) and "prompt" in row]


def _about(manifest: Mapping[str, Any]) -> str:
    model = _mapping(_mapping(manifest.get("config")).get("model"))
    base = model.get("base") or _mapping(manifest.get("base")).get("name") or ""
    method = {"nf4": "QLoRA, NF4 base", "none": "LoRA"}.get(str(model.get("quantize")), "")
    shown = f"{base}{weights_note(str(base))}"
    return " | ".join(str(part) for part in (shown, method, manifest.get("started")) if part)


def _tiles(manifest: Mapping[str, Any], log: Sequence[Mapping[str, Any]]) -> list[tuple[str, str]]:
    """(value, what it is) of the figures at the top."""
    held_out, train = _points(log, "eval_loss"), _points(log, "loss")
    rates = sorted(value for _, value in _points(log, "tokens_per_second"))
    peaks = _numbers(manifest.get("measured_peak_bytes"))
    tiles = []
    if held_out:
        first, last = held_out[0][1], held_out[-1][1]
        tiles.append((f"{first:.3f} → {last:.3f}" if len(held_out) > 1 else f"{last:.3f}", "held-out loss"))
        tiles.append((f"{math.exp(min(last, 700.0)):.4g}", "held-out perplexity"))
    if train:
        tiles.append((f"{smooth(train, 0.7)[-1][1]:.3f}", "training loss at the end, smoothed"))
        tiles.append((f"{train[-1][0]:g}", "steps"))
    if peaks:
        tiles.append((gib(max(peaks.values())), "highest measured peak"))
    if rates:
        tiles.append((f"{rates[len(rates) // 2]:.4g}", "tokens a second (median)"))
    return tiles


def _points(log: Sequence[Mapping[str, Any]], key: str) -> list[tuple[float, float]]:
    found = [(record.get("step"), record.get(key)) for record in log]
    return [
        (float(x), float(y))
        for x, y in found
        if isinstance(x, int | float) and isinstance(y, int | float) and math.isfinite(y)
    ]


def _loss(log: Sequence[Mapping[str, Any]]) -> list[Series]:
    raw = _points(log, "loss")
    lines = [Series("training loss of a step", "raw", raw)]
    if len(raw) > 1:
        lines.append(Series("smoothed", "train", smooth(raw, 0.9 if len(raw) > 50 else 0.7)))
    return [*lines, Series("held-out loss", "eval", _points(log, "eval_loss"), markers=True)]


_MEASURED = {
    "steady_step": ("step, longest micro-batch", "step_bytes"),
    "evaluation": ("evaluation", "eval_bytes"),
    "save": ("checkpoint", "save_bytes"),
}
"""Phase of the forecast -> what it is called here, and its key in the manifest's ``warm-up step``."""


def _memory(manifest: Mapping[str, Any]) -> Rows:
    """Bars: measured beside forecast for the phases of the warm-up step, then peaks of the whole run."""
    phases = _mapping(_mapping(_mapping(manifest.get("forecast")).get("device")).get("phases"))
    measured = _numbers(manifest.get("warm-up step") or manifest.get("probe"))  # probe: until 0.1.0
    kind = "allocator" if _mapping(manifest.get("device")).get("kind") == "cuda" else "process with its libraries"
    found: list[tuple[str, list[tuple[float, str, str]]]] = []
    for phase, (label, key) in _MEASURED.items():
        peak, forecast = measured.get(key, 0.0), _mapping(phases.get(phase)).get("bytes")
        if not peak:
            continue
        entries = [(peak, f"{gib(peak)} measured", "train")]
        if forecast:
            entries[0] = (peak, f"{gib(peak)} measured ({peak / forecast - 1:+.1%})", "train")
            entries.append((float(forecast), f"{gib(forecast)} forecast", "raw"))
        found.append((label, entries))
    for phase, peak in _numbers(manifest.get("measured_peak_bytes")).items():
        found.append((f"{phase}, whole run", [(peak, f"{gib(peak)} measured ({kind})", "train")]))
    most = max((value for _, entries in found for value, _, _ in entries), default=0.0) or 1.0
    return [[label, [(value / most, text, css) for value, text, css in entries]] for label, entries in found]


def _time(manifest: Mapping[str, Any]) -> Rows:
    """Bars: seconds of each phase, as `Manifest.timed` recorded them."""
    found = _numbers(manifest.get("seconds"))
    most = max(found.values(), default=0.0) or 1.0
    return [[phase, [(value / most, seconds(value), "train")]] for phase, value in found.items()]


_DATA_LABELS = {
    "template.template": "chat template",
    "template.end_token": "end of an answer",
    "template.end_trained": "end of an answer is trained",
    "template.answers": "answers",
    "template.answers_ended": "answers with their end",
    "template.stop_ids": "stop token ids",
    "template.stop_tokens": "stop tokens",
}


def _data(account: Mapping[str, Any]) -> tuple[Rows, Rows]:
    """Counts side by side for the parts (train, eval), names of the parts first; and what else the account says."""
    parts = {name: _flat(values) for name, values in _mapping(account.get("figures")).items()}
    keys = list(dict.fromkeys(key for values in parts.values() for key in values))
    rows: Rows = [[key.replace("_", " "), *(values.get(key, "") for values in parts.values())] for key in keys]
    for drop in account.get("drops") or []:
        if isinstance(drop, Mapping):
            cells = (str(drop.get("rows", "")) if name == drop.get("part") else "" for name in parts)
            rows.append([f"dropped: {drop.get('reason', '')}", *cells])
    rest = {key: value for key, value in _flat(account).items() if not key.startswith("figures.")}
    facts: Rows = [[_DATA_LABELS.get(key, key.replace("_", " ")), value] for key, value in rest.items()]
    return ([["", *parts], *rows] if rows else []), facts


def _implementations(manifest: Mapping[str, Any]) -> Rows:
    rows: Rows = []
    for part, entry in _mapping(manifest.get("implementations")).items():
        known = entry if isinstance(entry, Mapping) else {"chosen": entry}
        text = str(known.get("chosen", "")) + (f" ({known['why']})" if known.get("why") else "")
        rejected = "".join(f"; not {other}: {why}" for other, why in (known.get("rejected") or {}).items())
        rows.append([part, text + rejected])
    return rows


def _flat(values: Any, prefix: str = "") -> dict[str, str]:
    """Nested mappings as one level with dotted keys; lists of plain values joined."""
    out: dict[str, str] = {}
    for key, value in _mapping(values).items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            out.update(_flat(value, f"{name}."))
        elif isinstance(value, list):
            if value and all(isinstance(entry, str | int | float) for entry in value) and len(value) <= 20:
                out[name] = ", ".join(str(entry) for entry in value)
        elif value is not None:
            out[name] = f"{value:.6g}" if isinstance(value, float) else str(value)
    return out


def _mapping(value: Any) -> Mapping[str, Any]:
    """A section of the manifest, empty when it is missing or something else."""
    return value if isinstance(value, Mapping) else {}


def _numbers(values: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in _mapping(values).items() if isinstance(value, int | float)}
