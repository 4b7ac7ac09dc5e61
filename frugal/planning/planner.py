"""The planner: forecasts of every phase on device and host for one configuration, and how long a row may be."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from frugal.checkpoints.rotation import STATE_BYTES, kept_at_once
from frugal.config import Config
from frugal.objectives import OBJECTIVES
from frugal.ops.attention.sdpa import WORKSPACE_BYTES
from frugal.ops.gated_mlp import TILE_BYTES
from frugal.ops.linear_cross_entropy import CHUNK_BYTES
from frugal.planning import host
from frugal.planning.allocation_sites import Peak, TokenLine
from frugal.planning.forecast import Longest, Plan, longest_of, longest_row
from frugal.planning.host import HostForecast, device_allowance, tensor_budget
from frugal.planning.inputs import Planned, architecture, dtype_name
from frugal.planning.sharding import Network, Sharing, StrategyName, Units, units_of
from frugal.planning.simulate import MemorySimulator, load_peak
from frugal.planning.simulated_model import PHASES, Phase, Policy, Shape

__all__ = ["POLICIES", "Plan", "Planner", "Policy"]

POLICIES: tuple[Policy, ...] = ("none", "recompute", "offload", "disk")
"""From the fastest to the leanest."""
SHORTEST_LINE = 4096
RNG_BYTES = 5056


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
    world_size: int = 1
    """Ranks of the run; what is planned is one of them."""
    strategy: StrategyName | None = None
    """How they share it; None: as `frugal.planning.api.choose_strategy` says."""
    shard_base: bool | None = None
    """Whether FSDP2 and ZeRO-3 cut the frozen base too; None: where it does not fit each GPU whole."""
    offload: bool = False
    """Whether shards and optimizer state rest on the host (fsdp2, zero)."""
    gpus_per_host: int | None = None
    """Ranks on one machine; None: all, up to eight."""
    simulations: dict[Policy, MemorySimulator] = field(default_factory=dict, repr=False)
    """Of one process each; shared by planners that differ in how the run is shared."""
    strategy_reason: str = ""
    """Why strategy and shard_base are what they are."""
    _units: Units | None = field(default=None, init=False)

    @classmethod
    def of(cls, config: Config, device: Planned, **known: Any) -> Planner:
        """Reads the base's configuration, nothing else of it."""
        model = config.model
        found = architecture(model.base, model.revision, trust_remote_code=model.trust_remote_code)
        return cls(config, device, found, **known)

    @property
    def shape(self) -> Shape:
        """The micro-batch that is planned for."""
        return self.longest or Shape(self.config.train.per_device_train_batch_size, self.row_length)

    @property
    def row_length(self) -> int:
        """Tokens of the longest row: data.max_length, of a pair twice that."""
        return self.config.data.max_length * self.answers

    @property
    def answers(self) -> int:
        """Documents of a row that is not packed."""
        return OBJECTIVES[self.config.objective.name].answers

    @property
    def budget_bytes(self) -> int:
        """What tensors may take."""
        asked, device = self.config.memory.budget_bytes, self.device
        free = self.tensor_budget(device.total_bytes - device.others_bytes)
        if asked is None:
            return free
        if device.kind != "cpu":  # there a limit on tensors, which are followed one by one
            asked = self.tensor_budget(asked)
        return min(asked, free) if device.total_bytes else asked

    def tensor_budget(self, total_bytes: int) -> int:
        """Bytes that tensors may take of ``total_bytes`` of this device."""
        return tensor_budget(self.device.kind, self.device.capability, total_bytes, self.world_size)

    @property
    def ranks_per_host(self) -> int:
        """Ranks whose host memory adds up."""
        return min(self.world_size, self.gpus_per_host or 8)

    @property
    def sharing(self) -> Sharing | None:
        """How several ranks share the run; None for one, and while the strategy is still to be chosen."""
        if self.world_size == 1 or self.strategy is None:
            return None
        if self._units is None:
            one = self._single(self.policies[-1])
            self._units = units_of(one.built(one.counts[0]), one.layers)
        base = self.strategy == "zero3" if self.shard_base is None else self.shard_base
        return Sharing(
            self.strategy,
            self.world_size,
            base and self.strategy in ("fsdp2", "zero3"),
            self._units,
            self.config.train.gradient_accumulation_steps,
            self.offload,
        )

    def simulation(self, policy: Policy) -> MemorySimulator:
        """The configuration under a policy, on one rank."""
        found = copy.copy(self._single(policy))  # what was run is shared
        found.sharing = self.sharing
        return found

    def _single(self, policy: Policy) -> MemorySimulator:
        if policy not in self.simulations:
            config = self.config
            self.simulations[policy] = MemorySimulator(
                self.architecture,
                config.model,
                config.lora,
                config.train,
                config.memory,
                self.device.dtype.value,
                self.device,
                vocab_size=self.vocab_size,
                packed=config.data.packing,
                objective=config.objective,
                policy=policy,
                scratch_dir=config.memory.scratch_dir,
                world_size=self.world_size,
            )
        return self.simulations[policy]

    def step_peak(self, policy: Policy, shape: Shape | None = None) -> Peak:
        """Peak of a step once optimizer state exists."""
        return self.simulation(policy).peak("steady_step", shape or self.shape)

    def load_peak(self, policy: Policy) -> Peak:
        """Peak while the base is loaded."""
        return load_peak(self.simulation(policy))

    def line(self, policy: Policy) -> TokenLine:
        """A step's peak as a function of the tokens."""
        length = self.line_length
        return self.simulation(policy).line("steady_step", Shape(1, length), Shape(1, 2 * length))

    @property
    def line_length(self) -> int:
        """Tokens of a micro-batch from which on chunks of the loss, tiles of the MLP and attention's workspace have
        their full size."""
        text = self.architecture.get_text_config()
        itemsize = self.device.dtype.value.itemsize
        widest = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
        tile = TILE_BYTES // (4 * widest * itemsize)
        chunk = CHUNK_BYTES // (4 * text.vocab_size)
        heads = int(text.num_attention_heads)
        size = getattr(text, "head_dim", None) or text.hidden_size // heads
        groups = heads // (getattr(text, "num_key_value_heads", None) or heads)
        workspace = WORKSPACE_BYTES // (groups * size * (4 + 4 * itemsize))
        return max(SHORTEST_LINE, 1 << int(max(2 * tile, 2 * chunk, workspace)).bit_length())

    def longest_row(self, policy: Policy, budget_bytes: int | None = None, *, confirm: bool = False) -> Longest:
        """The longest row under ``policy``, see `frugal.planning.forecast.longest_row`."""
        return longest_row(
            policy,
            self.line(policy),
            budget_bytes=self.budget_bytes if budget_bytes is None else budget_bytes,
            exact_from=self.line_length,
            peak_bytes=lambda tokens: self.step_peak(policy, Shape(1, tokens)).bytes,
            host_need=lambda tokens: self.host(policy, tokens).peak_bytes,
            host_bytes=self.device.host_bytes,
            confirm=confirm,
        )

    @property
    def policies(self) -> list[Policy]:
        """What `memory.checkpoint` allows, from the fastest to the leanest."""
        asked = self.config.memory.checkpoint
        if asked != "auto":
            return [asked]
        # Host memory is the device of a CPU run: keeping inputs there saves nothing.
        return [p for p in POLICIES if p != "offload" or self.device.kind != "cpu"]

    def host(self, policy: Policy, tokens: int) -> HostForecast:
        """Host memory and disk, with micro-batches of ``tokens``."""
        sim = self.simulation(policy)
        parameters, trained = sim.numbers()
        output = self.config.output
        saves = 2 if self.optimizer_steps is None else -(-self.optimizer_steps // (output.save_steps or 10**9))
        sizes = host.Sizes(
            kind=self.device.kind,
            layers=sim.layers,
            hidden_size=int(self.architecture.get_text_config().hidden_size),
            itemsize=self.device.dtype.value.itemsize,
            tokens=tokens,
            policy=policy,
            trained_bytes=4 * trained,
            checkpoint_bytes=int(trained * (4 + STATE_BYTES[self.config.train.optim])) + 1_000_000,
            kept_checkpoints=kept_at_once(output.save_total_limit, output.keep_best, max(saves, 1)),
            base_parameters=parameters,
            dataset_bytes=self.dataset_bytes,
            embedding_bytes=sim.built(sim.counts[-1]).fake.host_embedding_bytes,
            shards_bytes=0 if sim.sharing is None else sim.sharing.host_bytes,
            ranks=self.ranks_per_host,
        )
        return host.forecast(sizes, sim.parts())

    @property
    def network(self) -> Network | None:
        """Traffic of one of several ranks."""
        if self.sharing is None:
            return None
        hosts = -(-self.world_size // self.ranks_per_host)
        return Network(self.sharing.sent_bytes(), self.ranks_per_host, hosts)

    def choose_policy(self) -> tuple[Policy, dict[str, int]]:
        """The configured policy; for ``auto`` the fastest that fits, else the leanest; and the peaks looked at."""
        candidates = self.policies
        if len(candidates) == 1:
            return candidates[0], {}
        tried: dict[str, int] = {}
        for policy in candidates:
            tried[policy] = self.step_peak(policy).bytes
            on_host = (
                self.device.host_bytes == 0 or self.host(policy, self.shape.tokens).peak_bytes <= self.device.host_bytes
            )
            if tried[policy] <= self.budget_bytes and on_host:
                return policy, tried
        return candidates[-1], tried

    def plan(self, *, with_line: bool = True, simulated: tuple[Phase, ...] = PHASES) -> Plan:
        """The forecast. ``with_line``: also the longest row under every policy that the configuration allows."""
        policy, tried = self.choose_policy()
        sim, shape = self.simulation(policy), self.shape
        phases: dict[str, Peak] = {name: sim.peak(name, shape) for name in simulated if name != "evaluation"}
        rows = self.config.train.per_device_eval_batch_size
        if self.has_eval is not False and "evaluation" in simulated:
            phases["evaluation"] = sim.peak("evaluation", self.eval_shape or Shape(rows, self.row_length))
        rest = sim.at_rest("steady_step", shape)
        parameters, trained = sim.numbers()
        load = self.load_peak(policy)
        # copies of generators' states are on the host, which on a CPU run is the device; tensors there are not copied
        copies = RNG_BYTES if self.device.kind == "cpu" else 0
        save = Peak(rest + copies, {"at rest": rest, "temporaries": copies}, "", "writing a checkpoint")
        ordered = {
            "load": load,
            **phases,
            "save": save,
            "merge": Peak(0, {}, "", "on the host"),
        }
        longest = {p: self.longest_row(p) for p in self.policies} if with_line else {}
        if longest:
            best = longest_of(longest)
            longest[best.policy] = self.longest_row(best.policy, confirm=True)
        peak = max(p.bytes for p in ordered.values())
        around = self.host(policy, shape.tokens)
        return Plan(
            base=self.config.model.base,
            device=self.device,
            policy=policy,
            asked_policy=self.config.memory.checkpoint,
            shape=shape,
            phases=ordered,
            longest=longest,
            budget_bytes=self.budget_bytes,
            allowance=device_allowance(self.device.kind, self.device.capability, peak, self.world_size),
            host=around.by_purpose,
            host_phases=around.phases,
            disk=around.disk,
            parameters=parameters,
            trained=trained,
            compute=dtype_name(self.device.dtype.value),
            tried=tried,
            sharing=sim.sharing,
            strategy_reason=self.strategy_reason,
            network=self.network,
            ranks_per_host=self.ranks_per_host,
            answers=self.answers,
            max_positions=getattr(self.architecture.get_text_config(), "max_position_embeddings", None),
        )

    def with_config(self, config: Config) -> Planner:
        """Another configuration; nothing that was simulated holds for it."""
        return replace(self, config=config, simulations={})
