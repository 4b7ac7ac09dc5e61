"""The lines that end a run: what it reached and where everything is."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from frugal.config import Config
from frugal.files import read_json
from frugal.objectives import Objective, configured_objective
from frugal.training.schedule import TrainPlan
from frugal.training.setup import LoopState
from frugal.units import gib, seconds


@dataclass(frozen=True)
class TrainResult:
    """What `frugal.train` returns. Plain values: it keeps no model alive."""

    run_dir: Path
    steps: int
    epochs: float
    final_loss: float | None
    """Loss of the last step."""
    eval_loss_before: float | None
    """Token-mean loss on the evaluation rows before the first step."""
    eval_loss: float | None
    """The same at the end (of the best checkpoint with `output.keep_best`)."""
    best_step: int | None
    tokens: int
    seconds: float
    peak_memory_bytes: int
    eval_metrics_before: dict[str, float] = field(default_factory=dict)
    """What else the objective says about the evaluation loss before, by name: perplexity."""
    eval_metrics: dict[str, float] = field(default_factory=dict)

    def numbers(self) -> dict[str, float | int | None]:
        """What manifest, report and model card show."""
        return {
            "steps": self.steps,
            "epochs": self.epochs,
            "train_loss": self.final_loss,
            "eval_loss_before": self.eval_loss_before,
            "eval_loss": self.eval_loss,
            "best_step": self.best_step,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


def summarise(
    run_dir: Path,
    state: LoopState,
    plan: TrainPlan,
    objective: Objective,
    *,
    kept_best: bool,
    peak_bytes: int,
) -> TrainResult:
    """The result of a finished loop. ``peak_bytes``: of memory, by the process that ran it."""
    before, after = state.first_eval_loss, state.best_eval_loss if kept_best else state.eval_loss
    return TrainResult(
        run_dir=run_dir,
        steps=state.step,
        epochs=plan.epoch_of(state.step),
        final_loss=state.last_loss,
        eval_loss_before=before,
        eval_loss=after,
        best_step=state.best_step,
        tokens=state.tokens,
        seconds=state.seconds,
        peak_memory_bytes=peak_bytes,
        eval_metrics_before={} if before is None else objective.of_eval_loss(before),
        eval_metrics={} if after is None else objective.of_eval_loss(after),
    )


def result_of_finished(config: Config, saved: Mapping[str, Any]) -> TrainResult:
    """The result of a run that has ended already. ``saved``: the state in its last checkpoint."""
    run_dir, state, plan = Path(config.output.dir), LoopState(**saved["loop"]), TrainPlan(**saved["plan"])
    manifest = run_dir / "manifest.json"
    noted = read_json(manifest).get("result", {}) if manifest.is_file() else {}
    return summarise(
        run_dir,
        state,
        plan,
        configured_objective(config.objective),  # for names of figures
        kept_best=config.output.keep_best and state.best_step is not None,
        peak_bytes=int(noted.get("peak_memory_bytes", 0)),
    )


_SAMPLE = (("Q", "prompt"), ("before", "before"), ("after", "after"))


def _one_line(text: str, longest: int = 160) -> str:
    """A sample as one line; samples.json has all of it."""
    flat = " ".join(text.split()) or "-"
    return flat if len(flat) <= longest else flat[: longest - 3] + "..."


def summary_lines(result: TrainResult, samples: list[dict[str, str]], phases: Mapping[str, float]) -> list[str]:
    """The closing summary, one string a line. ``phases``: seconds of each, in order."""
    steps = "step" if result.steps == 1 else "steps"
    lines = ["", f"Trained {result.steps} {steps} ({result.epochs:.2f} epochs) in {seconds(result.seconds)}."]
    if result.final_loss is not None:
        lines.append(f"  loss of the last step   {result.final_loss:.4f}")
    if result.eval_loss is not None and result.eval_loss_before is not None:
        before, after = result.eval_loss_before, result.eval_loss
        also = ", ".join(
            f"{name} {result.eval_metrics_before[name]:.2f} -> {value:.2f}"
            for name, value in result.eval_metrics.items()
        )
        lines.append(f"  held-out loss           {before:.4f} -> {after:.4f}" + (f" ({also})" if also else ""))
    lines.append(f"  peak memory             {gib(result.peak_memory_bytes)}")
    if phases:
        lines.append("  time of each phase      " + ", ".join(f"{name} {seconds(one)}" for name, one in phases.items()))
    for sample in samples:
        lines.append("")
        lines += [f"  {name:<6}  {_one_line(sample.get(key, ''))}" for name, key in _SAMPLE]
    run = result.run_dir
    entries = {
        "adapter": run / "adapter_model.safetensors",
        "loss of every step": run / "train_log.jsonl",
        "samples": run / "samples.json" if samples else None,
        "report": run / "report.html",
        "model card": run / "README.md",
        "what ran": run / "manifest.json",
        "checkpoints": run / "checkpoint-N",
    }
    lines.append("")
    lines += [f"  {name:<20}  {path}" for name, path in entries.items() if path is not None]
    word = shlex.quote(str(run))  # the commands can be pasted, also with spaces in the path
    lines += ["", f"  talk to it:  frugal chat {word}", f"  merge it:    frugal merge {word} --out DIR"]
    return lines
