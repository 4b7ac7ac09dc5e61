"""Inside a DeepSpeed engine: partitioned parameters, gradients, optimizer state, master values.

Written for DeepSpeed 0.19.8. Every function is called by all ranks at the same time.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from frugal.distributed.optimizer_state import OptimizerState
from frugal.distributed.zero.config import import_deepspeed, told
from frugal.errors import CheckpointError, UnsupportedError
from frugal.model_structure import EngineHooks, mark_hooked

MOMENTS = ("exp_avg", "exp_avg_sq")


def deepspeed() -> Any:
    """The package, imported when a run needs it: it is optional, and slow to import."""
    package = import_deepspeed()
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    return package


@contextlib.contextmanager
def deprecated_names() -> Iterator[None]:
    """Inside, two names of torch's that DeepSpeed still calls, each time, warn nobody. Also a decorator."""
    names = "(all_gather_into_tensor|reduce_scatter_tensor)"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=rf".*{names}.* is deprecated", category=FutureWarning)
        yield


# ---- partitioned parameters ------------------------------------------------------------------------------------------


def partition(parameters: list[nn.Parameter], config: dict[str, Any], offload: bool) -> None:
    """Cut parameters that are whole, the same on every rank, into one part a rank (ZeRO-3). Bytes are moved as bytes.

    Each becomes an empty tensor whose part is its ``ds_tensor``.
    """
    todo = [parameter for parameter in parameters if not hasattr(parameter, "ds_id")]
    if not todo:
        return
    package = deepspeed()
    package.init_distributed(verbose=False)
    holder = nn.Module()
    for index, parameter in enumerate(todo):
        holder.register_parameter(str(index), parameter)
    package.zero.Init(
        module=holder,
        config_dict_or_path=config,
        dtype=torch.float32,  # of nothing that is converted here
        remote_device="cpu" if offload else None,
    )


def whole(parameter: nn.Parameter, *, modifier_rank: int | None = None) -> contextlib.AbstractContextManager[Any]:
    """A parameter gathered, on every rank. With ``modifier_rank`` that rank's changes are kept."""
    if not hasattr(parameter, "ds_id"):
        return contextlib.nullcontext()
    gathered: contextlib.AbstractContextManager[Any] = deepspeed().zero.GatheredParameters(
        [parameter], modifier_rank=modifier_rank
    )
    return gathered


def gather_around(layer: nn.Module) -> list[Any]:
    """Hooks that gather a partitioned layer around each forward pass (without a backward one)."""
    parameters: list[Any] = [parameter for parameter in layer.parameters() if hasattr(parameter, "ds_id")]

    def before(*_: Any) -> None:
        parameters[0].all_gather(parameters)

    def after(*_: Any) -> None:
        parameters[0].partition(parameters)

    if not parameters:
        return []
    return [layer.register_forward_pre_hook(before), layer.register_forward_hook(after, always_call=True)]


def make_unit(name: str, layer: nn.Module) -> None:
    """Make a layer a unit of ZeRO-3: its parameters are gathered, and its gradients reduced, together.

    DeepSpeed reduces a unit's gradients when the gradient of its input is there. Where the input wants none (the first
    layer over a frozen embedding) that moment is before the layer's backward pass, and its gradients would be lost:
    so the input of every unit wants one.
    """
    from deepspeed.utils import set_z3_leaf_module

    def want_gradient(module: nn.Module, args: tuple[Any, ...]) -> Any:
        if not torch.is_grad_enabled():
            return None
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            raise UnsupportedError(
                f"ZeRO-3 cannot train {name}: {type(module).__name__} takes no hidden states as its first argument. "
                "Use distributed.strategy: fsdp2 or zero2."
            )
        return None if args[0].requires_grad else (args[0].detach().requires_grad_(), *args[1:])

    layer.register_forward_pre_hook(want_gradient)
    set_z3_leaf_module(layer, True)


def mark_units(model: nn.Module) -> None:
    """Tell who calls around a partitioned module's forward what the engine's hooks on it are (`engine_hooks`)."""
    for module in model.modules():
        if any(hasattr(parameter, "ds_id") for parameter in module.parameters(recurse=False)) or _hooked(module):
            mark_hooked(module, EngineHooks(2 if _hooked(module) else 0, partial(_gathered, module)))


def _hooked(module: nn.Module) -> bool:
    return "pre_bwd_fn" in vars(module)


@contextlib.contextmanager
def _gathered(module: nn.Module) -> Iterator[None]:
    parameters: list[Any] = list(module.parameters())
    parts = [p for p in parameters if hasattr(p, "ds_status") and p.ds_status.name == "NOT_AVAILABLE"]
    if not parts or any(parameter.requires_grad for parameter in parameters):
        yield
        return
    parts[0].all_gather(parts)
    try:
        yield
    finally:
        parts[0].partition(parts)


def refuse_whole(module: nn.Module, world_size: int) -> None:
    """Raise AssertionError unless this rank holds about 1/N of every parameter's bytes, 4-bit ones too."""
    parameter: Any
    for name, parameter in module.named_parameters():
        part = getattr(parameter, "ds_tensor", None)
        if part is None or part.numel() > -(-parameter.ds_numel // world_size) or part.dtype != parameter.dtype:
            raise AssertionError(
                f"{name} is not partitioned: {parameter.ds_summary() if part is not None else 'whole'}"
            )


def local_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of parameters as this rank stores them between steps: `frozen` and `trained` ones, in the model alone."""
    found = {"frozen": 0, "trained": 0}
    parameter: Any
    for parameter in module.parameters():
        stored = parameter.ds_tensor if hasattr(parameter, "ds_id") else parameter
        found["trained" if parameter.requires_grad else "frozen"] += stored.nbytes + (
            parameter.data.nbytes if stored is not parameter else 0
        )
    return found


def my_span(parameter: Any) -> tuple[int, int]:
    """(first element, number of elements) of a ZeRO-3 parameter that lie on this rank, padding left out."""
    size = parameter.ds_tensor.numel()
    first = size * parameter.ds_zero_partition_rank
    return first, max(0, min(size, parameter.ds_numel - first))


def my_part(parameter: Any, value: Tensor) -> Tensor:
    """What this rank keeps of a whole tensor under ZeRO-3, padded with zeros."""
    first, count = my_span(parameter)
    part = torch.zeros(parameter.ds_tensor.numel(), dtype=torch.float32)
    part[:count] = value.flatten()[first : first + count].to("cpu", torch.float32)
    return part


# ---- the engine ------------------------------------------------------------------------------------------------------


def start_engine(module: nn.Module, optimizer: Optimizer, config: dict[str, Any]) -> Any:
    """`deepspeed.initialize`; ``optimizer`` then steps the engine's flat partitions."""
    package = deepspeed()
    with told():
        engine, *_ = package.initialize(model=module, optimizer=optimizer, config=config)
    _share_masters(engine.optimizer, engine.zero_optimization_stage())
    return engine


def _share_masters(zero: Any, stage: int) -> None:
    """Let float32 parameters be their own master values: DeepSpeed keeps a second copy of the same numbers.

    A quarter of all bytes of adapters and AdamW state. Copies from one to the other become copies onto itself.
    """
    if stage == 3:
        parts = zero.fp16_partitioned_groups_flat
    else:
        ranks = [torch.distributed.get_rank(group) for group in zero.real_dp_process_group]
        parts = [groups[rank] for groups, rank in zip(zero.parallel_partitioned_bit16_groups, ranks, strict=True)]
    for part, master in zip(parts, _masters(zero), strict=True):
        if (part.dtype, part.device, part.shape) == (master.dtype, master.device, master.shape):
            master.data = part.data
    if stage < 3:
        zero._link_all_hp_params()


def state_bytes(engine: Any) -> dict[str, int]:
    """This rank's bytes of `masters` that are not the model's own, of `optimizer` state and reduced `gradients`."""
    zero = engine.optimizer
    stage = engine.zero_optimization_stage()
    own = [zero.fp16_partitioned_groups_flat] if stage == 3 else zero.parallel_partitioned_bit16_groups
    places = {part.data_ptr() for parts in own for part in parts}
    masters = _masters(zero)
    moments = [t for state in zero.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    gradients = zero.grad_partitions_flat_buffer.nbytes if stage == 3 else sum(m.nbytes for m in masters)
    return {
        "masters": sum(master.nbytes for master in masters if master.data_ptr() not in places),
        "optimizer": sum(moment.nbytes for moment in moments),
        "gradients": gradients,
    }


# ---- gradients -------------------------------------------------------------------------------------------------------


def local_square(engine: Any, stage: int, trained: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Sum of squares of this rank's part of all reduced gradients: float64 [1]."""
    square = torch.zeros(1, dtype=torch.float64, device=device)
    for gradient in _local_gradients(engine.optimizer, stage, trained):
        square += gradient.double().square().sum().to(device)
    return square


def _local_gradients(zero: Any, stage: int, trained: Iterable[nn.Parameter]) -> Iterable[Tensor]:
    if stage < 3:
        if zero.cpu_offload:
            yield from (flat.grad for flat in zero.single_partition_of_fp32_groups if flat.grad is not None)
        else:
            for gradients in zero.averaged_gradients.values():
                yield from gradients or ()
        return
    from deepspeed.utils import safe_get_local_grad

    for parameter in trained:
        gradient = safe_get_local_grad(parameter).flatten()
        yield gradient[: my_span(parameter)[1]]


def drop_gradients(engine: Any, stage: int) -> None:
    """Forget gradients, reduced ones too, as after a step."""
    zero = engine.optimizer
    for parameter in engine.module.parameters():
        if parameter.grad is not None and not parameter.grad.is_cuda:
            parameter.grad = None  # stage 3 asks tensors for a stream, which only those of a GPU have
    zero.zero_grad(set_to_none=True)
    if stage < 3:
        zero.micro_step_id = -1
        for group in list(zero.averaged_gradients):
            zero.averaged_gradients[group] = None
            zero.all_grad_tensors[group] = None
    elif not zero.offload_optimizer:
        zero.averaged_gradients = {}


@contextlib.contextmanager
def without_reducing(engine: Any) -> Iterator[None]:
    """Inside, the end of a coalesced window sends nothing (stages 1 and 2 would reduce an empty bucket)."""
    names = ("_flush_coalesced_reduction_zero12", "_flush_coalesced_reduction_zero3")
    vars(engine).update(dict.fromkeys(names, lambda optimizer: None))
    try:
        yield
    finally:
        for name in names:
            del vars(engine)[name]


def tell_scaler(scaler: torch.amp.GradScaler, device: torch.device, *, overflowed: bool) -> None:
    """Let torch's loss scaler learn how a step went that it did not take itself."""
    witness = torch.zeros((), device=device, requires_grad=True)
    witness.grad = torch.full((), float("inf") if overflowed else 0.0, device=device)
    stand_in = torch.optim.SGD([witness], lr=0.0)
    scaler.scale(torch.zeros((), device=device))  # scalers start lazily
    scaler.step(stand_in)
    scaler.update()


# ---- optimizer state and master values -------------------------------------------------------------------------------


def remember(engine: Any, stage: int) -> Callable[[], None]:
    """Copy master values and optimizer state to the host; calling the result puts them, and the model, back."""
    zero = engine.optimizer
    adam: Optimizer = zero.optimizer
    flats = _masters(zero)
    masters = [flat.detach().to("cpu", copy=True) for flat in flats]
    before = {flat: dict(state) for flat, state in adam.state.items() if state}
    copies = {
        flat: {key: value.detach().to("cpu", copy=True) for key, value in state.items()}
        for flat, state in before.items()
    }

    @torch.no_grad()
    def put_back() -> None:
        for flat, master in zip(flats, masters, strict=True):
            flat.data.copy_(master)
        if stage == 3:
            for part, flat in zip(zero.fp16_partitioned_groups_flat, flats, strict=True):
                part.data.copy_(flat.data)
        else:
            zero.update_lp_params()
        adam.state.clear()
        for flat, state in before.items():
            for key, copy in copies[flat].items():
                state[key].copy_(copy)
            adam.state[flat] = state

    return put_back


def _masters(zero: Any) -> list[Tensor]:
    """This rank's float32 master values, a flat tensor for each group: what the optimizer steps."""
    found: list[Tensor] = getattr(zero, "fp32_partitioned_groups_flat", None) or zero.single_partition_of_fp32_groups
    return found


def put_parameter(parameter: nn.Parameter, value: Tensor) -> None:
    """Set a trained parameter and its master value. ``value`` is whole, and the same on every rank."""
    from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

    with whole(parameter, modifier_rank=0), torch.no_grad():
        parameter.data.copy_(value)
    if hasattr(parameter, "ds_id"):
        safe_set_local_fp32_param(parameter, my_part(parameter, value))
    else:
        safe_set_full_fp32_param(parameter, value.to(parameter.device, torch.float32))


def full_state(
    engine: Any, trained: Mapping[str, nn.Parameter], shapes: Mapping[str, list[int]], *, writes: bool
) -> OptimizerState:
    """AdamW's state of every parameter, as one process would save it; on the host of the rank that ``writes``."""
    from deepspeed.utils import safe_get_full_optimizer_state

    meta: dict[str, Any] = {"optimizer": "AdamW", "parameters": dict(shapes), "numbers": {}, "on_host": []}
    tensors: dict[str, Tensor] = {}
    found = [(flat, state) for flat, state in engine.optimizer.optimizer.state.items() if state]
    if not found:
        return OptimizerState({}, meta)
    flat, step = found[0][0], found[0][1]["step"]
    _find_state_again(engine.optimizer)
    for name, parameter in trained.items():
        if writes:
            tensors[f"{name}|step"] = step.detach().cpu().clone()
        if step.device != flat.device:
            meta["on_host"].append(f"{name}|step")
        for key in MOMENTS:
            full = safe_get_full_optimizer_state(parameter, key)
            if writes:
                tensors[f"{name}|{key}"] = full.detach().cpu().reshape(shapes[name])
    return OptimizerState(tensors, meta)


def _find_state_again(zero: Any) -> None:
    """Let stages 1 and 2 learn where state lies: they look once, when their first group has stepped and no other."""
    if hasattr(zero, "_hp_optimizer_states_linked"):
        zero._hp_optimizer_states_linked = False
        zero._lazy_init_hp_params_optimizer_state()


def put_state(engine: Any, stage: int, trained: Mapping[str, nn.Parameter], saved: OptimizerState, where: str) -> None:
    """Put AdamW's state back, each rank its part. All parameters must have taken the same number of steps."""
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    zero = engine.optimizer
    adam: Optimizer = zero.optimizer
    adam.state.clear()
    steps = {float(tensor) for label, tensor in saved.tensors.items() if label.endswith("|step")}
    if not saved.tensors:
        return
    names = {label.rpartition("|")[0] for label in saved.tensors}
    if len(steps) != 1 or names != set(trained):
        raise CheckpointError(
            f"{where} holds parameters of different ages ({len(names)} of {len(trained)}, steps {sorted(steps)[:3]}): "
            "DeepSpeed steps all of them together. Go on with distributed.strategy: ddp or fsdp2."
        )
    flats = _masters(zero)
    on_device = any(group.get("fused") or group.get("capturable") for group in adam.param_groups)
    for flat in flats:
        step = torch.tensor(steps.copy().pop(), dtype=torch.float32, device=flat.device if on_device else "cpu")
        adam.state[flat] = {"step": step, **{key: torch.zeros_like(flat) for key in MOMENTS}}
    _find_state_again(zero)
    for name, parameter in trained.items():
        for key in MOMENTS:
            value = saved.tensors[f"{name}|{key}"]
            if stage == 3:
                safe_set_local_optimizer_state(parameter, my_part(parameter, value), key)
            else:
                safe_set_full_optimizer_state(parameter, value.to(parameter.device), key)
