"""A mixture of experts whose matrices may be stored in fewer bits: one expert decoded at a time, its input alone kept.

Tokens are sorted by expert; an expert's gate, up and down products run over its own tokens, in tiles, with LoRA as two
thin products (x A_e) B_e: neither the dense stack nor an update of it ever exists. Backward decodes each expert once
more and computes gate and up again; the down product is not made again, since <dL/dy, y> follows from the gradient of
its input. Adapters are flat, in the layout of PEFT's files, and so are their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.codecs.base import EncodedWeight
from frugal.ops import recompute
from frugal.ops.gated_mlp import tile_tokens_for
from frugal.ops.projection import (
    N_TENSORS,
    Lora,
    LoraMatmul,
    Projection,
    ProjectionGrads,
    projection_reference,
    under_autocast,
)
from frugal.ops.registry import implements, resolve
from frugal.ops.simulated import is_fake, sampled

Gate = Callable[[Tensor], Tensor]
"""[tokens, rows of gate_up] -> [tokens, columns of down]: clamps, interleaving and activation are the model's own."""


@dataclass(frozen=True)
class ExpertStack:
    """One projection of all experts."""

    weight: Tensor | EncodedWeight
    """[experts, out_features, in_features]; a dense one may be a transposed view."""
    bias: Tensor | None = None
    """[experts, out_features]."""
    lora: Lora | None = None
    """(A [experts * r, in_features], B [out_features, r * experts], scale). Row e * r + j of A and column
    j * experts + e of B belong to expert e: the layout of PEFT's ``target_parameters``."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(experts, out_features, in_features)."""
        experts, rows, columns = (int(size) for size in self.weight.shape)
        return experts, rows, columns

    def of(self, expert: int) -> Projection:
        """The projection of one expert: views."""
        weight = self.weight[expert] if isinstance(self.weight, Tensor) else self.weight.expert(expert)
        bias = None if self.bias is None else self.bias[expert]
        if self.lora is None:
            return Projection(weight, bias)
        a, b, scale = self.lora
        return Projection(weight, bias, (*self._factors(expert, a, b), scale))

    def _factors(self, expert: int, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        experts = self.shape[0]
        rank = a.shape[0] // experts
        return a[expert * rank : (expert + 1) * rank], b[:, expert::experts]

    def whole(self) -> Projection:
        """The stack seen as one projection: which tensors autograd follows, and buffers of their shapes."""
        return Projection(self.weight, self.bias, self.lora)

    def grads_of(self, expert: int, grads: ProjectionGrads) -> ProjectionGrads:
        """The part of the stack's gradients that belongs to one expert: views."""

        def part(total: Tensor | None) -> Tensor | None:
            return None if total is None else total[expert]

        a = b = None
        if self.lora is not None:
            like_a, like_b, _ = self.lora
            a, b = self._factors(expert, like_a if grads.a is None else grads.a, like_b if grads.b is None else grads.b)
        return ProjectionGrads(
            part(grads.weight),
            part(grads.bias),
            None if grads.a is None else a,
            None if grads.b is None else b,
        )


@dataclass(frozen=True)
class _Call:
    """What one call works on beside the tensors that autograd follows."""

    stacks: tuple[ExpertStack, ExpertStack]
    """gate_up and down; without those tensors where it is kept for backward."""
    gate: Gate
    counts: list[int]
    """Pairs (token, expert) of each expert."""
    k: int
    tile: int
    dropout: float
    seed: int
    skip: bool

    def with_tensors(self, tensors: tuple[Tensor | None, ...]) -> _Call:
        """Over what autograd handed back."""
        stacks = []
        for i, stack in enumerate(self.stacks):
            p = stack.whole().rebuilt(tensors[i * N_TENSORS : (i + 1) * N_TENSORS])
            stacks.append(ExpertStack(p.weight, p.bias, p.lora))  # type: ignore[arg-type]
        return replace(self, stacks=(stacks[0], stacks[1]))

    def frozen(self) -> _Call:
        """What may be kept outside of autograd."""
        ps = [stack.whole().frozen() for stack in self.stacks]
        gate_up, down = (ExpertStack(p.weight, None, p.lora) for p in ps)  # type: ignore[arg-type]
        return replace(self, stacks=(gate_up, down))

    def tiles(self, x: Tensor) -> Iterator[tuple[int, list[LoraMatmul], int, int]]:
        """(expert, its two projections at work, first pair, last pair + 1); an expert's matrices go after its last."""
        found, start = [], 0
        for expert, n in enumerate(self.counts):
            found += [(expert, n, lo, min(lo + self.tile, start + n)) for lo in range(start, start + n, self.tile)]
            start += n
        now, runs = -1, list[LoraMatmul]()
        for expert, n, lo, hi in sampled(found, x):
            if expert != now:
                runs.clear()  # before the next is decoded
                dropped = bool(self.dropout)
                runs = [LoraMatmul(s.of(expert), x.dtype, x.device, n, dropped=dropped) for s in self.stacks]
                now = expert
            yield expert, runs, lo, hi

    def keep(self, like: Tensor, lo: int, side: int) -> Tensor | None:
        """The scaled dropout mask of an adapter's input: drawn again, the same, in backward."""
        if not self.dropout or self.stacks[side].lora is None:
            return None
        if is_fake(like):
            return torch.empty_like(like)
        generator = torch.Generator(like.device).manual_seed(self.seed + 2 * lo + side)
        noise = torch.rand(like.shape, generator=generator, device=like.device)
        return (noise >= self.dropout).to(like.dtype).div_(1 - self.dropout)


class _Experts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, order: Tensor, call: _Call, *tensors: Tensor | None) -> Tensor:
        ctx.call = call.frozen()
        ctx.save_for_backward(x, weights, order, *tensors)
        if call.skip:
            return torch.empty_like(x)
        y = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32))  # summed wide, rounded once
        flat = weights.reshape(-1)
        for _, (gate_up, down), lo, hi in call.tiles(x):
            pairs = order[lo:hi]
            token = pairs // call.k
            part = x[token]
            keep = call.keep(part, lo, 0)
            wide = part.new_empty(hi - lo, gate_up.p.out_features)
            h = call.gate(gate_up.forward(part, wide, None if keep is None else part * keep)).to(x.dtype)
            del wide
            keep = call.keep(h, lo, 1)
            out = down.forward(h, torch.empty_like(part), None if keep is None else h * keep)
            y.index_add_(0, token, (out * flat[pairs, None]).to(y.dtype))  # a token is there once: no race on a GPU
        return y.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Any, ...]:
        x, weights, order, *tensors = ctx.saved_tensors
        call: _Call = ctx.call.with_tensors(tuple(tensors))
        dy, flat = outputs[0].contiguous(), weights.reshape(-1)
        needs = ctx.needs_input_grad[4:]
        wholes = [stack.whole() for stack in call.stacks]
        grads = [ProjectionGrads.zeros(p, needs[i * N_TENSORS : (i + 1) * N_TENSORS]) for i, p in enumerate(wholes)]
        dx = torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(flat) if ctx.needs_input_grad[1] else None
        below = dx is not None or grads[0].wants_input or grads[0].bias is not None
        for expert, (gate_up, down), lo, hi in call.tiles(x):
            own = [stack.grads_of(expert, grad) for stack, grad in zip(call.stacks, grads, strict=True)]
            pairs = order[lo:hi]
            token = pairs // call.k
            part, g = x[token], dy[token]
            keep = call.keep(part, lo, 0)
            dropped = None if keep is None else part * keep
            wide = gate_up.forward(part, part.new_empty(hi - lo, gate_up.p.out_features), dropped)
            with torch.enable_grad():
                h = call.gate(wide.requires_grad_())
            hidden = h.detach().to(x.dtype)
            keep_h = call.keep(hidden, lo, 1)
            weighted = (g * flat[pairs, None]).to(g.dtype)
            down.own_grads(hidden, weighted, own[1], None if keep_h is None else hidden * keep_h)
            dh = None
            if dw is not None or below:
                dh = down.input_grad(g, torch.empty_like(hidden), True, keep_h)
            if dw is not None and dh is not None:
                dw[pairs] = _routing_grad(dh, hidden, g, down.p.bias).to(dw.dtype)
            del hidden, keep_h, weighted, g
            if not below or dh is None:
                continue
            (d_wide,) = torch.autograd.grad(h, wide, (dh * flat[pairs, None]).to(h.dtype))
            del h, wide, dh
            gate_up.own_grads(part, d_wide, own[0], dropped)
            if dx is not None:
                dx.index_add_(0, token, gate_up.input_grad(d_wide, torch.empty_like(part), True, keep).to(dx.dtype))
        found = [g for p, grad in zip(wholes, grads, strict=True) for g in grad.like(p)]
        return (
            None if dx is None else dx.to(x.dtype),
            None if dw is None else dw.view(weights.shape),
            None,
            None,
            *found,
        )


def _routing_grad(dh: Tensor, h: Tensor, g: Tensor, bias: Tensor | None) -> Tensor:
    """<g, y> of each pair, y = down(h) + bias, from dh = g down: y itself is not made again."""
    wide = torch.promote_types(h.dtype, torch.float32)
    total = (dh.to(wide) * h.to(wide)).sum(-1)
    return total if bias is None else total + g.to(wide) @ bias.to(wide)


def _sorted(index: Tensor, experts: int) -> tuple[Tensor, list[int]]:
    """Pairs (token, choice) in the order of their experts, tokens in order within one; how many each expert has.

    Ids from ``experts`` on are padding: they come last and belong to nobody. One wait for the device: sizes of
    products are the host's to know. Without numbers a few experts have all tokens, which takes the largest tiles: a
    plan must not be too small.
    """
    flat = index.reshape(-1)
    if is_fake(flat):
        tokens, k = index.shape
        return torch.empty_like(flat), [tokens if expert < k else 0 for expert in range(experts)]
    order = torch.sort(flat, stable=True)[1]
    return order, torch.bincount(flat, minlength=experts)[:experts].tolist()


def experts_reference(
    x: Tensor, index: Tensor, weights: Tensor, gate_up: ExpertStack, down: ExpertStack, gate: Gate
) -> Tensor:
    """The definition. Arguments as in `experts`, x [tokens, features]."""
    y = torch.zeros_like(x)
    for expert in range(gate_up.shape[0]):
        token, choice = torch.where(index == expert)
        h = gate(projection_reference(x[token], gate_up.of(expert)))
        out = projection_reference(h, down.of(expert)) * weights[token, choice, None]
        y = y.index_add(0, token, out.to(y.dtype))
    return y


def experts(
    x: Tensor,
    index: Tensor,
    weights: Tensor,
    gate_up: ExpertStack,
    down: ExpertStack,
    gate: Gate,
    *,
    dropout: float = 0.0,
    tile_tokens: int | None = None,
    implementation: str | None = None,
) -> Tensor:
    """Sum over each token's choices of weight * down_e(gate(gate_up_e(x))), x [..., features] and like it.

    ``index`` and ``weights`` are [tokens, choices]; an id that is no expert's is padding. ``dropout`` is the
    probability in force of the adapters' inputs, drawn for each token and expert. ``tile_tokens`` bounds a tile of one
    expert's tokens; unset, by size. Raises ``ValueError`` for sizes that do not fit.
    """
    count, _, features = gate_up.shape
    if down.shape[:2] != (count, features) or x.shape[-1] != features or index.shape != weights.shape:
        raise ValueError(
            f"experts: gate_up is {gate_up.shape}, down {down.shape}, x {tuple(x.shape)}, choices "
            f"{tuple(index.shape)} and weights {tuple(weights.shape)}: they do not fit"
        )
    x, quiet = under_autocast(x)
    flat = x.reshape(-1, features)
    order, counts = _sorted(index, count)
    if tile_tokens is None:
        on_cpu = x.device.type == "cpu"
        tile_tokens = tile_tokens_for(max(1, *counts), down.shape[2], x.dtype.itemsize, on_cpu=on_cpu)
    # Drawn in every pass, skipped ones too: what comes after sees the generator in the same state.
    seed = int(torch.randint(1 << 40, (), device="cpu")) if dropout else 0
    ticket = recompute.ticket()
    skip = ticket is not None and ticket.skip
    call = _Call((gate_up, down), gate, counts, index.shape[-1], max(1, tile_tokens), dropout, seed, skip)
    run, _ = resolve("experts", flat, implementation)
    with quiet:
        y: Tensor = run(flat, weights, order, call)
    if ticket is not None:
        ticket.done(y)
    return y.view(x.shape)


@implements("experts", "torch")
def _by_torch(x: Tensor, weights: Tensor, order: Tensor, call: _Call) -> Tensor:
    tensors = (tensor for stack in call.stacks for tensor in stack.whole().tensors())
    y: Tensor = _Experts.apply(x, weights, order, call, *tensors)
    return y
