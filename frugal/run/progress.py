"""What a person sees while a run goes on: a bar on a terminal, plain lines in a log file, one line in a notebook."""

from __future__ import annotations

import importlib
import sys
import time
from typing import IO, Any, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from frugal.console import SafeStream, in_notebook, say
from frugal.units import gib, seconds

_LINE_SECONDS = 30.0
_LINES_A_RUN = 20


class Reporter:
    """Shows the steps of a run. `quiet` (ranks other than the first) shows nothing."""

    def __init__(self, total: int, *, done: int = 0, quiet: bool = False, every: int = 1) -> None:
        self._total = total
        self._start_step = done
        self._quiet = quiet
        self._interval = max(every, total // _LINES_A_RUN)
        self._begun = time.monotonic()
        self._last_line = float("-inf")
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._handle: Any = None
        if quiet:
            return
        stream = SafeStream(sys.stdout)
        if in_notebook():
            display: Any = importlib.import_module("IPython.display").display  # only there in notebooks
            self._handle = display({"text/plain": "starting"}, raw=True, display_id=True)
        elif stream.isatty():
            # no refresh thread: the bar is drawn when a step ends, and nothing outlives a failed run
            self._bar = Progress(
                BarColumn(bar_width=24),
                TextColumn("{task.fields[text]}"),
                console=Console(file=cast("IO[str]", stream)),
                auto_refresh=False,
            )
            self._task = self._bar.add_task("train", total=total, completed=done, text="first step ...")
            self._bar.start()

    def step(self, record: dict[str, Any]) -> None:
        """Show one record of `train_log.jsonl`."""
        if self._quiet:
            return
        step = int(record["step"])
        if "loss" not in record:
            self.say(f"held-out loss before training {record['eval_loss']:.4f}")
            return
        text = self._text(record)
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=step, text=text)
            self._bar.refresh()
        elif self._handle is not None:
            self._handle.update({"text/plain": text}, raw=True)
        else:
            now = time.monotonic()
            due = step % self._interval == 0 or step in (self._start_step + 1, self._total)
            if due or now - self._last_line >= _LINE_SECONDS or record.get("eval_loss") is not None:
                self._last_line = now
                say(text)

    def say(self, text: str) -> None:
        """A message above the bar."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            say(text)

    def close(self) -> None:
        """Stop drawing; safe to call twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _text(self, record: dict[str, Any]) -> str:
        step = int(record["step"])
        elapsed = time.monotonic() - self._begun
        left = elapsed / max(1, step - self._start_step) * (self._total - step)
        parts = [
            f"step {step}/{self._total}",
            f"epoch {record['epoch']:.2f}",
            f"loss {record['loss']:.4f}",
            f"lr {record['learning_rate']:.2e}",
            f"{record['tokens_per_second']:,.0f} tok/s",
            gib(record["peak_memory_bytes"]),
        ]
        if record.get("eval_loss") is not None:  # of this step; an older one would look like a new measurement
            parts.insert(3, f"eval {record['eval_loss']:.4f}")
        if "rewards/margins" in record:
            margin = f"margin {record['rewards/margins']:.4f}"
            if "rewards/accuracies" in record:
                margin += f"  right {100 * record['rewards/accuracies']:.0f} %"
            parts.insert(parts.index(f"lr {record['learning_rate']:.2e}"), margin)
        parts.append(f"left {seconds(left)}" if step < self._total else f"took {seconds(elapsed)}")
        return "  ".join(parts)
