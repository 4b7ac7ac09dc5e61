"""The record of a run: manifest, log, progress, trackers, report. It only listens: it runs no collectives and computes
nothing with the model. Rank 0 writes and shows; on the other ranks its methods do nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator

from frugal.checkpoints.complete import find_latest
from frugal.config import Config, dump_yaml
from frugal.console import say
from frugal.data import PreparedData
from frugal.decision import Decision
from frugal.errors import CheckpointError, Interrupted
from frugal.exports.card import adapter_card
from frugal.files import write_text
from frugal.manifest import Manifest, versions
from frugal.models.build import BuiltModel
from frugal.models.head import HeadSpec
from frugal.models.resolve import ResolvedModel
from frugal.run.memory import Forecast, measured_lines
from frugal.run.progress import Reporter
from frugal.run.setup import Machine, RunSetup
from frugal.run.summary import TrainResult, summary_lines
from frugal.run.trackers import Trackers
from frugal.training.log import TrainLog
from frugal.training.oom_fallback import OutOfMemoryFallback
from frugal.training.schedule import TrainPlan
from frugal.training.warmup_step import WarmupResult
from frugal.web.report import write_report

_PHASES = {
    "data": "preparing rows",
    "plan": "planning memory",
    "load": "loading the model",
    "reference": "reading all rows with the base",
    "warm-up step": "trying the longest micro-batch",
    "saving": "saving the adapter",
}
_SAID = ("plan", "load", "reference", "warm-up step")
"""Phases of seconds to minutes in which nothing else is said."""


class RunEvents:
    """Context of one run, told what happens in it. Nothing is written before `resolved`, so that wrong input leaves no
    folder; after it a failure is in the manifest."""

    def __init__(self, run_dir: Path, config: Config, *, first: bool) -> None:
        """``config``: as the user wrote it. ``first``: whether this is rank 0."""
        self.run_dir, self.config, self.first = run_dir, config, first
        self.manifest = Manifest()
        self.log = TrainLog(run_dir / "train_log.jsonl")
        self._total_steps = 0
        self._started = False
        self._doing = "starting"
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
        if error is None or not self._started:
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

    def warn(self, *lines: str) -> None:
        """Show warnings."""
        self.say(*(f"warning: {line}" for line in lines))

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the run, for the manifest and the report; a long one is said when it begins."""
        self._doing = _PHASES.get(name, name)
        if name in _SAID:
            self.say(f"{self._doing} ...")
        with self.manifest.timed(name):
            yield

    def interrupted(self) -> str:
        """What was going on when the user stopped the run outside its steps, and what stands."""
        latest = find_latest(self.run_dir, lambda _: None, hashes=False)
        saved = f"--resume goes on from {latest.name}." if latest is not None else "No step was done, nothing is saved."
        return f"while {self._doing}: {saved}"

    def prepared(self, base: ResolvedModel, data: PreparedData, plan: TrainPlan) -> None:
        """Rows are there and steps are counted."""
        self._total_steps = plan.total_steps
        self.say(*data.report.lines(), data.template_report.line)
        self.warn(*data.template_report.warnings)
        self.manifest.add("config", self.config.model_dump(mode="json"))
        self.manifest.add("plan", plan.as_dict())
        self.manifest.add(
            "data", {**data.report.to_json(), "clock": data.clock, "template": data.template_report.to_json()}
        )
        self.manifest.add("base", {"name": base.name, "revision": base.revision})

    def resolved(self, machine: Machine, setup: RunSetup, *, base_fingerprint: str | None) -> None:
        """Nothing is left open: the run's folder gets its config.yaml and manifest."""
        strategy, device, dtype = setup.strategy, machine.device, machine.dtype
        asked = self.config.model_dump()
        self.manifest.add("base", {"fingerprint": base_fingerprint})
        self.manifest.add("device", {**device.to_json(), "processes": strategy.world_size})
        for one in setup.decisions:
            section, _, key = one.key.partition(".")
            was_auto = asked[section].get(key) == "auto"
            self.manifest.add("decisions", {one.key: {**one.to_json(), **({"asked": "auto"} if was_auto else {})}})
        compute = str(dtype.value).removeprefix("torch.")
        self._decided("compute dtype", compute, dtype.reason)
        in_backward = machine.in_backward
        self._decided(
            "optimizer step", "inside backward" if in_backward.value else "after backward", in_backward.reason
        )
        sharing = next(one for one in setup.decisions if one.key == "distributed.strategy")
        self._decided("strategy", strategy.name, sharing.reason)
        self.say(f"device {device.name}, compute {compute} ({dtype.reason}), adapters float32")
        if strategy.world_size > 1:
            self.say(f"{strategy.world_size} processes, {strategy.name}: {sharing.reason}")
        if self.first:
            self.manifest.started()
            text = dump_yaml(setup.config, setup.comments)
            self._write("config.yaml", lambda: write_text(self.run_dir / "config.yaml", text))
            self._started = True
            self._write_manifest()

    def built(self, model: BuiltModel, head: HeadSpec) -> None:
        """The model is there: what was loaded and replaced, and which attention and loss were chosen."""
        self.say(*model.report.lines(), *model.adapter_lines)
        self.manifest.add("load", model.report.as_dict())
        self.manifest.decide(model.attention)
        for kind, choice in model.attention.by_layer.items():
            self.manifest.decide(replace(choice, key=f"attention, {kind} layers"))
        if model.replacements is None:
            self._decided("modules", "stock", "memory.fused is false")
        else:
            replaced, kept = len(model.replacements.replaced), len(model.replacements.kept)
            self._decided("modules", f"{replaced} fused, {kept} stock", "each proven equal, or left alone")
            self.manifest.add("modules", model.replacements.to_json())
            self.say(f"fused modules: {replaced}, left as they are: {kept} (manifest.json says why)")
            if (failure := model.replacements.common_failure()) is not None:
                self.warn(
                    f"no module could be replaced, all for one reason: {failure}. Training goes on with transformers' "
                    "own, which need more memory; `frugal doctor` looks at each operation."
                )
        self._decided("loss", "chunked, no logits" if head.exact else "stock logits", head.reason)

    def measured(self, forecast: Forecast, result: WarmupResult, fallback: OutOfMemoryFallback) -> None:
        """The warm-up step is over: forecast and measured peak side by side, and what an out-of-memory changed."""
        self._decided("activation checkpointing", fallback.memory.checkpointing.policy, forecast.reason)
        self.manifest.add("forecast", forecast.plan.to_json() if forecast.plan is not None else forecast.reason)
        self.manifest.add("warm-up step", asdict(result))
        self.manifest.add("out-of-memory fallback", fallback.taken)
        self.say(*measured_lines(forecast, result, fallback.taken))

    def ran(self, decisions: list[Decision[str]]) -> None:
        """What operations resolved to while running, with what they fell back from."""
        for decision in decisions:
            self.manifest.decide(decision)

    def start_trackers(self, accelerator: Accelerator) -> None:
        """Before weights are read. Raises ConfigError when one cannot be started."""
        config = self.config.model_dump(mode="json")
        self._trackers = Trackers(accelerator, list(self.config.train.report_to), self.run_dir, config, self.warn)

    def training(self, step: int) -> None:
        """Steps begin after ``step``: start the progress, drop later log records."""
        train = self.config.train
        if self.first:
            self.log.restart(step)
            self._write_manifest()
        self._reporter = Reporter(self._total_steps, done=step, quiet=not self.first, every=train.logging_steps)

    def step(self, record: dict[str, Any]) -> None:
        """Take one record of train_log.jsonl."""
        if not self.first:
            return
        problem = self.log.problem
        self.log.write(record)
        if self.log.problem is not None and problem is None:
            self.warn(f"{self.log.problem}; its lines are kept and tried again")
        if "peak_memory_bytes" in record:
            self.manifest.peak("step", record["peak_memory_bytes"])
        if "reserved_memory_bytes" in record:
            self.manifest.peak("reserved by the allocator", record["reserved_memory_bytes"])
        if self._reporter is not None:
            self._reporter.step(record)
        due = record["step"] % self.config.train.logging_steps == 0 or record["step"] == self._total_steps
        if self._trackers is not None and due:
            self._trackers.log(record)

    def trained(self) -> None:
        """The last step is done: take the progress bar down."""
        if self._reporter is not None:
            self._reporter.close()

    def card(self, base: ResolvedModel, data: PreparedData, result: TrainResult, samples: list[dict[str, str]]) -> str:
        """The model card of the trained adapter."""
        return adapter_card(
            self.config,
            base_folder=base.path,
            account=data.report.figures.get("train", {}),
            result=result.numbers(),
            samples=samples,
            versions=versions(),
        )

    def finished(self, result: TrainResult, samples: list[dict[str, str]]) -> None:
        """Everything is saved: the manifest's last write marks the run as complete; say where everything is."""
        if not self.first:
            return
        self.manifest.finished(result.numbers())
        self._write_manifest()
        write_report(self.run_dir)
        for line in summary_lines(result, samples, self.manifest.content.get("seconds", {})):
            say(line)

    def _decided(self, part: str, chosen: str, why: str) -> None:
        self.manifest.decide(Decision(part, chosen, why))

    def _write_manifest(self) -> None:
        self._write("manifest.json", lambda: self.manifest.write(self.run_dir))

    def _write(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.run_dir / name}: {error.strerror or error}") from error
