"""The record of one run: manifest, log, progress, trackers, report. It only listens: it runs no collectives and computes
nothing with the model. Rank 0 writes and shows; on other ranks every method does nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from frugal.config import Config, dump_yaml
from frugal.console import say
from frugal.decision import Decision
from frugal.errors import CheckpointError, Interrupted
from frugal.files import write_text
from frugal.manifest import Manifest
from frugal.run.progress import Reporter
from frugal.run.summary import TrainResult, summary_lines
from frugal.run.trackers import Trackers
from frugal.training.log import TrainLog
from frugal.web.report import write_report


class RunEvents:
    """Context of one run. Nothing is written before `opened`, so that wrong input leaves no folder; after it a failure
    is in the manifest."""

    def __init__(self, run_dir: Path, config: Config, *, first: bool) -> None:
        self.run_dir, self.config, self.first = run_dir, config, first
        self.manifest = Manifest()
        self.log = TrainLog(run_dir / "train_log.jsonl")
        self._total_steps = 0
        self._opened = False
        self._reporter: Reporter | None = None
        self._trackers: Trackers | None = None

    def __enter__(self) -> RunEvents:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reporter is not None:
            self._reporter.close()
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        if error is None or not self._opened:
            return
        self.manifest.failed(error, status="interrupted" if isinstance(error, Interrupted) else "failed")
        try:
            self.manifest.write(self.run_dir)
        except OSError as second:  # the first error is on its way already
            self.say(f"cannot write {self.run_dir / 'manifest.json'}: {second}")

    def say(self, *lines: str) -> None:
        """Show messages, above the progress bar when there is one."""
        for line in lines:
            if self._reporter is not None:
                self._reporter.say(line)
            elif self.first:
                say(line)

    def decided(self, *decisions: Decision[Any]) -> None:
        """Note decisions in the manifest."""
        for decision in decisions:
            self.manifest.decide(decision)

    def noted(self, section: str, value: Any) -> None:
        """Note plain values under a section of the manifest."""
        self.manifest.add(section, value)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the run."""
        with self.manifest.timed(name):
            yield

    def opened(self, resolved: Config, total_steps: int, comments: Mapping[str, str]) -> None:
        """The run may start: write its folder's config.yaml (``resolved``, each ``comments`` entry beside its key) and
        the manifest."""
        self._total_steps = total_steps
        if self.first:
            self.manifest.started()
            self._opened = True
            self._write("config.yaml", lambda: write_text(self.run_dir / "config.yaml", dump_yaml(resolved, comments)))
            self.write_manifest()

    def training(self, accelerator: Accelerator, step: int) -> None:
        """Steps begin after ``step``: start trackers and progress, drop later log records."""
        train = self.config.train
        if self.first:
            self.log.restart(step)
            self.write_manifest()
        self._trackers = Trackers(accelerator, list(train.report_to), self.run_dir, self.config.model_dump(mode="json"))
        self._reporter = Reporter(self._total_steps, done=step, quiet=not self.first, every=train.logging_steps)

    def step(self, record: dict[str, Any]) -> None:
        """Take one record of train_log.jsonl."""
        if not self.first:
            return
        problem = self.log.problem
        self.log.write(record)
        if self.log.problem is not None and problem is None:
            self.say(f"warning: {self.log.problem}; its lines are kept and tried again")
        if "peak_memory_bytes" in record:
            self.manifest.peak("step", record["peak_memory_bytes"])
        if self._reporter is not None:
            self._reporter.step(record)
        due = record["step"] % self.config.train.logging_steps == 0 or record["step"] == self._total_steps
        if self._trackers is not None and due:
            self._trackers.log(record)

    def trained(self) -> None:
        """The last step is done: take the progress bar down."""
        if self._reporter is not None:
            self._reporter.close()

    def finished(self, result: TrainResult, samples: Iterable[dict[str, str]]) -> None:
        """Note the end in the manifest (its last write marks the run as complete) and say where everything is."""
        if not self.first:
            return
        self.manifest.finished(result.to_json())
        self.write_manifest()
        write_report(self.run_dir)
        for line in summary_lines(result, list(samples)):
            say(line)

    def write_manifest(self) -> None:
        """Write manifest.json as it stands."""
        self._write("manifest.json", lambda: self.manifest.write(self.run_dir))

    def _write(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.run_dir / name}: {error.strerror or error}") from error
