"""Training steps without memory: the run's own functions on fake tensors, followed by the live-bytes meter.

Decoder layers are alike, so two models with few layers are run and every allocation site's own peak is continued to the
whole model; the same is done over two lengths. The largest site *after* continuing is the peak: which one that is may
well change with layers or tokens.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer

from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection
from frugal.memory.checkpoint import apply_activation_checkpointing
from frugal.meter import LiveBytesMeter
from frugal.meter_report import CATEGORIES
from frugal.ops.planned import PlannedDevice, planning_for
from frugal.plan.skeleton import FakeRun, Part, build_fake, layer_count, layer_counts, with_layers
from frugal.train.in_backward import OptimizerInBackward, place_of_step
from frugal.train.loss import LossModule
from frugal.train.optim import build_optimizer, trainable

Site = tuple[str, str]
"""(module with layer numbers as *, operation); ("", "at rest") is what exists before a phase begins."""
AT_REST: Site = ("", "at rest")
Phase = Literal["first_step", "steady_step", "evaluation"]
PHASES: tuple[Phase, ...] = ("first_step", "steady_step", "evaluation")


class SiteMeter(LiveBytesMeter):
    """A live-bytes meter that remembers, for every allocation site, the highest total at which it stood."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._best: dict[tuple[str, str, Any], tuple[int, int]] = {}
        super().__init__(*args, **kwargs)

    def _add(self, tensor: torch.Tensor, category: str, site: tuple[str, str, Any], existing: bool = False) -> None:
        super()._add(tensor, category, site, existing)
        if not existing:
            best = self._best.get(site)
            if best is None or self._total > best[0]:
                self._best[site] = (self._total, self._clock)

    def outcome(self) -> PhaseRun:
        """Totals and categories of every site's highest moment."""
        highest: dict[Site, tuple[int, int]] = {AT_REST: (self._start, 0)}
        for (module, node, func), found in self._best.items():
            name = ".".join("*" if part.isdigit() else part for part in module.split("."))
            op = str(func).removesuffix(".default")
            key = (name, f"{node} > {op}" if node else op)
            if found[0] > highest.get(key, (0, 0))[0]:
                highest[key] = found
        # bytes came and went at clock ticks: one sweep gives the categories at every tick that is asked for
        wanted = {clock for _, clock in highest.values()}
        events: dict[int, list[tuple[str, int]]] = {}
        for record in self._records:
            events.setdefault(record.born, []).append((record.category, record.nbytes))
            if record.died != -1:
                events.setdefault(record.died + 1, []).append((record.category, -record.nbytes))
        now: Counter[str] = Counter()
        at: dict[int, dict[str, int]] = {}
        for clock in range(self._clock + 1):
            for category, nbytes in events.get(clock, ()):
                now[category] += nbytes
            if clock in wanted:
                at[clock] = {c: now[c] for c in CATEGORIES if now[c]}
        return PhaseRun({site: (total, at[clock]) for site, (total, clock) in highest.items()})


@dataclass(frozen=True)
class PhaseRun:
    """One phase of one simulated run: site -> (highest total in bytes, its categories)."""

    sites: dict[Site, tuple[int, dict[str, int]]]


@dataclass(frozen=True)
class Peak:
    """A forecast peak."""

    bytes: int
    by_category: dict[str, int]
    module: str
    """Innermost module at the peak, layer numbers as *; "" outside modules."""
    op: str
    """The operation, after the autograd node in backward."""


@dataclass(frozen=True)
class Shape:
    """One micro-batch: rows of equal length."""

    rows: int
    length: int
    targets: int | None = None
    """Tokens that are trained; None: all."""

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.length


@dataclass
class Simulation:
    """Runs phases of one configuration for any shape; models are built once for each number of layers."""

    config: Any
    """The base's transformers configuration."""
    model: ModelSection
    lora: LoraSection
    train: TrainSection
    memory: MemorySection
    compute: torch.dtype
    device: PlannedDevice
    vocab_size: int | None = None
    packed: bool = False
    documents: int = 1
    """Documents of a row."""
    policy: Literal["none", "recompute", "offload", "disk"] = "recompute"
    whole: bool = False
    """Run the whole model instead of two short ones."""
    scratch_dir: str | None = None
    _runs: dict[int, _Built] = field(default_factory=dict, init=False)
    _known: dict[tuple[Phase, int, Shape], PhaseRun] = field(default_factory=dict, init=False)

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return layer_count(self.config)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of layers that are run."""
        pair = None if self.whole else layer_counts(self.config)
        return pair if pair is not None else (self.layers,)

    def peak(self, phase: Phase, shape: Shape) -> Peak:
        """Forecast of one phase, by running exactly this shape."""
        return _highest(self._over_layers(phase, shape))

    def at_rest(self, phase: Phase, shape: Shape) -> int:
        """Bytes that exist before the phase begins: weights, adapters, and optimizer state from the second step on."""
        return round(self._over_layers(phase, shape)[AT_REST][0])

    def base_at_rest(self) -> int:
        """Bytes of weights and adapters, before any step."""
        found = [(count, self._built(count).resting_bytes) for count in self.counts]
        if len(found) == 1:
            return found[0][1]
        (n1, low), (n2, high) = found
        return low + (high - low) * (self.layers - n1) // (n2 - n1)

    def line(self, phase: Phase, one: Shape, other: Shape) -> TokenLine:
        """The phase as a function of the tokens, from two shapes with the same number of rows."""
        return TokenLine(
            one.tokens, other.tokens, self._over_layers(phase, one), self._over_layers(phase, other)
        )  # fmt: skip

    def parts(self) -> list[Part]:
        """The tensors that loading handles; with short models, those of the longer one."""
        return self._built(self.counts[-1]).fake.parts

    def numbers(self) -> tuple[int, int]:
        """(parameters of the base, trained values) of the whole model."""
        found = []
        for count in self.counts:
            built = self._built(count).fake
            trained = sum(p.numel() for p in built.module.parameters() if p.requires_grad)
            found.append((count, built.parameters, trained))
        if len(found) == 1:
            return found[0][1:]
        (n1, base1, trained1), (n2, base2, trained2) = found
        steps = (self.layers - n1) // (n2 - n1)
        return base1 + (base2 - base1) * steps, trained1 + (trained2 - trained1) * steps

    def _over_layers(self, phase: Phase, shape: Shape) -> _Sites:
        runs = [(count, self._phase(phase, count, shape).sites) for count in self.counts]
        if len(runs) == 1:
            return {site: (float(total), _floats(cats)) for site, (total, cats) in runs[0][1].items()}
        (n1, low), (n2, high) = runs
        return _continued(
            n1, n2, {s: (float(t), _floats(c)) for s, (t, c) in low.items()},
            {s: (float(t), _floats(c)) for s, (t, c) in high.items()}, self.layers,
        )  # fmt: skip

    def _built(self, count: int) -> _Built:
        if count not in self._runs:
            config = self.config if count == self.layers else with_layers(self.config, count)
            self._runs[count] = _Built(self, config)
        return self._runs[count]

    def _phase(self, phase: Phase, count: int, shape: Shape) -> PhaseRun:
        key = (phase, count, shape)
        if key not in self._known:
            self._known[key] = self._built(count).run(phase, shape)
        return self._known[key]


_Sites = dict[Site, tuple[float, dict[str, float]]]


def _floats(values: dict[str, int]) -> dict[str, float]:
    return {key: float(value) for key, value in values.items()}


def _continued(x1: float, x2: float, low: _Sites, high: _Sites, x: float) -> _Sites:
    """Every site's straight line through two points, at ``x``. Sites that only one run has stay out."""

    def at(a: float, b: float) -> float:
        return a + (b - a) * (x - x1) / (x2 - x1)

    found: _Sites = {}
    for site in low.keys() & high.keys():
        (total1, cats1), (total2, cats2) = low[site], high[site]
        cats = {c: at(cats1.get(c, 0.0), cats2.get(c, 0.0)) for c in cats1.keys() | cats2.keys()}
        found[site] = (at(total1, total2), cats)
    return found


def _highest(sites: _Sites) -> Peak:
    site = max(sites, key=lambda s: (sites[s][0], s))
    total, cats = sites[site]
    return Peak(round(total), {c: round(cats[c]) for c in CATEGORIES if cats.get(c)}, *site)


@dataclass(frozen=True)
class TokenLine:
    """The peak of a phase as a function of the tokens of a micro-batch."""

    tokens1: int
    tokens2: int
    low: _Sites
    high: _Sites

    def at(self, tokens: float) -> Peak:
        """Forecast at ``tokens``."""
        return _highest(_continued(self.tokens1, self.tokens2, self.low, self.high, tokens))

    def slope_and_fixed(self, tokens: int) -> tuple[float, float]:
        """(bytes per further token, bytes without tokens) of the site that is the highest at ``tokens``."""
        peak = self.at(tokens)
        site = (peak.module, peak.op)
        slope = (self.high[site][0] - self.low[site][0]) / (self.tokens2 - self.tokens1)
        return slope, self.low[site][0] - slope * self.tokens1

    def most_tokens(self, budget_bytes: float) -> int:
        """The largest number of tokens whose peak stays within ``budget_bytes``; 0 when nothing fits."""
        if self.at(1).bytes > budget_bytes:
            return 0
        low, high = 1, 2
        while self.at(high).bytes <= budget_bytes and high < 1 << 40:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.at(middle).bytes <= budget_bytes else (low, middle)
        return low


class _Built:
    """One model with its optimizer, and what was run with it."""

    def __init__(self, owner: Simulation, config: Any) -> None:
        self.owner = owner
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.kind = "cpu" if owner.device.kind == "cpu" else "meta"
        self.fake: FakeRun = build_fake(
            config,
            model=owner.model,
            lora=owner.lora,
            memory=owner.memory,
            compute=owner.compute,
            device=self.kind,
            mode=self.mode,
            vocab_size=owner.vocab_size,
            packed=owner.packed,
        )
        self.module: LossModule = self.fake.module
        self.optimizer: Optimizer = build_optimizer(trainable(self.module.model), owner.train)
        apply_activation_checkpointing(self.module.model, owner.policy, scratch_dir=owner.scratch_dir)

    @property
    def resting_bytes(self) -> int:
        """Weights and adapters."""
        return LiveBytesMeter(self.module, detail=True).report().start_bytes

    def run(self, phase: Phase, shape: Shape) -> PhaseRun:
        with planning_for(self.owner.device, targets=shape.targets), self.mode:
            if phase == "first_step":
                self.optimizer.state.clear()
            elif not self.optimizer.state:
                self._make_state()
            self.module.train(phase != "evaluation")
            meter = SiteMeter(self.module, self.optimizer, detail=True)
            with meter:
                if phase == "evaluation":
                    evaluation(self.module, self._batch(shape))
                else:
                    self._step(shape)
            return meter.outcome()

    def _make_state(self) -> None:
        """Optimizer state as after a first step, without running one."""
        for parameter in trainable(self.module.model).values():
            parameter.grad = torch.empty_like(parameter)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _step(self, shape: Shape) -> None:
        train = self.owner.train
        place = place_of_step(
            self.owner.memory.optimizer_in_backward,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            max_grad_norm=train.max_grad_norm,
            loss_scaling=self.owner.compute is torch.float16,
        )
        if place.in_backward:
            loss_sum, _ = self.module(self._batch(shape))
            with OptimizerInBackward(self.optimizer, gradient_accumulation_steps=1, max_grad_norm=0.0):
                (loss_sum * 0.5).backward()
            return
        sums = torch.zeros(2, dtype=torch.float64, device=self.kind)
        # gradients that exist already make the second micro-batch the largest; a third is like it
        for _ in range(min(train.gradient_accumulation_steps, 2)):
            loss_sum, count = self.module(self._batch(shape))
            (loss_sum * 0.5).backward()
            sums += torch.stack([loss_sum.detach().double(), count.double()])
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        if train.max_grad_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(parameters, train.max_grad_norm, norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def _batch(self, shape: Shape) -> dict[str, Any]:
        """A batch as `frugal.data.collate` makes it, without values."""
        size = (1, shape.tokens) if self.fake.flat else (shape.rows, shape.length)
        ids = torch.zeros(size, dtype=torch.int64, device=self.kind)
        batch: dict[str, Any] = {
            "input_ids": ids,
            "labels": torch.zeros_like(ids),
            "position_ids": torch.zeros_like(ids),
        }
        if not self.fake.flat:
            batch["attention_mask"] = torch.ones_like(ids)
            return batch
        size_each = shape.length // self.owner.documents
        starts = [r * shape.length + d * size_each for r in range(shape.rows) for d in range(self.owner.documents)]
        offsets = [*starts, shape.tokens]
        batch.update(cu_seq_lens_q=offsets, cu_seq_lens_k=offsets, max_length_q=size_each, max_length_k=size_each)
        return batch


@torch.no_grad()
def evaluation(module: LossModule, batch: dict[str, Any]) -> None:
    """One batch of `frugal.train.evaluate.evaluate_rows`."""
    loss_sum, count = module(batch)
    torch.stack([loss_sum.double(), count.double()])
