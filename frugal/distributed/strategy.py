"""How several processes share one run: the interface, and the strategies that shard nothing (one process, DDP).

The loop knows no engine. It asks its strategy to wrap the module and to build the optimizer, to go backward, to clip
and to step; saving asks it for whole tensors. What a strategy shards it hands out whole, tensor by tensor, so that
files are the same for every strategy and number of processes.

Every method is called by all ranks at the same time (it may communicate) unless it says otherwise.
"""

from __future__ import annotations

import contextlib
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from frugal.adapters import adapter_state
from frugal.distributed import group as ranks
from frugal.distributed.device_wait import number
from frugal.distributed.group import digest
from frugal.distributed.launch import Engine, Launch
from frugal.distributed.optimizer_state import OptimizerState, load_optimizer_state, optimizer_state
from frugal.distributed.tensors import local

T = TypeVar("T")
MakeOptimizer = Callable[[], Optimizer]
KINDS = ("nf4", "base", "trained")
"""Kinds of parameters: 4-bit storage, other frozen ones, trained ones."""


class Strategy(ABC):
    """One way to share a run. Made before the model is loaded; `prepare` is called once, after adapters, replaced
    modules and the loss module are there."""

    name: str
    sharded: bool = False
    """Whether parameters of the model are cut: outside `inside` nothing may compute with them."""

    engine_steps: bool = False
    """Whether an engine steps parameters of its own instead of those in the optimizer's groups."""
    offload: bool = False
    """Whether shards of parameters rest in host memory between their uses."""

    @property
    def cuts_base(self) -> bool:
        """Whether the frozen base is cut too, and layers are taken one at a time while they are loaded."""
        return self.sharded

    @property
    def gradients_wait(self) -> bool:
        """Whether gradients of a window's first micro-batches wait whole, outside the optimizer's parameters."""
        return self.sharded

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.world_size, self.rank = ranks.world_size(), ranks.rank()
        self._digests: dict[str, str] = {}  # of what is trained in the layers that were taken

    # ---- before the first step ---------------------------------------------------------------------------------------

    def take_layer(self, name: str, layer: nn.Module) -> None:
        """Take over a decoder layer that was just loaded, before the next one is: only this rank's part stays."""
        trained = {key: p for key, p in layer.named_parameters() if p.requires_grad}
        self._digests.update({f"{name}.{key}": digest(parameter) for key, parameter in trained.items()})
        self.shard_layer(layer)

    def shard_layer(self, layer: nn.Module) -> None:  # noqa: B027  (only what cuts the base has something to do)
        """Cut a decoder layer, once."""

    def compare_start(self, model: nn.Module) -> None:
        """Raise UnsupportedError on every rank when a trained tensor starts differently on one. Before `prepare`."""
        if self.world_size == 1:
            return
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        found = {name: digest(p) for name, p in trained.items() if name not in self._digests}
        ranks.compare({**found, **self._digests}, "before the first step")

    @abstractmethod
    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """The module that the loop calls, and its optimizer.

        ``module`` computes the loss. ``make_optimizer`` builds the optimizer over ``module``'s trained parameters as
        they are when it is called: a strategy that replaces parameters calls it after that.
        """

    def close(self) -> None:  # noqa: B027  (most leave nothing behind)
        """The run is over, or failed: take off what the engine put on the model. Not collective."""

    # ---- what `sanity_checks.preflight` asks -------------------------------------------------------------------------

    @property
    def sharded_kinds(self) -> tuple[str, ...]:
        """Which of `KINDS` must be cut over the ranks."""
        return ()

    @abstractmethod
    def is_wrapped(self, wrapped: nn.Module) -> bool:
        """Whether ``wrapped`` is what `prepare` makes, whose gradients are reduced."""

    def shard_sizes(self, parameter: nn.Parameter) -> tuple[int, int, int]:
        """Elements of a parameter: (on this rank, of the full tensor, of an even share in whole rows)."""
        numel, world = parameter.numel(), self.world_size
        # a dimension that does not divide is cut in chunks of ceil(size / world) rows
        shares = [-(-extent // world) * (numel // extent) for extent in parameter.shape if extent]
        return local(parameter).numel(), numel, max(shares, default=numel)

    def check_clipping(self, max_grad_norm: float) -> None:  # noqa: B027  (only an engine has a setting of its own)
        """Raise UnsupportedError when gradients would be clipped at another norm."""

    # ---- one step ----------------------------------------------------------------------------------------------------

    def accumulating(self, wrapped: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        """Around forward and backward of one micro-batch: gradients are reduced once, with the ``last`` of a window."""
        return contextlib.nullcontext()

    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler) -> None:
        """Gradients of one micro-batch's loss, added to those that are there. Reducing them averages over ranks."""
        scaler.scale(loss).backward()

    def norm_and_clip(self, optimizer: Optimizer, max_norm: float, scaler: torch.amp.GradScaler) -> float:
        """Global L2 norm of the step's gradients before clipping; they are clipped, at the latest in `step`, where
        ``max_norm`` > 0."""
        scaler.unscale_(optimizer)
        return clip(optimizer, max_norm)

    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """Update the parameters."""
        scaler.step(optimizer)
        scaler.update()

    def zero_grad(self, optimizer: Optimizer) -> None:
        """Drop all gradients."""
        optimizer.zero_grad(set_to_none=True)

    # ---- beside steps ------------------------------------------------------------------------------------------------

    def inside(self, wrapped: nn.Module, action: Callable[[], T]) -> T:
        """Run ``action``, which calls parts of the model instead of ``wrapped`` (answers to prompts, proofs)."""
        return action()

    def rest(self, wrapped: nn.Module) -> None:  # noqa: B027  (without shards there is nothing to give up)
        """Forward passes without a backward are over (evaluation, answers): give up what they gathered."""

    def remember(self, optimizer: Optimizer) -> Callable[[], None]:
        """Copy trained tensors and optimizer state to the host; calling the result puts them back, bit for bit."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        weights = [_copy(parameter) for parameter in parameters]
        before = {parameter: dict(values) for parameter, values in optimizer.state.items()}
        copies = {
            parameter: {key: _copy(value) for key, value in values.items() if isinstance(value, Tensor)}
            for parameter, values in before.items()
        }

        @torch.no_grad()
        def put_back() -> None:
            for parameter, copy in zip(parameters, weights, strict=True):
                local(parameter.detach()).copy_(copy)
            optimizer.state.clear()
            for parameter, values in before.items():
                for key, copy in copies[parameter].items():
                    local(values[key]).copy_(copy)
                optimizer.state[parameter] = values

        return put_back

    def digests(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
        """SHA-256 of each whole trained tensor as this rank sees it; equal on all ranks in a sound run."""
        return {name: digest(parameter) for name, parameter in parameters.items()}

    # ---- saving ------------------------------------------------------------------------------------------------------

    def full_adapter(self, model: PeftModel) -> dict[str, Tensor]:
        """The adapter under PEFT's names, whole, on rank 0's host; other ranks get an empty dict."""
        if self.rank != 0:
            return {}
        return {name: tensor.detach().cpu() for name, tensor in adapter_state(model).items()}

    def adapter_shapes(self, model: PeftModel) -> dict[str, tuple[int, ...]]:
        """Whole shapes of `full_adapter`'s tensors, on every rank."""
        return {name: tuple(tensor.shape) for name, tensor in adapter_state(model).items()}

    def load_adapter(self, model: PeftModel, tensors: Mapping[str, Tensor]) -> None:
        """Put whole tensors (of `full_adapter`'s names and shapes, the same on every rank) into the adapter."""
        with torch.no_grad():
            for name, tensor in adapter_state(model).items():
                tensor.copy_(tensors[name])

    def full_optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        """The state of all parameters, whole, on rank 0; on other ranks without tensors."""
        state = optimizer_state(optimizer)
        return state if self.rank == 0 else OptimizerState({}, state.meta)

    def load_optimizer_state(self, optimizer: Optimizer, saved: OptimizerState, where: str) -> None:
        """Put whole state back, each rank its part. CheckpointError, naming ``where``, for state of another run."""
        load_optimizer_state(optimizer, saved, where)


class OneProcess(Strategy):
    """One process: nothing is wrapped."""

    name = "one process"

    def is_wrapped(self, wrapped: nn.Module) -> bool:
        return True

    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        return module, make_optimizer()


class DataParallel(Strategy):
    """torch's DistributedDataParallel: everything on every rank, gradients averaged."""

    name = "ddp"

    def is_wrapped(self, wrapped: nn.Module) -> bool:
        return isinstance(wrapped, DistributedDataParallel)

    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Trained tensors must be equal already: nothing is sent at the start, least of all the frozen base."""
        on_gpu = self.device.type == "cuda"
        with warnings.catch_warnings():
            # newer torch renamed an argument; older ones know only the former name
            warnings.filterwarnings("ignore", category=FutureWarning)
            wrapped = DistributedDataParallel(
                module, device_ids=[self.device] if on_gpu else None, broadcast_buffers=False, init_sync=False
            )
        return wrapped, make_optimizer()

    def accumulating(self, wrapped: nn.Module, last: bool) -> contextlib.AbstractContextManager[Any]:
        if last:
            return contextlib.nullcontext()
        assert isinstance(wrapped, DistributedDataParallel)
        return wrapped.no_sync()


def make_strategy(
    engine: Engine | None,
    device: torch.device,
    launch: Launch,
    *,
    shard_base: bool,
    offload: bool | Literal["auto"],
    micro_batch: int,
    accumulation: int,
    max_grad_norm: float,
) -> Strategy:
    """Make the strategy of an engine (None: one process), and import what it needs.

    Args:
        shard_base: whether the frozen base is cut too, where ``engine`` leaves that open (fsdp2).
        offload: whether shards rest in host memory; "auto": as the launcher's configuration says.
        micro_batch: rows of a micro-batch on each rank.
        accumulation: micro-batches of an optimizer step on each rank.
        max_grad_norm: 0: no clipping.

    Raises:
        UnsupportedError: the engine cannot run here. ConfigError: the launcher's configuration contradicts the run's.
    """
    if engine is None or engine == "ddp":
        return replicated(device)
    if engine == "fsdp2":
        from frugal.distributed.fsdp2 import FullyShard

        return FullyShard(
            device,
            shard_base=shard_base,
            offload=launch.offload if offload == "auto" else offload,
            # accelerate's default is true; only false was somebody's choice
            reshard_after_forward=False if launch.reshard_after_forward is False else None,
        )
    from frugal.distributed.zero.engine import make_zero

    return make_zero(
        int(engine[-1]),
        device,
        offload=offload,
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
    )


def replicated(device: torch.device) -> Strategy:
    """The strategy that shards nothing, for as many processes as there are."""
    return OneProcess(device) if ranks.world_size() == 1 else DataParallel(device)


def clip(optimizer: Optimizer, max_norm: float) -> float:
    """Global L2 norm of the gradients before clipping; clips where ``max_norm`` > 0. For plain tensors."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm(gradients)
    if ranks.world_size() > 1 and gradients:
        # gradients are equal, but GPUs of two kinds may add their squares up in another order: one norm for all, or
        # the adapters part in their last bit
        torch.distributed.broadcast(norm, src=0)
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return number(norm)


def _copy(tensor: Tensor) -> Tensor:
    return local(tensor.detach()).to("cpu", copy=True)
