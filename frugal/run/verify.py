"""`frugal verify`: the checks of a model, its rows and a run, put together and shown."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import AutoTokenizer

from frugal.checkpoints.run_folder import check_depth, open_run
from frugal.config import Config, load_config
from frugal.data import build as build_data
from frugal.device import resolve_dtype, usable
from frugal.errors import DataError
from frugal.exports.merge_plan import fit_adapter
from frugal.models.build import ModelSpec
from frugal.models.resolve import ResolvedModel
from frugal.models.tokenizer import rows_needed
from frugal.run.samples import asked_otherwise
from frugal.run.steps import model_spec, open_base, open_tokenizer
from frugal.verification.judge import Check, Need, Subject
from frugal.verification.model_checks import Work
from frugal.verification.registry import CHECKS, run_checks


@dataclass(frozen=True)
class Verdict:
    """What `frugal verify` found."""

    what: str
    checks: list[Check]
    not_run: list[str] = field(default_factory=list)
    """Checks that need what is not there, each with what it needs."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every check that was run is right."""
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        checks = [{**check.to_json(), "measured": measured(check)} for check in self.checks]
        seconds = round(self.seconds, 1)
        return {"what": self.what, "passed": self.passed, "checks": checks, "not_run": self.not_run, "seconds": seconds}


def measured(check: Check) -> float | None:
    """The difference itself; None where the check ended with a message."""
    return None if check.error is None or check.tolerance is None else check.error * check.tolerance


def verify(
    what: str | Path | Config | Mapping[str, Any],
    *,
    base: str | Path | None = None,
    trust_remote_code: bool = False,
    names: list[str] | None = None,
) -> Verdict:
    """Check a configuration, a run or an adapter's folder: as many of the checks as it has what they need for.

    Args:
        base: the base model of a run; wins over what it stored.
        names: checks to run, of `frugal.verification.CHECKS`; None: all of a model.

    Raises:
        ConfigError, DataError, CheckpointError: as training and loading do.
    """
    start = time.perf_counter()
    usable()  # before a base is downloaded
    work, title = _work(what, base, trust_remote_code)
    needs: set[Need] = {"model"}
    needs |= {"rows"} if work.data is not None else set()
    needs |= {"run"} if work.run is not None else set()
    subject = Subject(work.spec.device, work.spec.dtype, frozenset(needs), work)
    wanted = [name for name, row in CHECKS.items() if row.needs and (names is None or name in names)]
    why = {"rows": work.no_rows or "rows"}
    missing = [
        f"{name} needs {', '.join(why.get(need, need) for need in sorted(CHECKS[name].needs - needs))}"
        for name in wanted
        if CHECKS[name].needs - needs
    ]
    return Verdict(title, list(run_checks(subject, wanted)), missing, time.perf_counter() - start)


def _work(what: Any, base: str | Path | None, trust_remote_code: bool) -> tuple[Work, str]:
    if isinstance(what, str | Path) and Path(what).expanduser().is_dir():
        run = open_run(what)
        source = run.base_source(base, trust_remote_code=trust_remote_code)
        check_depth(run, source)
        fit_adapter(source.path, run.adapter, trust_remote_code=trust_remote_code)
        home = str(run.tokenizer_folder or source.path)
        tokenizer = AutoTokenizer.from_pretrained(home, trust_remote_code=trust_remote_code)
        spec = replace(
            _spec(run.config, source, tokenizer), lora=None, adapter=run.adapter, quantize_experts=run.quantized_experts
        )
        return _with_rows(Work(source, tokenizer, spec, run), run.config, required=False), str(what)
    config = load_config(what)
    source = open_base(config)
    tokenizer = open_tokenizer(config, source)
    work = Work(source, tokenizer, _spec(config, source, tokenizer))
    return _with_rows(work, config, required=True), str(what) if isinstance(what, str | Path) else "the configuration"


def _spec(config: Config | None, source: ResolvedModel, tokenizer: Any) -> ModelSpec:
    device = usable()
    asked = "auto" if config is None else config.model.dtype
    if config is not None:
        return model_spec(config, source, tokenizer, device, resolve_dtype(asked, device))
    return ModelSpec(
        source=source,
        quantize="none",
        dtype=resolve_dtype(asked, device).value,
        device=device.torch_device,
        vocab_size=rows_needed(tokenizer, source.config()),
    )


def _with_rows(work: Work, config: Config | None, *, required: bool) -> Work:
    """The rows of the configuration; without them, where a run's data are elsewhere by now."""
    if config is None:
        return work
    assert work.spec.vocab_size is not None
    try:
        data = build_data(
            config.data,
            work.tokenizer,
            seed=config.train.seed,
            vocab_size=work.spec.vocab_size,
            objective=config.objective.name,
        )
    except DataError as error:
        if required:
            raise
        work.no_rows = f"rows of the configuration: {error}"
        return work
    if data.template_report.template:
        work.tokenizer.chat_template = data.chat_template
    work.data, work.packing, work.chunk_tokens = data, config.data.packing, config.memory.loss_chunk_tokens
    clock = None if data.clock is None else datetime.fromisoformat(data.clock)
    system = config.data.system_prompt
    work.asked_otherwise = lambda: asked_otherwise(data, work.tokenizer, system_prompt=system, clock=clock)
    return work


def show(verdict: Verdict, console: Console) -> None:
    """The table; what to do stands below it."""
    table = Table(title=f"frugal verify {verdict.what}", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    for name in ("check", "of"):
        table.add_column(name, no_wrap=True)
    for name in ("measured", "allowed"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("result")
    for check in verdict.checks:
        number = measured(check)
        values = ("" if number is None else f"{number:.2g}", "" if not check.tolerance else f"{check.tolerance:.2g}")
        result = Text("right", style="green") if check.passed else Text("WRONG", style="bold red")
        table.add_row(check.op, check.what, *values, result)
    console.print(table)
    for check in verdict.checks:
        if not check.passed:
            console.print(
                Text(f"{check.op} ({check.what}): {check.message} {check.advice}".replace("  ", " "), style="red")
            )
    for line in verdict.not_run:
        console.print(Text(f"not run: {line}", style="dim"))
    wrong = sum(not check.passed for check in verdict.checks)
    console.print(f"{len(verdict.checks) - wrong} of {len(verdict.checks)} checks are right ({verdict.seconds:.0f} s).")
