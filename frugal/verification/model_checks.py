"""Checks of a user's own model, rows and run: what is computed here equals what stock transformers and PEFT compute."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from frugal.checkpoints.run_folder import RunFolder, other_base
from frugal.data import PreparedData, TokenDataset
from frugal.exports.base import Export
from frugal.exports.merge_plan import plan_merge
from frugal.exports.merged import MergeOptions, write_merged
from frugal.exports.proof import log_probs, proof_rows, reference
from frugal.models.attention import join_rows
from frugal.models.build import BuiltModel, ModelSpec, build
from frugal.models.equivalence import tolerance
from frugal.models.resolve import ResolvedModel
from frugal.models.stock import load_stock
from frugal.objectives import LossModule, make_objective
from frugal.verification.judge import Measurement, Subject

ROWS, LENGTH = 4, 96
"""Rows that are computed with, and tokens of each."""
Outcome = tuple[float, dict[str, Tensor]]
"""Mean loss and the gradients of the adapter."""


@dataclass
class Work:
    """A configuration or run that is checked; models are built when a check first needs them."""

    base: ResolvedModel
    tokenizer: Any
    spec: ModelSpec
    run: RunFolder | None = None
    data: PreparedData | None = None
    no_rows: str = ""
    """Why there are no data, where a run has some."""
    packing: bool = False
    chunk_tokens: int | None = None
    asked_otherwise: Callable[[], list[str]] = list
    """Sentences where chat asks in another form than was trained."""

    @cached_property
    def rows(self) -> TokenDataset:
        """The first documents that have targets, each cut to the tokens before its last target."""
        assert self.data is not None
        ids: list[np.ndarray] = []
        trained: list[np.ndarray] = []
        for part in self.data.parts.values():
            for start, stop in zip(part.doc_starts[:-1], part.doc_starts[1:], strict=True):
                targets = np.flatnonzero(part.trained[start:stop])
                if len(ids) < ROWS and len(targets):
                    last = start + int(targets[-1]) + 1
                    first = max(int(start), last - LENGTH)
                    ids.append(part.input_ids[first:last])
                    trained.append(part.trained[first:last])
        return TokenDataset.from_documents(ids, trained, list(range(len(ids))))

    @cached_property
    def fused(self) -> BuiltModel:
        """The model that is trained."""
        built = build(self.spec)
        if self.spec.adapter is None:  # a stored adapter is what is checked: it stays as it is
            start_apart(built.model)
        return built

    @cached_property
    def joins(self) -> bool:
        """Whether rows of a micro-batch lie end to end."""
        return join_rows(self.fused.base, self.fused.attention.value, packing=self.packing).value

    def outcome(
        self, groups: list[list[int]], *, data: TokenDataset | None = None, flat: bool | None = None
    ) -> Outcome:
        """Of the trained model: rows in micro-batches, the loss divided once by all targets."""
        rows, model = self.rows if data is None else data, self.fused.model.eval()
        objective = make_objective(pad_id=self.tokenizer.pad_token_id or 0, flat=self.joins if flat is None else flat)
        module = LossModule(model, objective, chunk_tokens=self.chunk_tokens, head=self.fused.head).eval()
        targets = sum(objective.targets(rows, group) for group in groups)
        model.zero_grad()
        total = 0.0
        for group in groups:
            batch = {key: _on(value, self.spec.device) for key, value in objective.collate(rows, group).items()}
            loss, _ = module(batch)
            (loss / targets).backward()
            total += float(loss.detach())
        return total / targets, gradients(model)

    @cached_property
    def alone(self) -> Outcome:
        """Every row for itself."""
        return self.outcome([[row] for row in range(len(self.rows))])

    @cached_property
    def together(self) -> Outcome:
        """All rows in one micro-batch."""
        return self.outcome([list(range(len(self.rows)))])

    @cached_property
    def stock(self) -> Outcome:
        """The same by transformers' and PEFT's own modules, every logit and torch's cross-entropy, row by row."""
        model = build(replace(self.spec, attention=None, fused=False, split_head=False)).model.eval()
        if self.spec.adapter is None:
            start_apart(model)
        total, targets = 0.0, int(self.rows.num_targets.sum())
        for number in range(len(self.rows)):
            row = self.rows[number]
            ids = torch.tensor(row.input_ids[None], dtype=torch.int64, device=self.spec.device)
            wanted = torch.tensor(row.trained[1:], device=self.spec.device)
            logits = model(input_ids=ids, use_cache=False).logits[0, :-1].float()
            loss = F.cross_entropy(logits[wanted], ids[0, 1:][wanted], reduction="sum")
            (loss / targets).backward()
            total += float(loss.detach())
        return total / targets, gradients(model)

    @cached_property
    def export(self) -> Export:
        """The run as exports take it."""
        assert self.run is not None
        return Export(self.run, self.base, Path("verify"), [], self.base.trust_remote_code)

    @cached_property
    def asked(self) -> list[list[int]]:
        """Rows whose log-probs are compared."""
        return proof_rows(self.export, self.tokenizer, self.spec.vocab_size or 1 << 30)

    @cached_property
    def peft(self) -> list[Tensor]:
        """Log-probs of the adapter on its base by stock transformers and PEFT, float32."""
        run = self.export.run
        linears: set[str] = set()
        if run.quantized:
            plan = plan_merge(self.base.path, run.adapter, quantized=True, experts=run.quantized_experts)
            linears = {name for name, weight in plan.weights.items() if weight.quantized}
        rows = self.spec.vocab_size or 0
        model = reference(self.export, dequantized=run.quantized, linears=linears, vocabulary=rows)
        return log_probs(model, self.asked)


def start_apart(model: Any) -> None:
    """Give B of a fresh adapter small random values: at 0 it hides the gradients of A."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".lora_B." in name and parameter.requires_grad and not bool(parameter.any()):
                parameter.copy_(0.02 * torch.randn(parameter.shape, generator=generator))


def gradients(model: Any) -> dict[str, Tensor]:
    """Copies of what backward left."""
    return {n: p.grad.detach().float().cpu().clone() for n, p in model.named_parameters() if p.grad is not None}


def _on(value: Any, device: torch.device) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _loss_gap(want: Outcome, got: Outcome) -> float:
    return abs(want[0] - got[0]) / max(abs(want[0]), 1e-6)


def _gradient_gap(want: Outcome, got: Outcome) -> float:
    """The largest of all tensors: norm of the difference by the norm; infinite where one has no gradient."""
    if not want[1] or want[1].keys() != got[1].keys():
        return math.inf
    whole = math.sqrt(sum(float(grad.square().sum()) for grad in want[1].values()))
    return max(
        float((grad - got[1][name]).norm()) / max(float(grad.norm()), 1e-3 * whole, 1e-12)
        for name, grad in want[1].items()
    )


def _pair(
    name: str, subject: Subject, want: Callable[[], Outcome], got: Callable[[], Outcome], advice: str
) -> Iterator[Measurement]:
    most = tolerance(subject.dtype, whole_model=True)
    for what, gap in (("loss", _loss_gap), ("gradients", _gradient_gap)):
        yield Measurement(name, "", what, lambda gap=gap: gap(want(), got()) / most, most, advice)  # type: ignore[misc]


def fused_is_stock(subject: Subject) -> Iterator[Measurement]:
    """Loss and every gradient of the adapter, against modules of transformers and PEFT."""
    work = subject.work
    advice = "Train with memory.fused: false and memory.attention: sdpa, and report this model."
    yield from _pair("fused = stock", subject, lambda: work.stock, lambda: work.alone, advice)


def packed_is_unpacked(subject: Subject) -> Iterator[Measurement]:
    """Rows of one micro-batch, joined or padded as they will be, against each alone."""
    work = subject.work
    advice = "Train with data.packing: false and per_device_train_batch_size: 1, and report this model."
    yield from _pair("rows together = alone", subject, lambda: work.alone, lambda: work.together, advice)


def split_window(subject: Subject) -> Iterator[Measurement]:
    """An optimizer step over one micro-batch, against the same over several uneven ones."""
    work = subject.work
    rows = list(range(len(work.rows)))
    groups = [group for group in (rows[:1], rows[1:]) if group]
    advice = "Train with gradient_accumulation_steps: 1, and report this model."
    yield from _pair("split of a window", subject, lambda: work.together, lambda: work.outcome(groups), advice)


def neighbours(subject: Subject) -> Iterator[Measurement]:
    """The loss of the last row alone is trained; what stands in the other rows is exchanged."""
    work = subject.work

    def last_only(shift: int) -> Outcome:
        rows = work.rows
        last = int(rows.doc_starts[-2])
        ids, trained = rows.input_ids.copy(), rows.trained.copy()
        ids[:last] = (ids[:last] + shift) % int(work.spec.vocab_size or ids.max() + 1)
        trained[:last] = False
        changed = replace(rows, input_ids=ids, trained=trained)
        found: Outcome = work.outcome([list(range(len(rows)))], data=changed)
        return found

    advice = "Rows leak into one another: train with data.packing: false and batch size 1, and report this model."
    yield from _pair("a row ignores its neighbours", subject, lambda: last_only(0), lambda: last_only(7), advice)


def answers_end(subject: Subject) -> Iterator[Measurement]:
    """Share of the answers whose end token is not trained."""
    report = subject.work.data.template_report

    def untrained() -> float:
        return (report.answers - report.answers_ended) / report.answers if report.answers else 0.0

    advice = "The model will not learn to stop: choose a data.chat_template that closes an answer with an end token."
    yield Measurement("end token trained", "", "answers without", lambda: untrained() / 0.5, 0.5, advice)


def asked_as_trained(subject: Subject) -> Iterator[Measurement]:
    """What chat sends for a question is the beginning of the row that is trained."""

    def differs() -> float:
        if found := subject.work.asked_otherwise():
            raise ValueError(found[0])
        return 0.0

    advice = "Use a chat template that prints a question the same with and without its answer."
    yield Measurement("chat asks as trained", "", "ids", differs, 0.0, advice)


def base_is_the_runs(subject: Subject) -> Iterator[Measurement]:
    """The base that is found has the weights that the adapter was trained on, by their fingerprint."""

    def differs() -> float:
        if sentence := other_base(subject.work.run, subject.work.base):
            raise ValueError(sentence)
        return 0.0

    yield Measurement("base fingerprint", "", "weights", differs, 0.0, "Name the base it was trained on with --base.")


def _most(dtype: torch.dtype) -> float:
    return 2e-3 if dtype == torch.float32 else 3e-1


def _log_prob_gap(want: list[Tensor], got: list[Tensor], rows: list[list[int]]) -> float:
    """Largest difference of the rows' own tokens."""
    largest = 0.0
    for row, one, other in zip(rows, want, got, strict=True):
        targets = torch.tensor(row[1:])[:, None]
        largest = max(largest, float((one.gather(1, targets) - other.cpu().gather(1, targets)).abs().max()))
    return largest


def adapter_is_peft(subject: Subject) -> Iterator[Measurement]:
    """The stored adapter, loaded as chat and training load it, against stock PEFT's."""
    work = subject.work

    def gap() -> float:
        model = work.fused.model.eval()
        rows = [torch.tensor([row], device=work.spec.device) for row in work.asked]
        with torch.no_grad():
            got = [model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1) for ids in rows]
        return _log_prob_gap(work.peft, got, work.asked)

    most = _most(subject.dtype)
    advice = (
        "Do not use this adapter before it is understood: compare adapter_config.json with the base, and report it."
    )
    yield Measurement("adapter = stock PEFT's", "", "log-probs", lambda: gap() / most, most, advice)


def merged_is_adapter(subject: Subject) -> Iterator[Measurement]:
    """A merge into a temporary folder, read by stock transformers, against the adapter on its base."""
    work = subject.work

    def gap() -> float:
        with tempfile.TemporaryDirectory(prefix="frugal-verify-") as folder:
            out = Path(folder) / "merged"
            write_merged(replace(work.export, out=out, warnings=[]), MergeOptions(dtype="float32"))
            model = load_stock(out, dtype=torch.float32).eval()
            return _log_prob_gap(work.peft, log_probs(model, work.asked), work.asked)

    advice = "Serve the adapter on its base instead of a merged model, and report this run."
    yield Measurement("merged = adapter", "", "log-probs", lambda: gap() / 2e-3, 2e-3, advice)
