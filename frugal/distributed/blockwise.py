"""Optimizer state of a sharded parameter: whole for the file, cut for this rank; 8-bit state in blocks of 256 included.

`AdamW8bit` works on this rank's shard alone and scales its state by blocks of 256 elements of that shard. Where shards
begin on whole blocks of the whole tensor (rows times columns of a part divisible by 256: all usual sizes) the blocks
are those of one process, and state is moved bit for bit. Where they do not, state is widened to float32, put together,
and coded again in the other blocks: a rounding of 8-bit state, once at that save or load.
"""

from __future__ import annotations

import math

import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from frugal.distributed.optimizer_state import Tensors
from frugal.distributed.tensors import cut, gather_parts, like, span, whole

BLOCK = 256
_MAPS = {"1": create_dynamic_map(signed=True).tolist(), "2": create_dynamic_map(signed=False).tolist()}
_LOCAL = ("state1", "state2")  # AdamW8bit's moments: plain tensors of the shard's shape


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
