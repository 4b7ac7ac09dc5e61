"""An optimizer's state as named tensors: what a checkpoint holds, whole, whatever the number of processes.

State is keyed by parameter name and loaded without `Optimizer.load_state_dict`: that one casts floating state to the
parameter's dtype, which ruins 8-bit state, and matches parameters by position.

`AdamW8bit` works on this rank's shard alone and scales its state by blocks of 256 elements of that shard. Where shards
begin on whole blocks of the full tensor (rows times columns of a part divisible by 256: all usual sizes) the blocks
are those of one process, and state is moved bit for bit. Where they do not, state is widened to float32, put together,
and coded again in the other blocks: a rounding of 8-bit state, once at that save or load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from frugal.distributed.tensors import cut, gather_parts, like, span, whole
from frugal.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
Convert = Callable[[nn.Parameter, Tensors], Tensors]
"""(parameter, its state's tensors by key) -> the same as whole tensors, or as the part that this rank keeps."""

BLOCK = 256
_MAPS = {"1": create_dynamic_map(signed=True).tolist(), "2": create_dynamic_map(signed=False).tolist()}
_LOCAL = ("state1", "state2")  # AdamW8bit's moments: plain tensors of the shard's shape


@dataclass
class OptimizerState:
    """An optimizer's state, ready for a safetensors file and its metadata."""

    tensors: dict[str, torch.Tensor]
    """`<parameter name>|<state key>` -> tensor, with the dtype and shape that the optimizer uses."""
    meta: dict[str, Any]
    """Kind of optimizer, parameters with their shapes, numbers, and which tensors live on the CPU by design."""


def optimizer_state(optimizer: Optimizer, gather: Convert | None = None) -> OptimizerState:
    """The state of all parameters; without ``gather`` tensors by reference (nothing is copied)."""
    tensors: dict[str, torch.Tensor] = {}
    numbers: dict[str, Any] = {}
    host: list[str] = []
    shapes: dict[str, list[int]] = {}
    for name, parameter in named_parameters(optimizer).items():
        shapes[name] = list(parameter.shape)
        found: Tensors = {}
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"{name}|{key}"
            if isinstance(value, torch.Tensor):
                if value.device != parameter.device:
                    host.append(label)
                found[key] = value.detach()
            elif value is None or isinstance(value, (int, float, bool)):
                numbers[label] = value
            else:
                raise TypeError(f"optimizer state {label} is a {type(value).__name__}, which cannot be saved")
        if found and gather is not None:
            found = gather(parameter, found)
        tensors.update({f"{name}|{key}": value for key, value in found.items()})
    meta = {"optimizer": type(optimizer).__name__, "parameters": shapes, "numbers": numbers, "on_host": host}
    return OptimizerState(tensors, meta)


def load_optimizer_state(optimizer: Optimizer, saved: OptimizerState, where: str, part: Convert | None = None) -> None:
    """Put saved state back bit for bit: dtypes and shapes as saved, tensors on their parameter's device.

    ``part`` cuts out what this rank keeps. Raises CheckpointError, naming ``where``, for state of another optimizer or
    of other parameters.
    """
    named = named_parameters(optimizer)
    refuse_other_state(type(optimizer).__name__, {name: list(p.shape) for name, p in named.items()}, saved, where)
    on_host = set(saved.meta.get("on_host", []))
    tensors: dict[str, Tensors] = {name: {} for name in named}
    for label, tensor in saved.tensors.items():
        name, _, key = label.rpartition("|")
        if name not in tensors:
            raise CheckpointError(f"{where} holds state for the unknown parameter {name!r}")
        tensors[name][key] = tensor
    state: dict[str, dict[str, Any]] = {}
    for name, parameter in named.items():
        found = tensors[name]
        if found and part is not None:
            found = part(parameter, found)
        cpu = torch.device("cpu")
        state[name] = {k: t.to(cpu if f"{name}|{k}" in on_host else parameter.device) for k, t in found.items()}
    for label, number in saved.meta.get("numbers", {}).items():
        name, _, key = label.rpartition("|")
        state[name][key] = number
    for name, parameter in named.items():
        if state[name]:
            optimizer.state[parameter] = state[name]


def named_parameters(optimizer: Optimizer) -> dict[str, nn.Parameter]:
    """Parameters by the `names` that `build_optimizer` keeps in each group."""
    return {
        name: parameter
        for group in optimizer.param_groups
        for name, parameter in zip(group["names"], group["params"], strict=True)
    }


def refuse_other_state(kind: str, here: Mapping[str, list[int]], saved: OptimizerState, where: str) -> None:
    """Raise CheckpointError unless ``saved`` is of an optimizer of this ``kind`` and of parameters of these shapes."""
    if saved.meta.get("optimizer") != kind:
        raise CheckpointError(
            f"{where} holds the state of {saved.meta.get('optimizer')!r}, this run uses {kind!r}. "
            "Set train.optim back, or start a new run in another output.dir."
        )
    shapes: dict[str, list[int]] = saved.meta.get("parameters", {})
    missing = [name for name in here if name not in shapes]
    foreign = [name for name in shapes if name not in here]
    other = [name for name in here if name in shapes and here[name] != shapes[name]]
    if not (missing or foreign or other):
        return
    lines = [f"{where} is of other parameters ({len(shapes)} saved, {len(here)} in this run):"]
    lines += [f"  not in the file: {name}" for name in missing[:3]]
    lines += [f"  not in this run: {name}" for name in foreign[:3]]
    lines += [f"  {name}: shape {shapes[name]} saved, {here[name]} in this run" for name in other[:3]]
    raise CheckpointError("\n".join([*lines, "Set the lora section back to what it was, or start a new run."]))


# ---- state of sharded parameters -------------------------------------------------------------------------------------


def on_blocks(parameter: DTensor) -> bool:
    """Whether every rank's shard begins on a block of the whole flattened tensor."""
    dim, _, _ = span(parameter)
    step = -(parameter.shape[0] // -parameter.device_mesh.size())
    return dim == 0 and step * math.prod(parameter.shape[1:]) % BLOCK == 0


def whole_state(parameter: nn.Parameter, state: Tensors, device: torch.device) -> Tensors:
    """Every tensor of one parameter's state whole, on the host. All ranks call it; all get the result."""
    if not isinstance(parameter, DTensor):
        return {key: tensor.to("cpu", copy=True) for key, tensor in state.items()}
    if "absmax1" in state and not on_blocks(parameter):
        wide = {which: _decode(state, which) for which in _MAPS}
        state = {key: tensor for key, tensor in state.items() if key[:-1] not in ("state", "absmax")}
        for which, part in wide.items():
            full = whole(like(parameter, part.to(device)), device)
            state.update(_encode(full, which))
        return {key: tensor.cpu() for key, tensor in state.items()}
    found: Tensors = {}
    for key, tensor in state.items():
        if key in _LOCAL:
            tensor = whole(like(parameter, tensor.to(device)), device)
        elif key.startswith("absmax"):
            tensor = torch.cat(gather_parts(tensor, device))
        else:
            tensor = whole(tensor, device)
        found[key] = tensor.to("cpu", copy=True)
    return found


def part_of_state(parameter: nn.Parameter, full: Tensors) -> Tensors:
    """What this rank keeps of whole tensors: DTensors of AdamW's moments, plain tensors of AdamW8bit's."""
    if not isinstance(parameter, DTensor):
        return full
    found: Tensors = {}
    if "absmax1" in full and not on_blocks(parameter):
        for which in _MAPS:
            part = cut(parameter, _decode(full, which)).contiguous()
            found.update(_encode(part, which))
        return {**{key: tensor for key, tensor in full.items() if key not in found}, **found}
    for key, tensor in full.items():
        if key.startswith("absmax"):
            _, start, length = span(parameter)
            row = math.prod(parameter.shape[1:])
            first, count = start * row // BLOCK, -(length * row // -BLOCK)
            found[key] = tensor[first : first + count].clone()
        elif tensor.shape != parameter.shape:
            found[key] = tensor
        else:
            part = cut(parameter, tensor).contiguous().clone()
            found[key] = part if key in _LOCAL else like(parameter, part.to(parameter.device))
    return found


def _decode(state: Tensors, which: str) -> Tensor:
    """float32 values of one moment, in the shape of its codes."""
    codes, absmax = state[f"state{which}"], state[f"absmax{which}"]
    if not codes.numel():
        return codes.float()
    table = torch.tensor(_MAPS[which], dtype=torch.float32, device=codes.device)
    flat = torch.ops.bitsandbytes.dequantize_blockwise(codes.reshape(-1), absmax, table, BLOCK, torch.float32)
    values: Tensor = flat.view(codes.shape)
    return values


def _encode(values: Tensor, which: str) -> Tensors:
    if not values.numel():
        return {f"state{which}": values.to(torch.uint8), f"absmax{which}": values.new_zeros(0)}
    table = torch.tensor(_MAPS[which], dtype=torch.float32, device=values.device)
    codes, absmax = torch.ops.bitsandbytes.quantize_blockwise(values.contiguous().reshape(-1), table, BLOCK)
    return {f"state{which}": codes.view(values.shape), f"absmax{which}": absmax}
