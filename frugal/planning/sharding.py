"""One rank of several: what it holds of a model that is shared, what it gathers for a moment, and what it sends.

A rank runs the same operations as a single process, so every allocation site of the simulation stays; what changes is
what lies around it. Persistent tensors shrink to a rank's part, and at each place of a step some units are whole for a
while. The rules are those of `frugal.distributed.fsdp2` and of torch's FSDP2 (its flat buffer of a gather stays beside
the parameters cut from it in forward), and of DeepSpeed's ZeRO with the buckets that `frugal.distributed.zero.config`
sets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from frugal.distributed.fsdp2 import own_units
from frugal.memory.meter_report import ADAPTERS, GRADIENTS, OPTIMIZER, QUANT_STATE, TEMPORARIES, WEIGHTS
from frugal.model_structure import decoder_layers
from frugal.planning.allocation_sites import AT_REST, Site, Sites
from frugal.planning.simulated_model import SimulatedModel, StepPart

StrategyName = Literal["ddp", "fsdp2", "zero1", "zero2", "zero3"]
STRATEGIES: tuple[StrategyName, ...] = ("ddp", "fsdp2", "zero1", "zero2", "zero3")


@dataclass(frozen=True)
class Units:
    """Bytes of a model by what is gathered together."""

    layers: int
    layer_frozen: int
    """Parameters of one decoder layer that are not trained: codes, scales, norms."""
    layer_trained: int
    layers_trained: int
    """Trained parameters of all decoder layers: some may have no adapter."""
    embedding: int
    """0 where it is tied or trained, and then part of the root."""
    head: int
    head_rows: int
    root_frozen: int
    root_trained: int
    buffers: int
    """Nested scales and rotary frequencies: whole on every rank."""
    layer_name: str
    """Module name of the layers, numbers as *."""
    embedding_name: str
    head_name: str
    state_ratio: float
    """Optimizer state, as bytes of a byte that is trained."""

    @property
    def layer(self) -> int:
        """One layer, whole."""
        return self.layer_frozen + self.layer_trained

    @property
    def root(self) -> int:
        """What is gathered for the length of a step."""
        return self.root_frozen + self.root_trained

    @property
    def frozen(self) -> int:
        """All frozen parameters."""
        return self.layers * self.layer_frozen + self.embedding + self.head + self.root_frozen

    @property
    def trained(self) -> int:
        """All trained parameters."""
        return self.layers_trained + self.root_trained


def units_of(built: SimulatedModel, layers: int) -> Units:
    """Units of the whole model of ``layers`` layers, from one with few."""
    module = built.module
    named = decoder_layers(module)
    found = list(named.values())
    embedding, head = own_units(module)
    apart = {id(p) for owner in (*found, embedding, head) if owner is not None for p in owner.parameters()}
    root = [p for p in module.parameters() if id(p) not in apart]
    buffers = sum(b.nbytes for b in module.buffers())
    in_layers = sum(b.nbytes for layer in found for b in layer.buffers())
    trained = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    of_layers = [_bytes(layer, True) for layer in found]
    return Units(
        layers=layers,
        layer_frozen=max(_bytes(layer, False) for layer in found),
        layer_trained=max(of_layers),
        layers_trained=sum(of_layers) if len(found) == layers else max(of_layers) * layers,
        embedding=0 if embedding is None else _bytes(embedding, False),
        head=0 if head is None else _bytes(head, False),
        head_rows=0 if head is None else int(head.weight.shape[0]),
        root_frozen=sum(p.nbytes for p in root if not p.requires_grad),
        root_trained=sum(p.nbytes for p in root if p.requires_grad),
        buffers=buffers - in_layers + in_layers * layers // len(found),
        layer_name=_starred(next(iter(named))),
        embedding_name=_name_of(embedding, module),
        head_name=_name_of(head, module),
        state_ratio=built.state_bytes() / max(trained, 1),
    )


def _name_of(part: nn.Module | None, module: nn.Module) -> str:
    return next((_starred(name) for name, each in module.named_modules() if each is part), "")


def _starred(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _bytes(module: nn.Module, trained: bool) -> int:
    return sum(p.nbytes for p in module.parameters() if p.requires_grad is trained)


@dataclass(frozen=True)
class Sharing:
    """How a run is shared, and by how many."""

    strategy: StrategyName
    world_size: int
    shard_base: bool
    units: Units
    accumulation: int = 1
    """Micro-batches of a step on each rank."""
    offload: bool = False
    """Shards and optimizer state rest on the host; the optimizer steps there."""

    # ---- what a rank holds all the time ------------------------------------------------------------------------------

    @property
    def base_part(self) -> float:
        """A rank's part of the frozen parameters on its device."""
        return self._cut if self.shard_base else 1.0

    @property
    def trained_part(self) -> float:
        """A rank's part of the adapters on its device."""
        return self._cut if self.strategy in ("fsdp2", "zero3") else 1.0

    @property
    def state_part(self) -> float:
        """A rank's part of the optimizer state on its device."""
        return 1.0 if self.strategy == "ddp" else self._cut

    @property
    def gradient_part(self) -> float:
        """A rank's part of the gradients on its device once they are reduced."""
        return 1.0 if self.strategy in ("ddp", "zero1") else self._cut

    @property
    def _cut(self) -> float:
        return 0.0 if self.offload else 1 / self.world_size

    @property
    def host_bytes(self) -> int:
        """What rests on the host: shards, gradients of the trained ones, and optimizer state."""
        if not self.offload or self.strategy == "ddp":
            return 0
        units = self.units
        cut = units.trained * (2 + units.state_ratio) + (units.frozen if self.shard_base else 0)
        return round(cut / self.world_size)

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients of a step's first micro-batches are kept whole until its last."""
        return self.accumulation > 1 and not (self.strategy == "fsdp2" and self.shard_base)

    @property
    def engine_bytes(self) -> int:
        """What the engine itself keeps: DDP's buckets; ZeRO's second copy of a rank's part of the adapters and its
        bucket of gradients."""
        trained = self.units.trained
        if self.strategy == "ddp":
            return trained
        if self.strategy == "fsdp2":
            return 0
        bucket = min(trained, 4 << 24)
        return round(trained * self._cut) + (2 * bucket if self.strategy == "zero3" else bucket)

    def held(self) -> dict[str, int]:
        """Bytes that a rank holds between two steps, by what they are."""
        units = self.units
        return {
            "base": round(units.frozen * self.base_part) + units.buffers,
            "adapters": round(units.trained * self.trained_part),
            "optimizer": round(units.trained * units.state_ratio * self.state_part),
            "engine": self.engine_bytes,
        }

    # ---- what a rank gathers for a moment ----------------------------------------------------------------------------

    @property
    def _layer(self) -> int:
        """What is gathered of a layer."""
        if self.strategy == "zero3" or self.shard_base:
            return self.units.layer
        return self.units.layer_trained if self.strategy == "fsdp2" else 0

    def gathered(self) -> dict[str, int]:
        """Bytes that are whole for a while, by place."""
        if self.strategy not in ("fsdp2", "zero3"):
            return {}
        units = self.units
        if not self.shard_base:  # adapters stay gathered from forward to backward
            return {"all": units.trained, "layer in backward": 2 * units.layer_trained}
        flat = self.strategy == "fsdp2"
        return {
            "all": units.root,
            # the layer, torch's flat buffer it was cut from, and the next layer's
            "layer in forward": (3 if flat else 2) * units.layer,
            # the layer, the flat buffer of the one before, and a layer's gradients on their way; those that have waited
            # for the end of a step are whole and counted as gradients
            "layer in backward": 2 * units.layer + (0 if self.gradients_wait else 2 * units.layer_trained),
            "embedding": (2 if flat else 1) * units.embedding,
            "head": units.head,
            # in one tensor, without a flat buffer, where its rows divide
            "head arriving": (2 if flat and units.head_rows % self.world_size else 1) * units.head,
        }

    # ---- what a rank sends ------------------------------------------------------------------------------------------

    def sent_bytes(self) -> dict[str, int]:
        """Bytes that one rank sends in an optimizer step, by kind.

        Counted as rings do it: gathering or scattering B bytes over N ranks sends B (N - 1) / N from every rank, an
        all-reduce twice that.
        """
        units, micro_batches = self.units, self.accumulation
        part = (self.world_size - 1) / self.world_size
        trained = units.trained * part
        if self.strategy == "ddp":
            return {"all-reduce of gradients": round(2 * trained)}
        if self.strategy in ("zero1", "zero2"):  # DeepSpeed reduces to all ranks (measured: benchmarks/sharding.py)
            return {"all-reduce of gradients": round(2 * trained), "all-gather of adapters": round(trained)}
        found = {"reduce-scatter of gradients": trained}
        if not self.shard_base:  # ZeRO-3 gathers adapters like everything else: for forward and again for backward
            times = 2 * micro_batches if self.strategy == "zero3" else 1
            found["all-gather of adapters"] = trained * times
            return {kind: round(count) for kind, count in found.items()}
        passes = 2 * micro_batches
        if self.strategy == "fsdp2":  # with every micro-batch, so that no whole gradients wait
            found["reduce-scatter of gradients"] *= micro_batches
        found["all-gather of the base, forward and backward"] = units.layers * units.layer_frozen * part * passes
        found["all-gather of adapters"] = units.layers * units.layer_trained * part * passes
        tables = units.embedding + units.head
        found["all-gather of embedding and head"] = tables * part * micro_batches
        found["all-gather of the rest"] = units.root * part * (passes if self.strategy == "zero3" else 1)
        return {kind: round(count) for kind, count in found.items() if count}

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "strategy": self.strategy,
            "world_size": self.world_size,
            "shard_base": self.shard_base,
            "offload": self.offload,
            "held_bytes": self.held(),
            "gathered_bytes": self.gathered(),
        }

    def per_rank(self, part: StepPart, sites: Sites) -> Sites:
        """Every moment of one part of a phase, as it is on one rank."""
        return {site: self._moment(part, site, total, cats) for site, (total, cats) in sites.items()}

    def _moment(
        self, part: StepPart, site: Site, total: float, cats: dict[str, float]
    ) -> tuple[float, dict[str, float]]:
        units, found = self.units, dict(cats)
        # frozen parameters shrink, buffers do not
        factor = (units.frozen * self.base_part + units.buffers) / max(units.frozen + units.buffers, 1)
        for name, scale in (
            (WEIGHTS, factor), (QUANT_STATE, factor), (ADAPTERS, self.trained_part), (OPTIMIZER, self.state_part),
            (GRADIENTS, self._gradients(part)),
        ):  # fmt: skip
            if name in found:
                found[name] *= scale
        found[ADAPTERS] = found.get(ADAPTERS, 0.0) + self.engine_bytes
        if site != AT_REST:
            found[TEMPORARIES] = found.get(TEMPORARIES, 0.0) + self._transient(part, site)
        change = sum(found.values()) - sum(cats.values())
        return total + change, found

    def _gradients(self, part: StepPart) -> float:
        """Unreduced gradients are whole: those of earlier micro-batches of a step."""
        return 1.0 if part == "micro_batch" and self.gradients_wait else self.gradient_part

    def _transient(self, part: StepPart, site: Site) -> float:
        gathered = self.gathered()
        if not gathered or part == "update":
            return 0.0
        module, op = site
        backward = " > " in op
        found = gathered["all"]
        if backward:  # of the loss nothing is left but one scalar: the rest of backward is layers
            found += gathered["layer in backward"]
        elif module.startswith(self.units.layer_name):
            found += gathered.get("layer in forward", 0)
        elif module == self.units.embedding_name:
            found += gathered.get("embedding", 0)
        elif module in ("", self.units.head_name):
            found += gathered.get("head", 0)
        else:  # the last norm: after it the head arrives
            found += gathered.get("head arriving", 0)
        return float(found)


@dataclass(frozen=True)
class Network:
    """Traffic of one rank."""

    sent: dict[str, int]
    """Bytes of an optimizer step by kind, see `Sharing.sent_bytes`."""
    gpus_per_host: int
    hosts: int

    @property
    def sent_bytes(self) -> int:
        """All of a step."""
        return sum(self.sent.values())

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        between = f"; {self.hosts} hosts: the slowest link is the network's" if self.hosts > 1 else ""
        return {
            "sent_bytes_per_step": self.sent_bytes,
            "sent_by_kind": self.sent,
            "hosts": self.hosts,
            "gpus_per_host": self.gpus_per_host,
            "assumptions": [f"rings: a rank sends (N - 1) / N of what is gathered or reduced{between}"],
        }
