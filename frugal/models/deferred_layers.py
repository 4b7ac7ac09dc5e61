"""Decoder layers that wait for their weights: on the meta device until each is filled by itself.

For a base that is sharded over processes: a layer is filled, handed over (which leaves a part of it here) and only then
the next is read, so that no process ever holds the whole base.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from frugal.models.checkpoint_files import StoredTensor
from frugal.models.materialize import Placement, place, put

NO_LAYERS = "it has no decoder layers of transformers' kind (GradientCheckpointingLayer)"
_NF4_PARTS = ("absmax", "nested_absmax", "offset")  # made from the weight, stored in no checkpoint


def decoder_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> decoder layer (transformers' `GradientCheckpointingLayer`), the outermost where they are nested."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, GradientCheckpointingLayer) and not inside(name, found):
            found[name] = module
    return found


def inside(name: str, layers: Iterable[str]) -> bool:
    """Whether the module or parameter ``name`` is one of ``layers`` or lies in one."""
    return any(name == layer or name.startswith(f"{layer}.") for layer in layers)


def cannot_hold(reason: str) -> str:
    """The message for a base that cannot be loaded layer by layer."""
    return (
        f"distributed.shard_base: the base cannot be loaded layer by layer: {reason}. Write "
        "`distributed.shard_base: false`: each process then holds the whole base."
    )


class HeldLayers:
    """The decoder layers of one model that have no weights yet, and where each finds its own.

    Modules are kept, not names: a wrapper (PEFT) may rename them and put itself around linear layers meanwhile.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        targets: Mapping[str, StoredTensor],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """``targets``: model name -> stored tensor, of every parameter and buffer that waits."""
        self.layers = decoder_layers(model)
        """Name in the base model -> layer, in the model's order; filled ones too."""
        self.dtype, self.device = dtype, device
        self._config = model.config.get_text_config()
        self._outputs: int | None = None  # in the tuple that a layer returns; 0: no tuple; None: not known yet
        self._waiting: dict[str, list[Placement]] = {name: [] for name in self.layers}
        for name, entry in targets.items():
            owner, _, part = name.rpartition(".")
            layer = next(layer for layer in self.layers if inside(name, [layer]))
            self._waiting[layer].append(Placement(entry, model.get_submodule(owner), part))

    @property
    def waiting(self) -> list[str]:
        """Names of the layers that are not filled yet."""
        return list(self._waiting)

    def fill(self, name: str) -> nn.Module:
        """Read the tensors of layer ``name``, and no others, and put them in place, as an ordinary load would.

        Holds the layer and one tensor as stored. A layer is filled once; raises KeyError the second time, and
        ModelError when a file ends too early.
        """
        place(self._waiting.pop(name), self.dtype, self.device)
        return self.layers[name]

    def kinds(self) -> list[str]:
        """Names of the first layer of each kind: shapes of parameters, and what the configuration says by layer."""
        lists = [v for v in vars(self._config).values() if isinstance(v, list | tuple) and len(v) == len(self.layers)]
        first: dict[Any, str] = {}
        for index, (name, layer) in enumerate(self.layers.items()):
            shapes = tuple((part, tuple(parameter.shape)) for part, parameter in layer.named_parameters())
            first.setdefault((type(layer), shapes, *(str(values[index]) for values in lists)), name)
        return list(first.values())

    @contextlib.contextmanager
    def only(self, name: str) -> Iterator[None]:
        """For a while the model runs with one decoder layer, ``name``, filled meanwhile; all others pass states on.

        For proofs that need a forward, before any layer is handed over. The first layer goes first: it shows what
        layers return.
        """
        layer = self.layers[name]
        before = [(module, dict(module._parameters), dict(module._buffers)) for module in layer.modules()]
        others = [other for other in self.layers.values() if other is not layer]
        note = layer.register_forward_hook(self._note_outputs)
        try:
            place(self._waiting[name], self.dtype, self.device)
            for other in others:
                vars(other)["forward"] = self._pass_on  # of this instance alone
            yield
        finally:
            note.remove()
            for other in others:
                vars(other).pop("forward", None)
            for module, parameters, buffers in before:
                module._parameters.update(parameters)
                module._buffers.update(buffers)

    def _note_outputs(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._outputs = len(output) if isinstance(output, tuple) else 0

    def _pass_on(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return (hidden_states, *[None] * (self._outputs - 1)) if self._outputs else hidden_states


def hold(model: PreTrainedModel, targets: Mapping[str, StoredTensor], dtype: torch.dtype) -> set[str]:
    """Give what waits in ``model`` the dtype that it will have, on the meta device.

    Returns the names that ``targets`` will fill, scales of NF4 layers included.
    """
    filled = set(targets)
    for name, entry in targets.items():
        owner, _, part = name.rpartition(".")
        placement = Placement(entry, model.get_submodule(owner), part)
        if placement.quantised:
            filled.update(f"{owner}.{other}" for other in _NF4_PARTS)
        else:
            put(placement.module, part, torch.empty(entry.shape, dtype=placement.resident(dtype), device="meta"))
    return filled


def is_held(model: nn.Module) -> bool:
    """Whether parameters of ``model`` wait for their weights, beside others that have theirs."""
    kinds = {parameter.is_meta for parameter in model.parameters()}
    return kinds == {True, False}


@contextlib.contextmanager
def stand_ins(model: nn.Module, device: torch.device) -> Iterator[None]:
    """For a while, a tensor of one element, expanded, in place of each parameter on the meta device.

    PEFT puts an adapter on the device, and at first in the dtype, of the weight that it adapts: it finds the right
    ones, and adapters come out as over the real weight.
    """
    found: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                value = torch.zeros((), dtype=parameter.dtype, device=device).expand(parameter.shape)
                found.append((module, name, parameter, nn.Parameter(value, requires_grad=False)))
    for module, name, _, instead in found:
        module._parameters[name] = instead
    try:
        yield
    finally:
        for module, name, parameter, instead in found:
            if module._parameters[name] is instead:
                module._parameters[name] = parameter
