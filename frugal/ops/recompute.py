"""What an operation may know about the activation checkpoint around it, so that nothing is computed twice for nothing.

A checkpointed layer runs twice. In the *first* pass gradients are off and an operation should keep nothing. In the
*recompute* pass, inside backward, gradients are on and the layer's graph is built; what its last operation returns is
then often needed by nobody: it is only added to the residual stream, and the sum is the layer's output, which the next
layers have long used. An operation that is expensive takes part like this::

    ticket = recompute.ticket()                     # None unless this is a recompute pass
    y = GatedMlp.apply(x, ..., ticket is not None and ticket.skip)   # skip: return x.new_empty(shape), save as usual
    if ticket is not None:
        ticket.done(y)

Nothing is assumed about the layer: the first recompute of each layer computes everything and then reads the autograd
graph. An output may be skipped only where every node between it and the layer's output keeps no tensor (sums, views,
casts, products with a number). Later passes that skipped read the graph again, and one that no longer allows it is
repeated in full (`frugal.memory.checkpointing`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

PassKind = Literal["first", "recompute"]

_local = threading.local()  # backward of a CUDA device runs in a thread of its own


class Ticket:
    """One call of a participating operation in a recompute pass."""

    __slots__ = ("_pass", "index", "skip")

    def __init__(self, owner: Pass, index: int) -> None:
        self._pass, self.index = owner, index
        self.skip = index in owner.skippable
        """True: nobody reads the values of the output; return uninitialised memory of the right shape."""

    def done(self, output: torch.Tensor) -> None:
        """Tell which autograd node made the output."""
        self._pass.made[self.index] = output.grad_fn


class Pass:
    """One pass over one checkpointed layer."""

    def __init__(self, kind: PassKind, skippable: frozenset[int] = frozenset()) -> None:
        self.kind = kind
        self.skippable = skippable
        self.calls = 0
        self.made: dict[int, Any] = {}
        """Call number -> autograd node of its output."""

    def not_needed(self, outputs: list[torch.Tensor]) -> frozenset[int]:
        """Calls whose output values nobody reads, given the pass's outputs with their graphs."""
        return frozenset(
            index
            for index, node in self.made.items()
            if node is not None and all(_only_passed_on(out.grad_fn, node) for out in outputs)
        )


def current() -> Pass | None:
    """The pass that runs in this thread; None outside checkpointed layers."""
    found: Pass | None = getattr(_local, "current", None)
    return found


def ticket() -> Ticket | None:
    """Register a call of a participating operation: a ticket in a recompute pass, else None."""
    found = current()
    if found is None or found.kind != "recompute" or not torch.is_grad_enabled():
        return None
    found.calls += 1
    return Ticket(found, found.calls - 1)


@contextmanager
def running(one: Pass | None) -> Iterator[None]:
    """Make ``one`` the current pass of this thread."""
    before = current()
    _local.current = one
    try:
        yield
    finally:
        _local.current = before


_KEEPS_NOTHING = (
    "AddBackward0", "SubBackward0", "NegBackward0", "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0",
    "TBackward0", "TransposeBackward0", "PermuteBackward0", "SqueezeBackward0", "SqueezeBackward1", "SqueezeBackward2",
    "UnsqueezeBackward0", "ExpandBackward0", "SliceBackward0", "SelectBackward0", "SplitBackward0", "CloneBackward0",
    "ToCopyBackward0", "NativeDropoutBackward0", "AliasBackward0", "DetachBackward0", "ContiguousBackward0",
)  # fmt: skip


def _keeps_no_value(node: Any) -> bool:
    """True for a node whose backward needs no value of its input or output (dropout keeps its mask, not its input)."""
    name = node.name()
    if name in ("MulBackward0", "DivBackward0"):  # times a number: the other factor is saved, and it is a scalar
        saved = (getattr(node, "_saved_self", None), getattr(node, "_saved_other", None))
        return all(not isinstance(value, torch.Tensor) or value.dim() == 0 for value in saved)
    return name in _KEEPS_NOTHING


def _only_passed_on(start: Any, target: Any) -> bool:
    """Whether every path from ``start`` down to ``target`` runs over nodes that keep no value."""
    reaches: dict[Any, bool] = {target: True}
    stack = [start]
    while stack:
        node = stack[-1]
        if node is None or node in reaches:
            stack.pop()
            continue
        below = [n for n, _ in node.next_functions if n is not None]
        if open_ := [n for n in below if n not in reaches]:
            stack.extend(open_)
            continue
        reaches[node] = any(reaches[n] for n in below)
        if reaches[node] and not _keeps_no_value(node):
            return False
        stack.pop()
    return True
