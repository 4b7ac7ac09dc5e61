"""Training steps without memory: the run's own functions on fake tensors, followed by the live-bytes meter.

Decoder layers are alike, so two models with few layers are run and every allocation site's own peak is extrapolated to
the whole model; the same is done over two lengths (`frugal.planning.allocation_sites`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

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

__all__ = ["PHASES", "MemorySimulator", "Peak", "Phase", "Shape", "TokenLine"]


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
        pair = None if self.whole else layer_counts(self.config)
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
