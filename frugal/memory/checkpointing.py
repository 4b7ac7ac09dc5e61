"""Activation checkpointing of decoder layers: of each layer only its input is kept, and backward runs the layer again.

It attaches to transformers' own switch (`GradientCheckpointingLayer`), on the instances of one model; no class is
changed and no parameter is renamed. Unlike reentrant checkpointing it needs no input that requires grad: a layer's
trainable parameters are inputs of its autograd node, so frozen embeddings are no special case, gradients of parameters
arrive once, and DDP, FSDP2 and hooks after accumulation see an ordinary graph. Unlike saved-tensor hooks the first pass
builds no graph at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from transformers.modeling_layers import GradientCheckpointingLayer

from frugal.errors import UnsupportedError
from frugal.memory.offload import DiskStore, HostStore, Slot, Store
from frugal.model_structure import decoder_layers, engine_hooks
from frugal.ops import recompute

Policy = Literal["none", "recompute", "offload", "disk", "auto"]

_CACHES = ("cache", "past_key_values", "layer_past", "past_key_value")


def apply_activation_checkpointing(
    model: nn.Module, policy: Policy, *, scratch_dir: Path | str | None = None
) -> CheckpointHandle:
    """Checkpoint every decoder layer of ``model`` (a transformers model or a wrapper of one) while it is training.

    ``recompute`` keeps a layer's input [batch, tokens, hidden] where it is, ``offload`` in host memory, ``disk`` in a
    scratch file in ``scratch_dir``; the last layer's input stays, since backward wants it at once. ``auto`` is
    ``recompute`` until the planner decides. Results are those of ``none``, bit for bit, dropout included. Returns a
    handle whose ``close`` undoes everything. Raises UnsupportedError for a model without layers of transformers' kind.
    """
    chosen: Policy = "recompute" if policy == "auto" else policy
    handle = CheckpointHandle(chosen)
    if chosen == "none":
        return handle
    layers = decoder_layers(model)
    if not layers:
        raise UnsupportedError(
            f"memory.checkpoint: {policy} needs decoder layers derived from transformers' GradientCheckpointingLayer, "
            f"and {type(model).__name__} has none. Set memory.checkpoint: none."
        )
    _refuse_hooked_parameters(layers)
    if chosen == "offload":
        handle.store = HostStore()
    elif chosen == "disk":
        handle.store = DiskStore(scratch_dir)
    for index, (name, layer) in enumerate(layers.items()):
        store = handle.store if index < len(layers) - 1 else None
        checkpoint = LayerCheckpoint(name, layer, store)
        if engine_hooks(layer) is not None:
            handle.attach_inside(layer, checkpoint)
        else:
            handle.attach(layer, checkpoint)
    # Models look at their own flag to leave the key/value cache off.
    for module in model.modules():
        if hasattr(module, "gradient_checkpointing") and not isinstance(module, GradientCheckpointingLayer):
            handle.attach(module, _not_a_layer)
    handle.layers = list(layers)
    return handle


def _refuse_hooked_parameters(layers: dict[str, nn.Module]) -> None:
    for name, layer in layers.items():
        for key, parameter in layer.named_parameters():
            if parameter.requires_grad and parameter._backward_hooks:
                raise UnsupportedError(
                    f"{name}.{key} has a gradient hook (Tensor.register_hook), which would run twice under activation "
                    "checkpointing. Use register_post_accumulate_grad_hook, or memory.checkpoint: none."
                )


def _not_a_layer(function: Callable[..., Any], *args: Any) -> Any:
    raise UnsupportedError("this model checkpoints parts that are no decoder layers: set memory.checkpoint: none")


@dataclass
class CheckpointHandle:
    """What was attached to a model. ``close`` puts the model back as it was and gives scratch space back."""

    policy: Policy
    layers: list[str] = field(default_factory=list)
    """Names of the checkpointed layers."""
    store: Store | None = None
    _attached: list[tuple[nn.Module, dict[str, Any]]] = field(default_factory=list)

    def attach(self, module: nn.Module, function: Callable[..., Any]) -> None:
        """Set transformers' switch on one instance."""
        before = {k: vars(module)[k] for k in ("gradient_checkpointing", _FUNC) if k in vars(module)}
        self._attached.append((module, before))
        vars(module).update({"gradient_checkpointing": True, _FUNC: function})

    def attach_inside(self, layer: nn.Module, checkpoint: LayerCheckpoint) -> None:
        """Checkpoint a layer inside its own hooks: those of an engine run once in forward and once in backward.

        They gather the layer's parameters, and reduce its gradients when the layer's backward pass is over. Inside the
        recomputation they would reduce gradients that are not there yet.
        """
        self._attached.append((layer, {"forward": vars(layer)["forward"]} if "forward" in vars(layer) else {}))
        plain = layer.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            return checkpoint(partial(plain, **kwargs), *args) if layer.training else plain(*args, **kwargs)

        vars(layer)["forward"] = forward

    def close(self) -> None:
        """Undo everything; safe to call twice."""
        for module, before in self._attached:
            for key in ("gradient_checkpointing", _FUNC, "forward"):
                vars(module).pop(key, None)
            vars(module).update(before)
        self._attached.clear()
        if self.store is not None:
            self.store.close()
            self.store = None


_FUNC = "_gradient_checkpointing_func"


class LayerCheckpoint:
    """What transformers calls instead of one layer's forward."""

    def __init__(self, name: str, layer: nn.Module, store: Store | None) -> None:
        self.name, self.layer, self.store = name, layer, store
        self.skippable: frozenset[int] | None = None
        """Calls of participating operations whose output the recompute need not have; None until it ran once."""
        self.full_recomputes = 0
        """Recomputes that had to be repeated in full because the layer's graph had changed."""

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        # transformers hands over partial(forward, layer, **kwargs)
        kwargs = dict(getattr(function, "keywords", {}))
        kwargs.update({key: None for key in _CACHES if kwargs.get(key) is not None})  # recompute would append twice
        inner = getattr(function, "func", function)
        args = (*getattr(function, "args", ()), *args)
        flat, spec = tree_flatten((args, kwargs))
        places = [i for i, value in enumerate(flat) if isinstance(value, torch.Tensor)]
        tensors = [flat[i] for i in places]
        parameters = [p for p in self.layer.parameters() if p.requires_grad]
        if not parameters and not any(t.requires_grad for t in tensors):
            with torch.no_grad():
                return inner(*args, **kwargs)
        call = _Call(self, inner, [None if i in places else v for i, v in enumerate(flat)], spec, places)
        outputs = _Recompute.apply(call, len(tensors), *tensors, *parameters)
        return call.unflatten_output(outputs)


@dataclass
class _Call:
    """One run of one layer, from its forward to its backward."""

    owner: LayerCheckpoint
    function: Callable[..., Any]
    flat: list[Any]
    """Arguments with None in the places of tensors."""
    spec: TreeSpec
    places: list[int]
    slot: Slot | None = None
    stored: int = -1
    """Which of the tensors went to the slot."""
    needs_grad: list[bool] = field(default_factory=list)
    surroundings: _Surroundings | None = None
    output_flat: list[Any] = field(default_factory=list)
    output_spec: TreeSpec | None = None
    output_places: list[int] = field(default_factory=list)

    def run(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the layer; returns the tensors among its outputs."""
        flat = list(self.flat)
        for place, tensor in zip(self.places, tensors, strict=True):
            flat[place] = tensor
        args, kwargs = tree_unflatten(flat, self.spec)
        flat_out, spec_out = tree_flatten(self.function(*args, **kwargs))
        places = [i for i, value in enumerate(flat_out) if isinstance(value, torch.Tensor)]
        if self.output_spec is None:
            self.output_spec, self.output_places = spec_out, places
            self.output_flat = [None if i in places else value for i, value in enumerate(flat_out)]
        elif places != self.output_places:
            raise RuntimeError(f"{self.owner.name} returned other outputs when it was run again")
        return [flat_out[i] for i in places]

    def unflatten_output(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        flat = list(self.output_flat)
        for place, tensor in zip(self.output_places, outputs, strict=True):
            flat[place] = tensor
        if self.output_spec is None:
            raise RuntimeError("the layer has not run")
        return tree_unflatten(flat, self.output_spec)


class _Recompute(torch.autograd.Function):
    """A layer as one node: inputs are its tensor arguments and its trainable parameters."""

    @staticmethod
    def forward(ctx: Any, call: _Call, count: int, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        tensors = list(inputs[:count])
        ctx.call, ctx.count = call, count
        call.needs_grad = [t.requires_grad for t in tensors]
        call.surroundings = _Surroundings(tensors)
        with recompute.running(recompute.Pass("first")):
            outputs = call.run(tensors)
        kept: list[torch.Tensor | None] = list(tensors)
        if call.owner.store is not None and (index := _hidden(tensors)) is not None:
            call.slot, call.stored = call.owner.store.put(tensors[index]), index
            kept[index] = None
        ctx.save_for_backward(*kept, *inputs[count:])
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(o for o in outputs if not o.dtype.is_floating_point and not o.dtype.is_complex))
        return tuple(outputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call, count = ctx.call, ctx.count
        saved = ctx.saved_tensors
        parameters = saved[count:]
        wanted = [*call.needs_grad, *ctx.needs_input_grad[2 + count :]]
        tensors = list(saved[:count])
        if call.slot is not None:
            tensors[call.stored] = call.slot.get()
            call.slot.release()
        del saved
        # whole numbers stay the tensors they are: what the host knows of their values is found by them
        tensors = [
            t.detach().requires_grad_(need) if isinstance(t, torch.Tensor) and t.is_floating_point() else t
            for t, need in zip(tensors, call.needs_grad, strict=True)
        ]
        outputs = _run_again(call, tensors)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None and o.requires_grad]
        sources = [s for s, need in zip((*tensors, *parameters), wanted, strict=True) if need]
        # By graph edges, so that the values of outputs and input are free as soon as the graph needs them no more.
        edges = [get_gradient_edge(o) for o, _ in pairs]
        into = [get_gradient_edge(s) for s in sources]
        given = [g for _, g in pairs]
        del outputs, pairs, tensors, sources, parameters
        if not edges:
            return (None, None, *(None for _ in wanted))
        found = iter(torch.autograd.grad(edges, into, given, allow_unused=True))
        return (None, None, *(next(found) if need else None for need in wanted))


def _run_again(call: _Call, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The recompute pass: the layer's graph over ``tensors``. Operations leave out values that nobody reads."""
    owner = call.owner
    if call.surroundings is None:
        raise RuntimeError("backward before forward")
    run = recompute.Pass("recompute", owner.skippable or frozenset())
    with call.surroundings.restored(), torch.enable_grad(), recompute.running(run):
        outputs = call.run(tensors)
    allowed = run.not_needed(outputs)
    if run.skippable - allowed:  # the layer was changed since: values were left out that are needed now
        owner.skippable = frozenset()
        owner.full_recomputes += 1
        with call.surroundings.restored(), torch.enable_grad(), recompute.running(recompute.Pass("recompute")):
            outputs = call.run(tensors)
    elif owner.skippable is None:
        owner.skippable = allowed
    return outputs


def _hidden(tensors: list[torch.Tensor]) -> int | None:
    """The layer's hidden state: by transformers' convention its first floating tensor."""
    return next((i for i, t in enumerate(tensors) if t.dtype.is_floating_point and t.dim() >= 2), None)


class _Surroundings:
    """Random state and autocast at a layer's first pass, to be the same at its second."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        self.cpu_state = torch.get_rng_state()
        self.devices = sorted({t.device.index for t in tensors if t.device.type == "cuda"})
        self.device_states = [torch.cuda.get_rng_state(d) for d in self.devices]
        kinds = {"cpu", *(t.device.type for t in tensors)}
        self.autocast = {
            kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in kinds
            if torch.amp.is_autocast_available(kind)
        }

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Run with the state of the first pass; the state before is put back after."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.random.fork_rng(self.devices, enabled=True))
            torch.set_rng_state(self.cpu_state)
            for device, state in zip(self.devices, self.device_states, strict=True):
                torch.cuda.set_rng_state(state, device)
            for kind, (enabled, dtype) in self.autocast.items():
                stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype))
            yield
