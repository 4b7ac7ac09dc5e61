"""What loading did: which layers became what, dtypes, bytes, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from frugal.assets import weights_note
from frugal.codecs.base import EncodedModule, encoded_parts
from frugal.model_structure import stacked_experts
from frugal.units import gib

NOT_LINEAR = "no nn.Linear"
"""How a reason in `LoadReport.kept` begins for weights of other modules."""


def dtype_name(dtype: torch.dtype) -> str:
    """`torch.bfloat16` -> ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass
class LoadReport:
    """The account of one loaded base model; goes into the run's manifest."""

    base: str
    architecture: str
    quantize: str
    double_quant: bool
    compute_dtype: str
    adapter_dtype: str = "float32"
    route: str = "streamed"
    """streamed: tensor by tensor from the files. transformers: through from_pretrained, see route_reason."""
    route_reason: str = ""
    quantized: list[str] = field(default_factory=list)
    """Names of the layers stored in NF4."""
    kept: dict[str, str] = field(default_factory=dict)
    """Linear layers (and large weights) that were not quantised, with the reason."""
    stored: list[str] = field(default_factory=list)
    """Modules that keep the checkpoint's 16 bits and are widened to the compute dtype while used."""
    expert_share: float = 0.0
    """Part of all weights that are stacked experts in 16 bits or more: not adapted."""
    encoded_expert_share: float = 0.0
    """Part of all weights that are stacked experts in NF4: not adapted."""
    other_share: float = 0.0
    """Part of all weights that are matrices of other kinds than linear layers: not quantised."""
    unexpected: list[str] = field(default_factory=list)
    """Tensors of the checkpoint that the model has no place for."""
    remote_code: bool = False
    """Whether the model's own Python code was run."""
    resized_rows: tuple[int, int] | None = None
    """(before, after) when the embedding table grew for added tokens."""
    tied_head: bool = False
    host_bytes: int = 0
    """Of `bytes_by_kind`, those of an embedding table that stays in host memory."""
    embedding: str = ""
    """Why the table is on the host, or why not."""
    parameters: int = 0
    """Weights of the dense model, a tied head counted once."""
    bytes_by_kind: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def total_bytes(self) -> int:
        """Bytes of all parameters and buffers."""
        return sum(self.bytes_by_kind.values())

    def keeps_on_host(self, table: torch.Tensor) -> None:
        """Note that the embedding table, counted already, is on the host."""
        kind = f"{dtype_name(table.dtype)} embedding"
        self.host_bytes = self.bytes_by_kind.pop(kind)
        self.bytes_by_kind = dict(sorted({**self.bytes_by_kind, f"{kind} on the host": self.host_bytes}.items()))

    def as_dict(self) -> dict[str, Any]:
        """For the manifest: plain values, layer names as counts by their last part."""
        values = {key: value for key, value in vars(self).items() if key != "quantized"}
        values["quantized"] = dict(Counter(name.rsplit(".", 1)[-1] for name in self.quantized))
        values["total_bytes"] = self.total_bytes
        return values

    def lines(self) -> list[str]:
        """A few lines for the terminal."""
        kinds = ", ".join(f"{kind} {gib(count)}" for kind, count in self.bytes_by_kind.items())
        lines = [
            f"{self.base}{weights_note(self.base)}: {self.architecture}, {self.parameters / 1e6:.1f} M weights, "
            f"{gib(self.total_bytes)} in memory ({kinds})",
            f"weights {'NF4' if self.quantized else 'as in the checkpoint'}, compute {self.compute_dtype}, "
            f"adapters {self.adapter_dtype}; {len(self.quantized)} layers quantised, {len(self.kept)} kept",
        ]
        if self.expert_share >= 0.01:
            how = "stay in 16 bits although NF4 is asked for, and" if self.quantize == "nf4" else "are frozen and"
            lines.append(
                f"warning: {self.expert_share:.1%} of the weights are experts, stacked in parameters: they {how} get "
                "no adapter"
            )
        if self.encoded_expert_share >= 0.01:
            lines.append(
                f"{self.encoded_expert_share:.1%} of the weights are experts, stacked in parameters: in NF4, frozen, "
                "without an adapter"
            )
        if self.other_share >= 0.01 and self.quantize == "nf4":
            first = next(name for name, why in self.kept.items() if why.startswith(NOT_LINEAR))
            lines.append(
                f"warning: {self.other_share:.1%} of the weights are no linear layers and stay in 16 bits although NF4 "
                f"is asked for ({first} and others)"
            )
        if self.host_bytes:
            lines.append(f"embedding table ({gib(self.host_bytes)}) in host memory, rows in use are copied")
        if self.route != "streamed":
            lines.append(f"loaded through transformers: {self.route_reason}")
        if self.remote_code:
            lines.append("the model's own Python code was run (model.trust_remote_code: true)")
        return lines


def count_bytes(model: nn.Module) -> dict[str, int]:
    """Bytes of a model's parameters and buffers by kind, each storage once.

    Kinds: ``nf4 codes``, ``nf4 scales``, ``<dtype> embedding``, ``<dtype> head``, ``<dtype> other``, ``buffers``.
    """
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    head = getattr(model, "get_output_embeddings", lambda: None)()
    counts: Counter[str] = Counter()
    seen: set[int] = set()
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is None or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            owner = next((stored for stored in encoded_parts(module).values() if name in stored), None)
            if owner is not None and isinstance(module, EncodedModule):
                kind = f"{module.codec.name} {'codes' if name == owner[0] else 'scales'}"
            elif name in module._buffers:
                kind = "buffers"
            else:
                part = "embedding" if module is embedding else "head" if module is head else "other"
                kind = f"{dtype_name(tensor.dtype)} {part}"
            counts[kind] += tensor.nbytes
    return dict(sorted(counts.items()))


def count_parameters(model: nn.Module) -> int:
    """Weights of the dense model: an encoded layer counts those that it stands for, a tied head once."""
    total = 0
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            if isinstance(module, EncodedModule) and any(name in stored for stored in module.encoded_parts.values()):
                total += torch.Size(module.encoded(name).shape).numel() if name in module.encoded_parts else 0
            else:
                total += parameter.numel()
    return total


def share_of_encoded_experts(model: nn.Module) -> float:
    """Part of all weights that are stacks of experts kept encoded."""
    encoded = [module for module in model.modules() if isinstance(module, EncodedModule)]
    shapes = [module.encoded(part).shape for module in encoded for part in module.encoded_parts]
    return sum(torch.Size(shape).numel() for shape in shapes if len(shape) == 3) / max(1, count_parameters(model))


def shares_left_dense(model: nn.Module, kept: Mapping[str, str]) -> tuple[float, float]:
    """Parts of all weights that are dense stacks of experts, and that are other matrices outside linear layers."""
    total, experts, others = count_parameters(model), 0, 0
    for name, module in model.named_modules():
        stacked = {} if encoded_parts(module) else stacked_experts(module)
        experts += sum(stacked.values())
        for part, parameter in module.named_parameters(recurse=False):
            if part not in stacked and kept.get(f"{name}.{part}", "").startswith(NOT_LINEAR):
                others += parameter.numel()
    return experts / max(1, total), others / max(1, total)
