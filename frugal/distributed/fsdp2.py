"""FSDP2 (torch's `fully_shard`) in frugal's own loop: the same code over gloo and NCCL, 4-bit bases included.

Units. One for each decoder layer: its 4-bit codes and scales, norms and adapters arrive together, half a byte a
parameter on the wire, and are dequantised where they are used. The input embedding is a unit of its own (needed for one
lookup; never again in backward), and so is an untied frozen head, which the loss gathers while it computes. Everything
else (final norm, a tied table, what is trained outside the layers) is the root's, gathered for the length of a step.

What is sharded. With ``shard_base`` base, adapters, gradients and optimizer state; without it the frozen base stays
whole on every rank and only what is trained is cut: one reduction and one gather of the adapters a step. Gradients are
reduced with every micro-batch in the first case, once a step in the second.

No mixed-precision policy: adapters are float32 and cast where they are used, as with one process, and integers cannot
be cast. Bytes that are moved stay what they are.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from peft import PeftModel
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from transformers import PreTrainedModel

from frugal.adapters import adapter_state
from frugal.distributed.device_wait import number
from frugal.distributed.group import digest
from frugal.distributed.optimizer_state import (
    OptimizerState,
    Tensors,
    load_optimizer_state,
    optimizer_state,
    part_of_state,
    whole_state,
)
from frugal.distributed.strategy import KINDS, MakeOptimizer, Strategy
from frugal.distributed.tensors import fill, local, total_norm, whole
from frugal.model_structure import decoder_layers

T = TypeVar("T")


class Root(nn.Module):
    """The outermost unit: every use of the model goes through its hooks, which gather what is not a layer's."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, action: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """The module's forward, or any ``action`` that calls parts of it."""
        return self.module(*args, **kwargs) if action is None else action()


class FullyShard(Strategy):
    """Everything, or everything that is trained, cut over all ranks."""

    name = "fsdp2"
    sharded = True

    def __init__(
        self,
        device: torch.device,
        *,
        shard_base: bool = True,
        offload: bool = False,
        reshard_after_forward: bool | None = None,
    ) -> None:
        """``offload``: shards rest in host memory and travel to the GPU for each use; the optimizer steps there.

        ``reshard_after_forward``: whether layers are given up after forward and gathered again for backward. None: a
        sharded base is, adapters alone (small, and a third less traffic) are not.
        """
        super().__init__(device)
        self.shard_base, self.offload = shard_base, offload
        self.reshard = shard_base if reshard_after_forward is None else reshard_after_forward
        self.mesh = init_device_mesh(device.type, (self.world_size,))

    @property
    def cuts_base(self) -> bool:
        return self.shard_base

    @property
    def sharded_kinds(self) -> tuple[str, ...]:
        return KINDS if self.shard_base else ("trained",)

    @property
    def gradients_wait(self) -> bool:
        return not self.shard_base

    def is_wrapped(self, wrapped: nn.Module) -> bool:
        return isinstance(wrapped, FSDPModule)

    # ---- before the first step ---------------------------------------------------------------------------------------

    def shard_layer(self, layer: nn.Module) -> None:
        if not isinstance(layer, FSDPModule):
            self._unit(layer)

    def prepare(self, module: nn.Module, make_optimizer: MakeOptimizer) -> tuple[nn.Module, Optimizer]:
        """Shard what `take_layer` was not given, then build the optimizer over the shards.

        Nobody may hold the former parameters afterwards: their memory is free when the last reference goes.
        """
        layers: list[Any] = list(decoder_layers(module).values())
        for layer in layers:
            self.shard_layer(layer)
        embedding, head = own_units(module) if self.shard_base else (None, None)
        for table in (embedding, head):
            if table is not None:
                self._unit(table)
        if embedding is not None:
            embedding.set_unshard_in_backward(False)  # a frozen lookup has no backward
        root: Any = Root(module)
        self._unit(root)
        if hasattr(root, "set_reduce_scatter_unused_params"):  # not in older torch
            root.set_reduce_scatter_unused_params(True)  # ranks reduce alike, whatever each one's rows made use of
        if self.shard_base:  # the next layer travels while this one computes; backward does so by itself
            for layer, following in itertools.pairwise(layers):
                layer.set_modules_to_forward_prefetch([following])
        self._refuse_whole(module)
        return root, make_optimizer()

    def _refuse_whole(self, module: nn.Module) -> None:
        """What was to be cut is cut: nothing falls back to whole tensors silently."""
        left = [
            name
            for name, parameter in module.named_parameters()
            if (self.shard_base or parameter.requires_grad) and not isinstance(parameter, DTensor)
        ]
        if left:
            raise AssertionError(f"{len(left)} parameters were not sharded, the first is {left[0]}")

    def _unit(self, module: nn.Module) -> None:
        for parameter in module.parameters():
            if not isinstance(parameter, DTensor) and not parameter.is_contiguous():  # FSDP2 takes no other
                parameter.data = parameter.data.contiguous()
        ignored = set() if self.shard_base else {p for p in module.parameters() if not p.requires_grad}
        policy = CPUOffloadPolicy(pin_memory=self.device.type == "cuda") if self.offload else OffloadPolicy()
        fully_shard(
            module,
            mesh=self.mesh,
            reshard_after_forward=None if self.reshard else False,
            shard_placement_fn=self._placement,
            offload_policy=policy,
            ignored_params=ignored,
        )

    def _placement(self, parameter: nn.Parameter) -> Shard | None:
        """Dim 0; what is trained and does not divide there (LoRA's A has few rows): the first dim that does."""
        if not parameter.requires_grad:
            return None
        even = [dim for dim, size in enumerate(parameter.shape) if size % self.world_size == 0]
        return Shard(even[0]) if even else None

    # ---- one step ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def accumulating(self, wrapped: Any, last: bool) -> Iterator[None]:
        # Where every micro-batch gathers the base anyway, its gradients are reduced too: a few hundredths of that
        # traffic, and no rank keeps whole fp32 gradients (1.5 GB for 70B at r=32) until the end of a window.
        wrapped.set_requires_gradient_sync(last or self.shard_base)
        # What stays gathered from forward to backward stays for the whole window.
        wrapped.set_reshard_after_backward(last, recurse=not self.reshard)
        yield

    def norm_and_clip(self, optimizer: Optimizer, max_norm: float, scaler: torch.amp.GradScaler) -> float:
        scaler.unscale_(optimizer)
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = total_norm(gradients, self.device)
        if max_norm > 0:
            factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grads_with_norm_
            for gradient in gradients:
                local(gradient).mul_(factor.to(gradient.device))
        return number(norm)

    # ---- beside steps ------------------------------------------------------------------------------------------------

    def inside(self, wrapped: nn.Module, action: Callable[[], T]) -> T:
        self.rest(wrapped)
        # PEFT trains nothing while adapters are off, and says so on what is gathered in there: here are the shards
        trained = [parameter for parameter in wrapped.parameters() if parameter.requires_grad]
        try:
            with torch.no_grad():
                found: T = wrapped(action=action)
        finally:
            self.rest(wrapped)
            for parameter in trained:
                parameter.requires_grad_(True)
        return found

    def rest(self, wrapped: nn.Module) -> None:
        units: list[Any] = [module for module in wrapped.modules() if isinstance(module, FSDPModule)]
        for unit in units:
            unit.reshard()

    def digests(self, parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
        return {name: digest(whole(parameter, self.device)) for name, parameter in parameters.items()}

    # ---- saving ------------------------------------------------------------------------------------------------------

    def full_adapter(self, model: PeftModel) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in adapter_state(model).items():
            full = whole(tensor, self.device)
            if self.rank == 0:
                found[name] = full.to("cpu", copy=True)
        return found

    def load_adapter(self, model: PeftModel, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in adapter_state(model).items():
            fill(tensor, tensors[name].to(tensor.dtype))

    def full_optimizer_state(self, optimizer: Optimizer) -> OptimizerState:
        def gathered(parameter: nn.Parameter, state: Tensors) -> Tensors:
            full = whole_state(parameter, state, self.device)
            return full if self.rank == 0 else {}

        return optimizer_state(optimizer, gathered)

    def load_optimizer_state(self, optimizer: Optimizer, saved: OptimizerState, where: str) -> None:
        load_optimizer_state(optimizer, saved, where, part_of_state)


def own_units(module: nn.Module) -> tuple[Any, Any]:
    """Embedding and head, where they are frozen and share no parameter with another module: units of their own."""
    model = next((m for m in module.modules() if isinstance(m, PreTrainedModel)), None)
    if model is None:
        return None, None
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))

    def alone(table: nn.Module | None) -> nn.Module | None:
        parameters = [] if table is None else list(table.parameters())
        fits = parameters and not any(p.requires_grad or uses[id(p)] > 1 for p in parameters)
        return table if fits else None

    return alone(model.get_input_embeddings()), alone(model.get_output_embeddings())
