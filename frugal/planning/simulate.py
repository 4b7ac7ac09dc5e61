"""The phases of a run without memory: its own functions on fake tensors, followed by the live-bytes meter.

Decoder layers are alike, so two models with few layers are run and every allocation site's own peak is extrapolated to
the whole model; the same is done over two lengths (`frugal.planning.allocation_sites`). Of loading, reading is
arithmetic, and the proofs (attention on two short rows, a replaced MLP on five tokens) are run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from frugal.adapters.patterns import names_single_layers
from frugal.memory.meter import LiveBytesMeter
from frugal.memory.meter_report import TEMPORARIES
from frugal.model_structure import decoder_layers
from frugal.models.equivalence import PROBE_ROWS, PROBE_TOKENS, PROOF_TOKENS
from frugal.models.materialize import LoadedTensor
from frugal.planning.allocation_sites import (
    AT_REST,
    Peak,
    Sites,
    TokenLine,
    extrapolate,
    highest,
    merge,
)
from frugal.planning.sharding import Sharing
from frugal.planning.simulated_model import PHASES, Parts, Phase, Shape, SimulatedModel, Subject
from frugal.planning.skeleton import layer_count, layer_counts, with_layers

__all__ = ["PHASES", "MemorySimulator", "Peak", "Phase", "Shape", "TokenLine", "load_peak"]


@dataclass
class MemorySimulator(Subject):
    """Runs phases of one configuration for any shape; models are built once for each number of layers."""

    whole: bool = False
    """Run the whole model instead of two short ones."""
    sharing: Sharing | None = None
    """How several ranks share the run; sites are then those of one rank."""
    _runs: dict[int, SimulatedModel] = field(default_factory=dict, init=False)
    _known: dict[tuple[Phase, int, Shape], Parts] = field(default_factory=dict, init=False)

    @property
    def layers(self) -> int:
        """Decoder layers of the whole model."""
        return layer_count(self.config)

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of layers that are run."""
        pair = None if self.whole or names_single_layers(self.lora) else layer_counts(self.config)
        return pair if pair is not None else (self.layers,)

    def peak(self, phase: Phase, shape: Shape) -> Peak:
        """Forecast of one phase, by running exactly this shape."""
        return highest(self.sites(phase, shape))

    def at_rest(self, phase: Phase, shape: Shape) -> int:
        """Bytes that exist before the phase begins: weights, adapters, and optimizer state from the second step on."""
        return round(self.sites(phase, shape)[AT_REST][0])

    def base_at_rest(self) -> int:
        """Bytes of weights and adapters, before any step."""
        return self._over_counts([self.built(count).resting_bytes for count in self.counts])

    def line(self, phase: Phase, one: Shape, other: Shape) -> TokenLine:
        """The phase as a function of the tokens, from two shapes with the same number of rows."""
        return TokenLine(one.tokens, other.tokens, self.sites(phase, one), self.sites(phase, other))

    def parts(self) -> list[LoadedTensor]:
        """The tensors that loading handles; with short models, those of the longer one."""
        return self.built(self.counts[-1]).fake.parts

    def numbers(self) -> tuple[int, int]:
        """(parameters of the base, trained values) of the whole model."""
        base, trained = [], []
        for count in self.counts:
            fake = self.built(count).fake
            base.append(fake.parameters)
            trained.append(sum(p.numel() for p in fake.module.parameters() if p.requires_grad))
        return self._over_counts(base), self._over_counts(trained)

    def sites(self, phase: Phase, shape: Shape) -> Sites:
        """Every site's highest moment in the whole model."""
        runs = [self._phase(phase, count, shape) for count in self.counts]
        parts = dict(runs[0])
        if len(runs) > 1:
            n1, n2 = self.counts
            parts = {name: extrapolate(n1, n2, runs[0][name], runs[1][name], self.layers) for name in parts}
        if self.sharing is not None:
            parts = {name: self.sharing.per_rank(name, sites) for name, sites in parts.items()}
        return merge(parts.values())

    def stock(self) -> MemorySimulator:
        """The same with the modules that were not replaced."""
        memory = self.memory.model_copy(update={"fused": False})
        return replace(self, memory=memory, policy="none", sharing=None)

    def built(self, count: int) -> SimulatedModel:
        """The model with ``count`` layers."""
        if count not in self._runs:
            config = self.config if count == self.layers else with_layers(self.config, count)
            self._runs[count] = SimulatedModel(self, config)
        return self._runs[count]

    def _over_counts(self, values: list[int]) -> int:
        """A number that every further layer raises by the same amount, for the whole model."""
        if len(values) == 1:
            return values[0]
        n1, n2 = self.counts
        return values[0] + (values[1] - values[0]) * (self.layers - n1) // (n2 - n1)

    def _phase(self, phase: Phase, count: int, shape: Shape) -> Parts:
        key = (phase, count, shape)
        if key not in self._known:
            self._known[key] = self.built(count).run(phase, shape)
        return self._known[key]


# ---- the load phase --------------------------------------------------------------------------------------------------


def load_peak(sim: MemorySimulator) -> Peak:
    """Peak on one rank's device.

    The tensor that takes most beside its place is, at worst, the last. A base that is cut arrives layer by layer: of
    earlier ones a rank has its part, embedding and head are whole until the last layer is there.
    """
    adapted = sim.base_at_rest()
    bare = adapted - 4 * sim.numbers()[1]
    if sim.sharing is not None and sim.sharing.shard_base:
        bare = adapted = _cut(sim.sharing)
    reading = max(0, max((part.read_bytes + part.scratch_bytes - part.kept_bytes for part in sim.parts()), default=0))
    of_attention, of_mlp = proofs(sim)
    extra = max(bare + max(reading, of_attention), adapted + of_mlp) - adapted
    return Peak(adapted + extra, {"at rest": adapted, TEMPORARIES: extra}, "", "loading")


def _cut(sharing: Sharing) -> int:
    units = sharing.units
    others = round((units.layers - 1) * units.layer * sharing.base_part)
    return others + units.layer + units.embedding + units.head + units.root + units.buffers


def proofs(sim: MemorySimulator) -> tuple[int, int]:
    """Bytes that exist while attention is proven, before adapters are there, and while an MLP's replacement is."""
    stock = sim.stock().built(sim.counts[0])
    rows, length = PROBE_ROWS, PROBE_TOKENS
    vocab = stock.fake.base.config.get_text_config().vocab_size

    def forward() -> None:
        ids = torch.zeros(rows, length, dtype=torch.int64, device=stock.kind)
        position = torch.arange(length, device=stock.kind).expand(rows, length)
        mask = torch.ones_like(ids)
        wanted = torch.empty(rows * length, vocab, device=stock.kind)  # the stock model's logits
        with torch.no_grad():
            logits = stock.fake.base(input_ids=ids, attention_mask=mask, position_ids=position, use_cache=False).logits
            (logits.float().flatten(0, 1) - wanted).abs()

    of_attention = _transient(stock, forward)
    if not sim.memory.fused:
        return of_attention, 0
    fused = sim.built(sim.counts[0])
    return of_attention, max(_transient(built, lambda b=built: _run_mlp(b)) for built in (stock, fused))  # type: ignore[misc]


def _run_mlp(built: SimulatedModel) -> None:
    layer: Any = next(iter(decoder_layers(built.module).values()))
    mlp = getattr(layer, "mlp", None)
    if mlp is None:
        return
    width = built.fake.base.config.get_text_config().hidden_size
    x = torch.zeros(1, PROOF_TOKENS, width, dtype=built.subject.compute, device=built.kind).requires_grad_()
    y = mlp(x)
    trained = [p for p in mlp.parameters() if p.requires_grad]
    torch.autograd.grad(y, [x, *trained], torch.zeros_like(y), allow_unused=True)


def _transient(built: SimulatedModel, action: Callable[[], None]) -> int:
    with built.simulating(), built.mode:
        built.module.eval()
        meter = LiveBytesMeter(built.module, detail=True)
        with meter:
            action()
    return meter.peak_bytes - meter.report().start_bytes
