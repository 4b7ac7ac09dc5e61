"""What a run leaves besides its adapter: manifest, log, samples, card, report; and what a person sees meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from accelerate import Accelerator
from torch import nn

from frugal.config import Config, dump_yaml
from frugal.console import say
from frugal.data import PreparedData
from frugal.device import Device, DtypeChoice
from frugal.distributed import group as ranks
from frugal.distributed.strategy import Strategy
from frugal.errors import CheckpointError, Interrupted
from frugal.exports.card import adapter_card
from frugal.files import read_json, write_json, write_text
from frugal.inference.generate import generate_samples
from frugal.manifest import Manifest, versions
from frugal.models.build import BuiltModel
from frugal.models.head import HeadSpec
from frugal.models.resolve import ResolvedModel, base_fingerprint
from frugal.ops.choice import choices
from frugal.ops.table import PARAMETER_OPS
from frugal.run.memory import Forecast, measured_lines
from frugal.run.progress import Reporter
from frugal.run.summary import TrainResult, summary_lines
from frugal.run.trackers import Trackers
from frugal.training.log import TrainLog
from frugal.training.oom_fallback import OutOfMemoryFallback
from frugal.training.schedule import TrainPlan
from frugal.training.warmup_step import WarmupResult
from frugal.web.report import write_report


class RunRecord:
    """Context of one run. Rank 0 writes and shows, the others do nothing.

    Nothing is written before `__enter__`, so that wrong input leaves no folder; after it a failure is in the manifest.
    """

    def __init__(
        self, config: Config, run_dir: Path, plan: TrainPlan, source: ResolvedModel, data: PreparedData
    ) -> None:
        self.first = ranks.rank() == 0
        self.config, self.run_dir, self.plan, self.source, self.data = config, run_dir, plan, source, data
        self.manifest = Manifest()
        self.log = TrainLog(run_dir / "train_log.jsonl")
        self.samples: list[dict[str, str]] = []
        self.base_fingerprint: str | None = None
        self._reporter: Reporter | None = None
        self._trackers: Trackers | None = None
        self._strategy: Strategy | None = None

    def __enter__(self) -> RunRecord:
        if not self.first:
            return self
        for line in self.data.report.lines():
            self.say(line)
        self.say(self.data.template_report.line)
        for warning in self.data.template_report.warnings:
            self.say(f"warning: {warning}")
        self.manifest.add("config", self.config.model_dump(mode="json"))
        self.manifest.add("plan", self.plan.as_dict())
        self.manifest.add("data", {**self.data.report.to_json(), "template": self.data.template_report.to_json()})
        self.base_fingerprint = base_fingerprint(self.source.path)
        self.manifest.add(
            "base",
            {"name": self.source.name, "revision": self.source.revision, "fingerprint": self.base_fingerprint},
        )
        self.manifest.started()
        self._write("config.yaml", lambda: write_text(self.run_dir / "config.yaml", dump_yaml(self.config)))
        self._write("manifest.json", lambda: self.manifest.write(self.run_dir))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._reporter is not None:
            self._reporter.close()
        if self._trackers is not None:
            self._trackers.close()
            self._trackers = None
        if not self.first or error is None:
            return
        self.manifest.failed(error, status="interrupted" if isinstance(error, Interrupted) else "failed")
        try:
            self.manifest.write(self.run_dir)
        except OSError as second:
            self.say(
                f"cannot write {self.run_dir / 'manifest.json'}: {second}"
            )  # the first error is on its way already

    def say(self, text: str) -> None:
        """One message, above the progress bar when there is one."""
        if self._reporter is not None:
            self._reporter.say(text)
        elif self.first:
            say(text)

    def computes_on(self, device: Device, dtype: DtypeChoice, processes: int) -> None:
        """Note device and compute dtype."""
        name = str(dtype.compute).removeprefix("torch.")
        self.manifest.add("device", {**asdict(device), "processes": processes})
        self.manifest.choose("compute dtype", name, why=dtype.reason)
        for one in choices(device.torch_device, dtype.compute, use_dora=self.config.lora.use_dora):
            used = one.op not in PARAMETER_OPS or self.config.train.optim == "adamw_8bit"
            if used and one.op != "attention":  # attention is the model's matter, too: see `implementations`
                self.manifest.choose(f"op {one.op}", one.name, why=one.reason, rejected=one.rejected)
        self.say(f"device {device.name}, compute {name} ({dtype.reason}), adapters float32")

    def shared_by(self, strategy: Strategy, reason: str) -> None:
        """Note how the processes share the run."""
        self._strategy = strategy
        self.manifest.choose("strategy", strategy.name, why=reason)
        if strategy.world_size > 1:
            self.say(f"{strategy.world_size} processes, {strategy.name}: {reason}")

    def implementations(self, loaded: BuiltModel, head: HeadSpec) -> None:
        """Note what was loaded and replaced, and which attention and loss were chosen."""
        if not self.first:
            return
        for line in [*loaded.report.lines(), *loaded.adapter_lines]:
            self.say(line)
        self.manifest.add("load", loaded.report.as_dict())
        self.manifest.decide(loaded.attention)
        for kind, choice in loaded.attention.by_layer.items():
            self.manifest.choose(f"attention, {kind} layers", choice.name, why=choice.reason, rejected=choice.rejected)
        if loaded.replacements is None:
            self.manifest.choose("modules", "stock", why="memory.fused is false")
        else:
            replaced, kept = len(loaded.replacements.replaced), len(loaded.replacements.kept)
            self.manifest.choose("modules", f"{replaced} fused, {kept} stock", why="each proven equal, or left alone")
            self.manifest.add("modules", loaded.replacements.to_json())
            self.say(f"fused modules: {replaced}, left as they are: {kept} (manifest.json says why)")
        self.manifest.choose("loss", "chunked, no logits" if head.exact else "stock logits", why=head.reason)

    def memory(self, foreseen: Forecast, measured: WarmupResult, fallback: OutOfMemoryFallback) -> None:
        """Note forecast and measured peak side by side, and what an out-of-memory changed."""
        if not self.first:
            return
        self.manifest.choose("activation checkpointing", fallback.memory.checkpointing.policy, why=foreseen.reason)
        self.manifest.add("forecast", foreseen.plan.to_json() if foreseen.plan is not None else foreseen.reason)
        self.manifest.add("warm-up step", asdict(measured))
        self.manifest.add("out-of-memory fallback", fallback.taken)
        for line in measured_lines(foreseen, measured, fallback.taken):
            self.say(line)

    def before(self, wrapped: nn.Module, model: Any, tokenizer: Any, step: int, untrained: list[int]) -> None:
        """Warnings about tokens the base was never trained on, and answers before training.

        A resumed run keeps the answers that its first part wrote. ``wrapped``: ``model`` as it is trained; where it is
        sharded every rank takes part in an answer. ``untrained``: token ids whose embedding is all zero.
        """
        if self.first:
            for warning in self.data.untrained_token_warnings(tokenizer, untrained):
                self.say(f"warning: {warning}")
        prompts = self.config.output.sample_prompts
        if not prompts:
            return
        path = self.run_dir / "samples.json"
        answers = ranks.on_first(lambda: _kept_answers(path, prompts) if step else None)
        if answers is None:
            # before the first step the adapter changes nothing; later only the base alone says what was before
            answers = self._answers(wrapped, model, tokenizer, use_adapter=False)
        if not self.first:
            return
        self.samples = [
            {"prompt": prompt, "before": answer, "after": ""} for prompt, answer in zip(prompts, answers, strict=True)
        ]
        self._write("samples.json", lambda: write_json(path, self.samples))

    def begin(self, accelerator: Accelerator, step: int) -> None:
        """Start trackers and progress; drop log records after ``step``."""
        train = self.config.train
        if self.first:
            self.log.restart(step)
            self.manifest.write(self.run_dir)
        self._trackers = Trackers(accelerator, list(train.report_to), self.run_dir, self.config.model_dump(mode="json"))
        self._reporter = Reporter(self.plan.total_steps, done=step, quiet=not self.first, every=train.logging_steps)

    def step(self, record: dict[str, Any]) -> None:
        """One record of train_log.jsonl."""
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
        due = record["step"] % self.config.train.logging_steps == 0 or record["step"] == self.plan.total_steps
        if self._trackers is not None and due:
            self._trackers.log(record)

    def after(self, wrapped: nn.Module, model: Any, tokenizer: Any, result: TrainResult) -> str:
        """Answers after training; returns the model card."""
        if self._reporter is not None:
            self._reporter.close()
        answers = self._answers(wrapped, model, tokenizer) if self.config.output.sample_prompts else []
        if not self.first:
            return ""
        if self.samples:
            for row, answer in zip(self.samples, answers, strict=True):
                row["after"] = answer
            self._write("samples.json", lambda: write_json(self.run_dir / "samples.json", self.samples))
        return adapter_card(
            self.config,
            base_folder=self.source.path,
            account=self.data.report.figures.get("train", {}),
            result=_numbers(result),
            samples=self.samples,
            versions=versions(),
        )

    def finished(self, result: TrainResult) -> None:
        """Note the end in the manifest (its last write marks the run as complete) and say where everything is."""
        if not self.first:
            return
        self.manifest.finished(_numbers(result))
        self._write("manifest.json", lambda: self.manifest.write(self.run_dir))
        write_report(self.run_dir)
        for line in summary_lines(result, self.samples):
            say(line)

    def _answers(self, wrapped: nn.Module, model: Any, tokenizer: Any, *, use_adapter: bool = True) -> list[str]:
        """Answers to the sample prompts: of rank 0 alone, or of all ranks together where each holds a part."""
        sharded = self._strategy is not None and self._strategy.sharded

        def generate() -> list[str]:
            return generate_samples(
                model,
                tokenizer,
                self.config.output.sample_prompts,
                self.config.output.sample_max_new_tokens,
                system_prompt=self.config.data.system_prompt,
                use_adapter=use_adapter,
                together=sharded,
            )

        if self._strategy is not None and sharded:
            return self._strategy.inside(wrapped, generate)
        return generate() if self.first else []

    def _write(self, name: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except OSError as error:
            raise CheckpointError(f"cannot write {self.run_dir / name}: {error.strerror or error}") from error


def _kept_answers(path: Path, prompts: list[str]) -> list[str] | None:
    """Answers of the base that an earlier part of the run wrote down; None when one is missing."""
    kept = {row["prompt"]: row["before"] for row in read_json(path)} if path.is_file() else {}
    return [kept[prompt] for prompt in prompts] if set(prompts) <= kept.keys() else None


def _numbers(result: TrainResult) -> dict[str, Any]:
    return {
        "steps": result.steps,
        "epochs": result.epochs,
        "train_loss": result.final_loss,
        "eval_loss_before": result.eval_loss_before,
        "eval_loss": result.eval_loss,
        "best_step": result.best_step,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
    }
