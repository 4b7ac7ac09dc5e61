"""The gated MLP of today's decoders, tiled over tokens: down(act(gate(x)) * up(x)), keeping x alone.

A tile's [tile, intermediate_size] tensors exist one tile at a time, in forward and in backward, so the peak does not
depend on the sequence but for x, y and their gradients. Backward computes gate and up again (never down: nobody needs
its output there) and sums the adapters' gradients over tiles. Inside a recomputed layer whose output nobody reads, the
forward is skipped altogether (`frugal.ops.recompute`), so every product is computed as often as it has to be.
"""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops import recompute
from frugal.ops.projection import (
    N_TENSORS,
    LoraMatmul,
    Projection,
    ProjectionGrads,
    projection_reference,
    under_autocast,
)
from frugal.ops.registry import implements, resolve
from frugal.ops.simulated import sampled

Activation = Literal["silu", "gelu", "gelu_tanh"]
# Of a tile's four [tile, intermediate_size] buffers. On a GPU every tile dequantises the weights again, which more than
# a thousand tokens make up for; on a CPU a tile of 1024 x 1536 ran 4 % faster than two of half the size.
TILE_BYTES = 128 * 2**20
CPU_TILE_BYTES = 32 * 2**20
MIN_TILE_TOKENS = 64


def _kernels() -> Any:
    """The Triton form's module, imported where that row was chosen."""
    return importlib.import_module("frugal.ops.gated_mlp.triton")


def _activate(g: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(g)
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activation_grad_(d: Tensor, g: Tensor, activation: Activation) -> None:
    """g becomes d * act'(g), in place: g is not needed afterwards."""
    if activation == "silu":
        torch.ops.aten.silu_backward.grad_input(d, g, grad_input=g)
        return
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    torch.ops.aten.gelu_backward.grad_input(d, g, approximate=approximate, grad_input=g)


def gated_mlp_reference(
    x: Tensor, gate_up: tuple[Projection, ...], down: Projection, *, activation: Activation = "silu"
) -> Tensor:
    """The definition. Arguments as in `gated_mlp`."""
    halves = torch.cat([projection_reference(x, p) for p in gate_up], dim=-1)
    g, u = halves.chunk(2, dim=-1)
    return projection_reference(_activate(g, activation) * u, down)


def most_tile_tokens(intermediate_size: int, itemsize: int, *, on_cpu: bool) -> int:
    """Tokens of a tile whose buffers reach the device's bound."""
    bound = CPU_TILE_BYTES if on_cpu else TILE_BYTES
    return max(MIN_TILE_TOKENS, bound // (4 * intermediate_size * itemsize))


def tile_tokens_for(tokens: int, intermediate_size: int, itemsize: int, *, on_cpu: bool) -> int:
    """Tokens of a tile so that its buffers stay within the device's bound; tiles are evened out over the tokens."""
    most = most_tile_tokens(intermediate_size, itemsize, on_cpu=on_cpu)
    n_tiles = max(1, -(tokens // -most))
    return max(1, -(tokens // -n_tiles))


class _GatedMlp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, projections: tuple[Projection, ...], activation: Activation, tile: int,
                skip: bool, fused: bool, *tensors: Tensor | None) -> Tensor:  # fmt: skip
        ctx.projections = tuple(p.frozen() for p in projections)
        ctx.activation, ctx.tile, ctx.fused = activation, tile, fused
        ctx.save_for_backward(x, *tensors)
        tokens, down = x.shape[0], projections[-1]
        y = x.new_empty(tokens, down.out_features)
        if skip:
            return y
        runs = [LoraMatmul(p, x.dtype, x.device, tokens) for p in projections]
        buffer = x.new_empty(min(tile, tokens), 2 * down.in_features)
        for lo in sampled(range(0, tokens, tile), x):
            hi = min(lo + tile, tokens)
            gu = _gate_and_up(x[lo:hi], runs[:-1], buffer[: hi - lo])
            g, u = gu[:, : down.in_features], gu[:, down.in_features :]
            h = _kernels().gated(g, u, u, activation) if fused else _activate(g, activation).mul_(u)
            runs[-1].forward(h, y[lo:hi])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        (dy,) = outputs
        x, *tensors = ctx.saved_tensors
        projections = tuple(
            p.rebuilt(tuple(tensors[i * N_TENSORS : (i + 1) * N_TENSORS])) for i, p in enumerate(ctx.projections)
        )
        needs = ctx.needs_input_grad[6:]
        grads = [
            ProjectionGrads.zeros(p, needs[i * N_TENSORS : (i + 1) * N_TENSORS]) for i, p in enumerate(projections)
        ]
        dy = dy.contiguous()
        tokens, size, tile = x.shape[0], projections[-1].in_features, ctx.tile
        runs = [LoraMatmul(p, x.dtype, x.device, tokens) for p in projections]
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        below = dx is not None or any(g.wants_input or g.bias is not None for g in grads[:-1])
        buffer = x.new_empty(min(tile, tokens), 2 * size)
        for lo in sampled(range(0, tokens, tile), x):
            hi = min(lo + tile, tokens)
            gu = _gate_and_up(x[lo:hi], runs[:-1], buffer[: hi - lo])
            g, u = gu[:, :size], gu[:, size:]
            h = g.new_empty(g.shape)
            if not ctx.fused:
                a = _activate(g, ctx.activation)
            if grads[-1].wants_input:
                h = _kernels().gated(g, u, h, ctx.activation) if ctx.fused else torch.mul(a, u, out=h)
            du = runs[-1].own_grads(h if grads[-1].wants_input else None, dy[lo:hi], grads[-1])
            if not below:
                continue
            dh = runs[-1].input_grad(dy[lo:hi], h, True, du=du)
            if ctx.fused:
                _kernels().gated_backward_(dh, g, u, ctx.activation)
            else:
                a.mul_(dh)  # the gradient of up's output
                _activation_grad_(dh.mul_(u), g, ctx.activation)
                u.copy_(a)
                del a
            del h, dh
            row = 0
            for run, grad in zip(runs[:-1], grads[:-1], strict=True):
                d_out = gu[:, row : row + run.p.out_features]
                du = run.own_grads(x[lo:hi], d_out, grad)
                if dx is not None:
                    run.input_grad(d_out, dx[lo:hi], row == 0, du=du)
                row += run.p.out_features
        found = [g for p, grad in zip(projections, grads, strict=True) for g in grad.like(p)]
        return (dx, None, None, None, None, None, *found)


def _gate_and_up(x: Tensor, runs: list[LoraMatmul], out: Tensor) -> Tensor:
    """out [tile, 2 * intermediate_size]: gate's half, then up's, whether they are one projection or two."""
    row = 0
    for run in runs:
        run.forward(x, out[:, row : row + run.p.out_features])
        row += run.p.out_features
    return out


def gated_mlp(
    x: Tensor,
    gate_up: tuple[Projection, ...],
    down: Projection,
    *,
    activation: Activation = "silu",
    tile_tokens: int | None = None,
    implementation: str | None = None,
) -> Tensor:
    """down(act(gate(x)) * up(x)) for x [..., hidden_size].

    ``gate_up`` is (gate, up), each [intermediate_size, hidden_size], or one projection [2 * intermediate_size,
    hidden_size] with gate's rows first (Phi-3's layout). ``tile_tokens`` bounds a tile; unset, its buffers take at
    most 128 MiB (32 on a CPU). Adapter dropout is not done here: use `lora_linear` three times. Raises ``ValueError``
    for sizes that do not fit.
    """
    size = down.in_features
    if sum(p.out_features for p in gate_up) != 2 * size or any(p.in_features != x.shape[-1] for p in gate_up):
        raise ValueError(f"gate and up must map {x.shape[-1]} features to 2 x {size} together, got "
                         f"{[(p.out_features, p.in_features) for p in gate_up]}")  # fmt: skip
    x, quiet = under_autocast(x)
    flat = x.reshape(-1, x.shape[-1])
    if tile_tokens is None:
        tile_tokens = tile_tokens_for(flat.shape[0], size, x.dtype.itemsize, on_cpu=x.device.type == "cpu")
    projections = (*gate_up, down)
    ticket = recompute.ticket()
    run, _ = resolve("gated_mlp", flat, implementation)
    with quiet:
        y: Tensor = run(flat, projections, activation, max(1, tile_tokens), ticket is not None and ticket.skip)
    if ticket is not None:
        ticket.done(y)
    return y.view(*x.shape[:-1], down.out_features)


def _apply(
    x: Tensor, projections: tuple[Projection, ...], activation: Activation, tile: int, skip: bool, *, fused: bool
) -> Tensor:
    tensors = (t for p in projections for t in p.tensors())
    y: Tensor = _GatedMlp.apply(x, projections, activation, tile, skip, fused, *tensors)
    return y


implements("gated_mlp", "triton")(partial(_apply, fused=True))
implements("gated_mlp", "torch")(partial(_apply, fused=False))
