"""Decoder layers that are loaded one by one: on the meta device until each is filled by itself.

For a base that is sharded over processes: a layer is filled, handed over (which leaves a part of it here) and only then
the next is read, so that no process ever has the whole base in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from frugal.model_structure import decoder_layers, inside
from frugal.models.materialize import PendingTensor, materialize, pending, set_tensor
from frugal.tensor_files import StoredTensor

NO_LAYERS = "it has no decoder layers of transformers' kind (GradientCheckpointingLayer)"
_NF4_PARTS = ("absmax", "nested_absmax", "offset")  # made from the weight, stored in no checkpoint


def not_by_layer(reason: str) -> str:
    """The message for a base that cannot be loaded layer by layer."""
    return (
        f"distributed.shard_base: the base cannot be loaded layer by layer: {reason}. Write "
        "`distributed.shard_base: false`: each process then loads the whole base."
    )


class DeferredLayers:
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
        self._waiting: dict[str, list[PendingTensor]] = {name: [] for name in self.layers}
        for name, each in zip(targets, pending(model, targets), strict=True):
            self._waiting[next(layer for layer in self.layers if inside(name, [layer]))].append(each)

    @property
    def waiting(self) -> list[str]:
        """Names of the layers that are not filled yet."""
        return list(self._waiting)

    def fill(self, name: str) -> nn.Module:
        """Read the tensors of layer ``name``, and no others, as an ordinary load would.

        Holds the layer and one tensor as stored. A layer is filled once; raises KeyError the second time, and
        ModelError when a file ends too early.
        """
        materialize(self._waiting.pop(name), self.dtype, self.device)
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
            materialize(self._waiting[name], self.dtype, self.device)
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


def defer(model: PreTrainedModel, targets: Mapping[str, StoredTensor], dtype: torch.dtype) -> set[str]:
    """Give tensors of ``model`` that get their values later the dtype that they will have, on the meta device.

    Returns the names that ``targets`` will fill, scales of NF4 layers included.
    """
    filled = set(targets)
    for name, each in zip(targets, pending(model, targets), strict=True):
        if each.quantised:
            filled.update(f"{name.rpartition('.')[0]}.{other}" for other in _NF4_PARTS)
        else:
            value = torch.empty(each.entry.shape, dtype=each.resident(dtype), device="meta")
            set_tensor(each.module, each.part, value)
    return filled
