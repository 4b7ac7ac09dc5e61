"""The plan of a run: peaks of every phase on device and host, what fits, and what would make it fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal

from frugal.config import Config
from frugal.ops.gated_mlp import TILE_BYTES
from frugal.ops.linear_cross_entropy import CHUNK_BYTES
from frugal.plan.allowance import device_allowance, tensor_budget
from frugal.plan.host import Sizes, disk_bytes, host_bytes, host_phases, merge_bytes
from frugal.plan.inputs import Planned, architecture, dtype_name
from frugal.plan.simulate import PHASES, Peak, Phase, Shape, Simulation, TokenLine
from frugal.plan.skeleton import Part, layer_count
from frugal.save.space import STATE_BYTES, kept_at_once

Policy = Literal["none", "recompute", "offload", "disk"]
POLICIES: tuple[Policy, ...] = ("none", "recompute", "offload", "disk")
"""From the fastest to the leanest."""
SHORTEST_LINE = 4096


@dataclass
class Plan:
    """One forecast. Bytes everywhere; `to_json` is its machine-readable form."""

    base: str
    device: Planned
    policy: Policy
    asked_policy: str
    shape: Shape
    phases: dict[str, Peak]
    """load, first_step, steady_step, evaluation, save, merge: on the device."""
    bytes_per_token: float
    fixed_bytes: float
    max_tokens: int
    """Tokens of a micro-batch that fit, by the step's line; confirmed by a direct run where `confirmed`."""
    budget_bytes: int
    """What tensors may take on the device."""
    allowance: dict[str, int]
    host: dict[str, int]
    host_phases: dict[str, int]
    disk: dict[str, int]
    parameters: int
    trained: int
    compute: str
    tried: dict[str, int] = field(default_factory=dict)
    """Policy -> peak of a step, of those looked at."""
    confirmed: bool = False

    @property
    def peak(self) -> Peak:
        """The highest phase."""
        return max(self.phases.values(), key=lambda peak: peak.bytes)

    @property
    def peak_phase(self) -> str:
        """Its name."""
        return max(self.phases, key=lambda name: self.phases[name].bytes)

    @property
    def need_bytes(self) -> int:
        """Peak and allowance."""
        return self.peak.bytes + sum(self.allowance.values())

    @property
    def fits_device(self) -> bool:
        """Every phase is within the budget."""
        return self.peak.bytes <= self.budget_bytes

    @property
    def host_bytes(self) -> int:
        """The highest phase on the host."""
        return max(self.host_phases.values())

    @property
    def fits_host(self) -> bool:
        """True also where the host's memory is not known."""
        return self.device.host_bytes == 0 or self.host_bytes <= self.device.host_bytes

    @property
    def fits(self) -> bool:
        """Device and host."""
        return self.fits_device and self.fits_host

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        peak = self.peak
        return {
            "base": self.base,
            "parameters": self.parameters,
            "trained_parameters": self.trained,
            "checkpoint": self.policy,
            "fits": self.fits,
            "device": {
                "name": self.device.name,
                "kind": self.device.kind,
                "compute_dtype": self.compute,
                "total_bytes": self.device.total_bytes,
                "budget_bytes": self.budget_bytes,
                "allowance": self.allowance,
                "peak_bytes": peak.bytes,
                "peak_phase": self.peak_phase,
                "need_bytes": self.need_bytes,
                "headroom_bytes": self.device.total_bytes - self.need_bytes,
                "fits": self.fits_device,
                "rows": self.shape.rows,
                "length": self.shape.length,
                "phases": {
                    name: {"bytes": p.bytes, "by_category": p.by_category, "module": p.module, "op": p.op}
                    for name, p in self.phases.items()
                },
                "bytes_per_token": round(self.bytes_per_token),
                "fixed_bytes": round(self.fixed_bytes),
                "max_tokens": self.max_tokens,
                "max_tokens_confirmed": self.confirmed,
                "max_length": self.max_tokens // self.shape.rows,
                "breakdown": peak.by_category,
                "tried": self.tried,
            },
            "host": {
                "total_bytes": self.device.host_bytes,
                "peak_bytes": self.host_bytes,
                "fits": self.fits_host,
                "breakdown": self.host,
                "phases": self.host_phases,
            },
            "disk": {**self.disk, "total_bytes": sum(self.disk.values())},
        }


@dataclass
class Planner:
    """Makes plans for one configuration on one device; what was simulated once is kept."""

    config: Config
    device: Planned
    architecture: Any
    vocab_size: int | None = None
    dataset_bytes: int = 0
    optimizer_steps: int | None = None
    longest: Shape | None = None
    """The largest micro-batch, where the data is known; else per_device_train_batch_size rows of data.max_length."""
    eval_shape: Shape | None = None
    has_eval: bool | None = None
    _simulations: dict[Policy, Simulation] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, config: Config, device: Planned, **known: Any) -> Planner:
        """Reads the base's configuration, nothing else of it."""
        model = config.model
        found = architecture(model.base, model.revision, trust_remote_code=model.trust_remote_code)
        return cls(config, device, found, **known)

    @property
    def shape(self) -> Shape:
        """The micro-batch that is planned for."""
        train, data = self.config.train, self.config.data
        return self.longest or Shape(train.per_device_train_batch_size, data.max_length)

    @property
    def budget_bytes(self) -> int:
        """What tensors may take."""
        asked = self.config.memory.budget_bytes
        free = tensor_budget(self.device.kind, self.device.capability, self.device.total_bytes)
        return free if asked is None else min(asked, free) if self.device.total_bytes else asked

    def simulation(self, policy: Policy) -> Simulation:
        """The configuration under a policy."""
        if policy not in self._simulations:
            config = self.config
            self._simulations[policy] = Simulation(
                self.architecture,
                config.model,
                config.lora,
                config.train,
                config.memory,
                self.device.dtype.compute,
                replace(self.device.target, attention=config.memory.attention),
                vocab_size=self.vocab_size,
                packed=config.data.packing,
                policy=policy,
                scratch_dir=config.memory.scratch_dir,
            )
        return self._simulations[policy]

    def step_peak(self, policy: Policy, shape: Shape | None = None) -> Peak:
        """Peak of a step once optimizer state exists."""
        return self.simulation(policy).peak("steady_step", shape or self.shape)

    def line(self, policy: Policy) -> TokenLine:
        """A step's peak as a function of the tokens."""
        length = self.line_length
        return self.simulation(policy).line("steady_step", Shape(1, length), Shape(1, 2 * length))

    @property
    def line_length(self) -> int:
        """Tokens of a micro-batch from which on all chunks of the loss and tiles of the MLP have their full size."""
        text = self.architecture.get_text_config()
        widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        tile = TILE_BYTES // (4 * widest * self.device.dtype.compute.itemsize)
        chunk = CHUNK_BYTES // (4 * text.vocab_size)
        return max(SHORTEST_LINE, 1 << int(max(2 * tile, 2 * chunk)).bit_length())

    def host_need(self, policy: Policy, tokens: int) -> int:
        """Highest phase of host memory."""
        _, phases, _ = self._host(policy, tokens)
        return max(phases.values())

    def choose_policy(self) -> tuple[Policy, dict[str, int]]:
        """The configured policy; for ``auto`` the fastest that fits, else the leanest; and the peaks looked at."""
        asked = self.config.memory.checkpoint
        if asked != "auto":
            return asked, {}
        tried: dict[str, int] = {}
        # Host memory is the device of a CPU run: keeping inputs there saves nothing.
        candidates = [p for p in POLICIES if p != "offload" or self.device.kind != "cpu"]
        for policy in candidates:
            tried[policy] = self.step_peak(policy).bytes
            on_host = self.device.host_bytes == 0 or self.host_need(policy, self.shape.tokens) <= self.device.host_bytes
            if tried[policy] <= self.budget_bytes and on_host:
                return policy, tried
        return candidates[-1], tried

    def plan(self, *, confirm: bool = False, with_line: bool = True, simulated: tuple[Phase, ...] = PHASES) -> Plan:
        """The forecast. ``confirm``: run the longest sequence that fits directly; ``with_line``: bytes per token."""
        policy, tried = self.choose_policy()
        sim, shape = self.simulation(policy), self.shape
        phases: dict[str, Peak] = {name: sim.peak(name, shape) for name in simulated if name != "evaluation"}
        rows = self.config.train.per_device_eval_batch_size
        if self.has_eval is not False and "evaluation" in simulated:
            phases["evaluation"] = sim.peak("evaluation", self.eval_shape or Shape(rows, self.config.data.max_length))
        rest = sim.at_rest("steady_step", shape)
        base_rest = sim.base_at_rest()
        parts, parameters, trained = self._account(sim)
        # the largest tensor is there in the checkpoint's dtype while it is quantised, at worst as the last one
        extra = max(part.read_bytes + part.scratch_bytes - part.kept_bytes for part in parts)
        load = Peak(base_rest + max(0, extra), {"at rest": base_rest, "temporaries": max(0, extra)}, "", "loading")
        save = Peak(rest, {"at rest": rest}, "", "at rest")
        ordered = {
            "load": load,
            **phases,
            "save": save,
            "merge": Peak(0, {}, "", "on the host"),
        }
        slope, fixed, most, confirmed = 0.0, 0.0, 0, False
        if with_line:
            line = self.line(policy)
            most = line.most_tokens(self.budget_bytes)
            slope, fixed = line.slope_and_fixed(max(most, 2 * self.line_length))
            if confirm and most > 2 * self.line_length:
                confirmed = self.step_peak(policy, Shape(1, most)).bytes <= self.budget_bytes
        peak = max(p.bytes for p in ordered.values())
        by_purpose, on_host, disk = self._host(policy, shape.tokens)
        return Plan(
            base=self.config.model.base,
            device=self.device,
            policy=policy,
            asked_policy=self.config.memory.checkpoint,
            shape=shape,
            phases=ordered,
            bytes_per_token=slope,
            fixed_bytes=fixed,
            max_tokens=most,
            budget_bytes=self.budget_bytes,
            allowance=device_allowance(self.device.kind, self.device.capability, peak),
            host=by_purpose,
            host_phases=on_host,
            disk=disk,
            parameters=parameters,
            trained=trained,
            compute=dtype_name(self.device.dtype.compute),
            tried=tried,
            confirmed=confirmed,
        )

    def _account(self, sim: Simulation) -> tuple[list[Part], int, int]:
        """(parts, parameters of the base, trained values) of the whole model."""
        parameters, trained = sim.numbers()
        return sim.parts(), parameters, trained

    def _host(self, policy: Policy, tokens: int) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        sim = self.simulation(policy)
        parts, parameters, trained = self._account(sim)
        output, train = self.config.output, self.config.train
        saves = 2 if self.optimizer_steps is None else -(-self.optimizer_steps // (output.save_steps or 10**9))
        sizes = Sizes(
            kind=self.device.kind,
            layers=layer_count(self.architecture),
            hidden_size=int(self.architecture.get_text_config().hidden_size),
            itemsize=self.device.dtype.compute.itemsize,
            tokens=tokens,
            policy=policy,
            trained_bytes=4 * trained,
            checkpoint_bytes=int(trained * (4 + STATE_BYTES[train.optim])) + 1_000_000,
            kept_checkpoints=kept_at_once(output.save_total_limit, output.keep_best, max(saves, 1)),
            base_parameters=parameters,
            dataset_bytes=self.dataset_bytes,
        )
        by_purpose = host_bytes(sizes, parts)
        return by_purpose, host_phases(by_purpose, merge_bytes(parts)), disk_bytes(sizes)

    def with_memory(self, **changes: Any) -> Planner:
        """The same run with other values in its memory section."""
        memory = self.config.memory.model_copy(update=changes)
        return replace(self, config=self.config.model_copy(update={"memory": memory}))
