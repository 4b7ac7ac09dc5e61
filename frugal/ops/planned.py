"""Operations without memory: what the planner runs in place of kernels that only a GPU has, and loops cut short.

A plan for a GPU runs on fake tensors of torch's ``meta`` device (fake CUDA tensors need a CUDA build of torch), which
takes every branch that is not the CPU's. Its attention allocates what the chosen kernels allocate: outputs, log-sum-exp
and, in backward, what torch's own kernels hold for the heads of one call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from frugal.ops import flash_varlen
from frugal.ops.fake import is_fake
from frugal.ops.head_groups import head_ranges, key_heads_at_once

T = TypeVar("T")


@dataclass(frozen=True)
class PlannedDevice:
    """The kind of device that a plan is for."""

    kind: str
    """cpu or cuda."""
    capability: tuple[int, int] | None = None
    attention: str = "auto"
    """memory.attention of the configuration."""


_PLANNED: ContextVar[PlannedDevice | None] = ContextVar("frugal_planned_device", default=None)


_TARGETS: ContextVar[int | None] = ContextVar("frugal_planned_targets", default=None)


@contextmanager
def planning_for(device: PlannedDevice, *, targets: int | None = None) -> Iterator[None]:
    """Fake tensors inside stand for tensors of ``device``, and ``targets`` of a micro-batch's tokens are trained."""
    token, count = _PLANNED.set(device), _TARGETS.set(targets)
    try:
        yield
    finally:
        _PLANNED.reset(token)
        _TARGETS.reset(count)


def planned_targets(tokens: int) -> int:
    """How many of ``tokens`` are trained: all of them where the plan does not know."""
    known = _TARGETS.get()
    return tokens if known is None else max(1, min(known, tokens))


def planned_device() -> PlannedDevice | None:
    """The device that is planned for, inside `planning_for`."""
    return _PLANNED.get()


def stands_for_cuda(tensor: Tensor) -> bool:
    """Whether a tensor is a fake one of a GPU that is planned for."""
    return tensor.device.type == "meta"


def sampled(pieces: Sequence[T], tensor: Tensor) -> Sequence[T]:
    """The pieces that a loop has to walk over: all of them, or for fake tensors the first two and the last.

    Only for loops whose pieces are alike and leave nothing behind: their peak is that of any one of them.
    """
    if len(pieces) <= 3 or not is_fake(tensor):
        return pieces
    return [pieces[0], pieces[1], pieces[-1]]


class _Attention(torch.autograd.Function):
    """Allocations of a kernel's forward and backward; ``own``: of frugal's packed kernel, else of torch's, which is
    given ``rows`` at a time (0: of flash-attn)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, own: bool, rows: int) -> Tensor:
        q, k, v = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k, v))
        batch, heads, tokens, size = q.shape
        out = q.new_empty(batch, tokens, heads, size).transpose(1, 2)
        lse = q.new_empty(batch, heads, tokens, dtype=torch.float32)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.own, ctx.rows = own, rows
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *outputs: Tensor) -> tuple[Tensor | None, ...]:
        (d_out,) = outputs
        q, k, v, _, lse = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        torch.empty_like(lse)  # sum(out * d_out) of each row
        dq, dk, dv = (t.new_empty(t.shape[0], t.shape[2], t.shape[1], t.shape[3]).transpose(1, 2) for t in (q, k, v))
        if ctx.own:
            return dq, dk, dv, None, None
        kv_heads, groups = k.shape[1], q.shape[1] // k.shape[1]
        if not ctx.rows:  # flash-attn's function, for all heads and rows
            workspace = [q.new_empty(q.shape, dtype=torch.float32), *(q.new_empty(q.shape) for _ in range(2))]
            del workspace
            return dq, dk, dv, None, None
        at_once = key_heads_at_once(ctx.rows, q.shape[2], groups, q.shape[3], q.element_size(), kv_heads)
        for lo, hi in sampled(head_ranges(kv_heads, at_once), q):
            _one_call(q[: ctx.rows, lo * groups : hi * groups], k[: ctx.rows, lo:hi])
        return dq, dk, dv, None, None


def _one_call(q: Tensor, k: Tensor) -> None:
    """What torch's flash kernel and its caller allocate in backward for some key heads (`frugal.ops.sdpa`)."""
    parts = [torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)]
    copies = [q.new_empty(q.shape) for _ in range(2)]  # out and its gradient, token by token
    accumulated = q.new_empty(q.shape, dtype=torch.float32)  # dq over blocks of keys
    if q.shape[1] > k.shape[1]:  # dk and dv of every query head, summed over those that share a key head
        parts += [q.new_empty(q.shape) for _ in range(2)]
    del parts, copies, accumulated


def planned_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Any = None,
    window: int | None = None,
    softcap: float | None = None,
    **ignored: Any,
) -> Tensor:
    """Attention's allocations on the GPU that is planned for; arguments as in `frugal.ops.attention`.

    The rules are those of the table of operations: torch's kernels below compute capability 8.0 and for one document
    without window or cap, frugal's packed kernel otherwise.
    """
    device = planned_device()
    old = device is not None and device.capability is not None and device.capability < (8, 0)
    documents = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    windowed = window is not None and window < q.shape[2]
    asked = "auto" if device is None else device.attention
    own = not old and (documents > 1 or windowed or softcap is not None)
    if asked != "auto":
        own = asked == "triton"
    rows = 1 if documents > q.shape[0] else q.shape[0]
    if asked == "flash_attn" or (asked == "auto" and own and flash_varlen.load()[0] is not None):
        own, rows = False, 0
    out: Tensor = _Attention.apply(q, k, v, own, rows)
    return out
