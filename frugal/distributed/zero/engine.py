"""DeepSpeed ZeRO 1, 2 and 3 behind the loop's strategy.

The engine reduces, partitions, clips and steps; rates, loss, accumulation windows and files stay the loop's. Nothing
of DeepSpeed's own checkpoints is used: adapter and optimizer state are gathered whole, so that a run goes on with any
strategy and number of processes.

Under ZeRO-3 a decoder layer is one unit (a "leaf module" of DeepSpeed): its parameters, 4-bit storage among them, are
gathered together before its forward pass and its backward pass, and given up after.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeVar

import torch
from peft import PeftModel, get_peft_model_state_dict
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from frugal.distributed.device_wait import number
from frugal.distributed.group import digest
from frugal.distributed.optimizer_state import OptimizerState, named_parameters, refuse_other_state
from frugal.distributed.strategy import KINDS, MakeOptimizer, Strategy
from frugal.distributed.zero import state as zero_state
from frugal.distributed.zero.config import (
    Given,
    ZeroSettings,
    check_given,
    engine_config,
    launched_with,
    offloads,
    require_deepspeed,
)
from frugal.distributed.zero.state import deprecated_names
from frugal.errors import UnsupportedError
from frugal.model_structure import decoder_layers, mark_hooked

T = TypeVar("T")


class Zero(Strategy):
    """ZeRO of one stage. Needs a process group, and `LOCAL_RANK` in the environment, as launchers set it."""

    engine_steps = True

    def __init__(self, device: torch.device, settings: ZeroSettings, given: Given | None = None) -> None:
        """``given``: the configuration the launcher was started with (`launched_with`).

        Raises UnsupportedError where DeepSpeed cannot run here, ConfigError for a configuration that contradicts the
        run's.
        """
        super().__init__(device)
        require_deepspeed(device)
        check_given(given or {}, settings, world_size=self.world_size)
        # accelerate tells transformers about ZeRO-3, which would then build models partitioned and leave weights out
        unset_hf_deepspeed_config()
        self.settings, self.given = settings, given
        self.name = f"zero{settings.stage}"
        self.sharded = settings.stage == 3
        self.engine: Any = None
        self._trained: dict[str, nn.Parameter] = {}
        self._window: contextlib.ExitStack | None = None
        self._marked: nn.Module | None = None
        self._waiting: list[Any] = []
        """Hooks of layers that were partitioned before the engine was there."""

    @property
    def gradients_wait(self) -> bool:
        return True

    # ---- before the first step ---------------------------------------------------------------------------------------

    @deprecated_names()
    def shard_layer(self, layer: nn.Module) -> None:
        """Partition a loaded layer's frozen parameters at once (ZeRO-3), before the next layer is read.

        Until `prepare` the layer can still be run: it gathers itself around each forward pass.
        """
        if not self.sharded:
            return
        zero_state.partition(frozen(layer), self._config(trained=1, layer=1), self.settings.offload_parameters)
        self._waiting += zero_state.gather_around(layer)

    @deprecated_names()
    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """The engine, and the optimizer whose groups it steps (their `lr` is read at every step).

        The optimizer is built first: ZeRO leaves parameters without a shape, and weight decay goes by shape.
        """
        optimizer = make_optimizer()
        if type(optimizer) is not torch.optim.AdamW:
            raise UnsupportedError(
                f"DeepSpeed steps all parameters as one vector, and {type(optimizer).__name__} keeps 8-bit state in "
                "blocks of a parameter: write `train.optim: adamw`, or distributed.strategy: fsdp2."
            )
        self._trained = named_parameters(optimizer)
        shapes = {name: list(parameter.shape) for name, parameter in self._trained.items()}
        self._shapes = shapes
        for group in optimizer.param_groups:
            if self.settings.offload_optimizer:
                group["fused"] = group["foreach"] = None
        before = {name: parameter.dtype for name, parameter in module.named_parameters()}
        layers = decoder_layers(module)
        largest = max((_elements(layer) for layer in layers.values()), default=_elements(module))
        config = self._config(trained=sum(math.prod(shape) for shape in shapes.values()), layer=largest)
        for hook in self._waiting:
            hook.remove()
        if self.sharded:
            for name, layer in layers.items():
                zero_state.make_unit(name, layer)
            # the frozen ones before the engine: it would broadcast them, and then partition and broadcast again
            zero_state.partition(frozen(module), config, self.settings.offload_parameters)
        self.engine = zero_state.start_engine(module, optimizer, config)
        scope = contextlib.ExitStack()
        self.engine.register_forward_pre_hook(lambda *_: scope.enter_context(deprecated_names()))
        self.engine.register_forward_hook(lambda *_: scope.close(), always_call=True)
        _refuse_casts(module, before)
        if self.sharded:
            self._marked = module
            zero_state.mark_units(module)
            zero_state.refuse_whole(module, self.world_size)
        return self.engine, optimizer

    def _config(self, *, trained: int, layer: int) -> dict[str, Any]:
        return engine_config(
            self.settings,
            self.given,
            world_size=self.world_size,
            trained=trained,
            layer=layer,
            pin_memory=self.device.type == "cuda",
        )

    @property
    def sharded_kinds(self) -> tuple[str, ...]:
        return KINDS if self.sharded else ()

    def is_wrapped(self, wrapped: nn.Module) -> bool:
        return wrapped is self.engine

    def shard_sizes(self, parameter: Any) -> tuple[int, int, int]:
        if not hasattr(parameter, "ds_id"):
            return super().shard_sizes(parameter)
        numel = parameter.ds_numel  # flat parts, without rows
        return parameter.ds_tensor.numel() + parameter.data.numel(), numel, -(-numel // self.world_size)

    def check_clipping(self, max_grad_norm: float) -> None:
        clipping = float(self.engine.gradient_clipping())
        if clipping != max_grad_norm:
            raise UnsupportedError(
                f"DeepSpeed clips gradients at {clipping}, and train.max_grad_norm is {max_grad_norm}. Set "
                f"gradient_clipping to {max_grad_norm}, or take it out of DeepSpeed's configuration."
            )

    # ---- one step ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulating(self, wrapped: nn.Module, last: bool) -> Iterator[None]:
        """Micro-batches of a window add up on each rank and are reduced once, after the last (DeepSpeed's coalescing).

        A window of one micro-batch is reduced while its backward pass runs.
        """
        if self._window is None and not last:
            self._window = contextlib.ExitStack()
            self._window.enter_context(self.engine.coalesce_grad_reduction())
        try:
            yield
        except BaseException:
            self._abandon()
            raise
        if last and self._window is not None:
            window, self._window = self._window, None
            with deprecated_names():
                window.close()

    def _abandon(self) -> None:
        """Leave a window without reducing: a rank that raised must not wait in a collective operation."""
        window, self._window = self._window, None
        zero_state.drop_gradients(self.engine, self.settings.stage)
        if window is not None:
            with zero_state.without_reducing(self.engine):
                window.close()

    @deprecated_names()
    def backward(self, loss: Tensor, scaler: torch.amp.GradScaler) -> None:
        if scaler.is_enabled():
            self.engine.optimizer.override_loss_scale(scaler.get_scale())
        # the loss is divided already: by the targets of the whole window
        self.engine.backward(loss, scale_wrt_gas=False)

    def norm_and_clip(self, optimizer: Optimizer, max_norm: float, scaler: torch.amp.GradScaler) -> float:
        """The norm, over all ranks' partitions. The engine clips in its step, by the same formula."""
        if max_norm != self.settings.max_grad_norm:
            raise AssertionError(f"the engine clips at {self.settings.max_grad_norm}, not at {max_norm}")
        square = zero_state.local_square(self.engine, self.settings.stage, self._trained.values(), self.device)
        torch.distributed.all_reduce(square)
        return math.sqrt(number(square)) / scaler.get_scale()

    @deprecated_names()
    def step(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> None:
        """The engine leaves a step out whose gradients are not finite, and the loss scale falls then."""
        self.engine.step()
        if scaler.is_enabled():
            zero_state.tell_scaler(scaler, self.device, overflowed=not self.engine.was_step_applied())

    def zero_grad(self, optimizer: Optimizer) -> None:
        zero_state.drop_gradients(self.engine, self.settings.stage)

    # ---- beside steps ------------------------------------------------------------------------------------------------

    @deprecated_names()
    def inside(self, wrapped: nn.Module, action: Callable[[], T]) -> T:
        return action()

    def rest(self, wrapped: nn.Module) -> None:
        if self.sharded:
            self.engine.optimizer.parameter_offload.empty_partition_cache()

    def remember(self, optimizer: Optimizer) -> Callable[[], None]:
        return deprecated_names()(zero_state.remember(self.engine, self.settings.stage))

    @deprecated_names()
    def digests(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
        found = {}
        for name, parameter in parameters.items():
            with zero_state.whole(parameter):
                found[name] = digest(parameter)
        return found

    def close(self) -> None:
        """Take the engine's hooks off the model."""
        if self._window is not None:  # left to the garbage collector it would reduce, at any time, alone
            self._abandon()
        if self.engine is not None:
            self.engine.destroy()
            self.engine = None
        for each in [] if self._marked is None else self._marked.modules():
            mark_hooked(each, None)
        self._marked = None

    # ---- saving ------------------------------------------------------------------------------------------------------

    @deprecated_names()
    def full_adapter(self, model: PeftModel) -> dict[str, Tensor]:
        if not self.sharded:
            return super().full_adapter(model)
        found: dict[str, Tensor] = {}
        for key, parameter in _keyed(model).items():
            with zero_state.whole(parameter):
                if self.rank == 0:
                    found[key] = parameter.detach().cpu().clone()
        return found

    def adapter_shapes(self, model: PeftModel) -> dict[str, tuple[int, ...]]:
        keyed: dict[str, Any] = dict(_keyed(model))
        return {key: tuple(getattr(p, "ds_shape", p.shape)) for key, p in keyed.items()}

    @deprecated_names()
    def load_adapter(self, model: PeftModel, tensors: Mapping[str, Tensor]) -> None:
        for key, parameter in _keyed(model).items():
            zero_state.put_parameter(parameter, tensors[key])

    @deprecated_names()
    def full_optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        return zero_state.full_state(self.engine, self._trained, self._shapes, writes=self.rank == 0)

    @deprecated_names()
    def load_optimizer_state(self, optimizer: Optimizer, saved: OptimizerState, where: str) -> None:
        refuse_other_state(type(optimizer).__name__, self._shapes, saved, where)
        zero_state.put_state(self.engine, self.settings.stage, self._trained, saved, where)


def make_zero(
    stage: int,
    device: torch.device,
    *,
    offload: bool | Literal["auto"],
    micro_batch: int,
    accumulation: int,
    max_grad_norm: float,
) -> Zero:
    """Make the strategy of a stage under the configuration that the launcher was started with."""
    given = launched_with()
    optimizer, parameters = offloads(given or {})
    if offload != "auto":
        optimizer, parameters = offload, offload and stage == 3
    settings = ZeroSettings(
        stage=stage,
        micro_batch=micro_batch,
        accumulation=accumulation,
        max_grad_norm=max_grad_norm,
        offload_optimizer=optimizer,
        offload_parameters=parameters,
    )
    return Zero(device, settings, given)


def frozen(module: nn.Module) -> list[nn.Parameter]:
    """Parameters that are not trained, each once."""
    return [parameter for parameter in module.parameters() if not parameter.requires_grad]


def _elements(module: nn.Module) -> int:
    return sum(int(getattr(parameter, "ds_numel", parameter.numel())) for parameter in module.parameters())


def _keyed(model: PeftModel) -> dict[str, nn.Parameter]:
    """Key in an adapter file -> parameter. PEFT renames what it saves; numbered stand-ins show which became what."""
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    numbered = {name: torch.tensor(index) for index, (name, _) in enumerate(parameters)}
    renamed = get_peft_model_state_dict(
        model, state_dict=numbered, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    return {key: parameters[int(index)][1] for key, index in renamed.items()}


def _refuse_casts(module: nn.Module, before: dict[str, torch.dtype]) -> None:
    cast = [name for name, parameter in module.named_parameters() if parameter.dtype != before[name]]
    if cast:
        raise AssertionError(f"DeepSpeed cast {len(cast)} parameters, the first is {cast[0]}")
