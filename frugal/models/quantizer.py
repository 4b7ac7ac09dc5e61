"""What transformers asks a quantised model's `hf_quantizer`: how it is saved, made dense and trained."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from frugal.adapters.peft_model import dense_linear
from frugal.codecs.base import EncodedModule, encoded_parts
from frugal.codecs.dense import compute_dtype
from frugal.models.modules.experts import NF4Experts


class EncodedBase(HfQuantizer):  # type: ignore[misc]
    """Of a base with encoded weights: saved as ordinary dense ones; `model.dequantize()` makes it dense.

    A folder of packed bytes under the names of weights could not be loaded by anyone.
    """

    def __init__(self) -> None:
        super().__init__(QuantizationConfigMixin(quant_method="frugal"))

    def is_serializable(self) -> bool:
        """True: what is saved is dense."""
        return True

    @property
    def is_trainable(self) -> bool:
        """True: with adapters."""
        return True

    def get_state_dict_and_metadata(self, model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
        """The model's tensors, encoded ones dense in the dtype that the model computes in."""
        state: dict[str, Tensor] = model.state_dict()
        dtype = _computes_in(model)
        for name, module in model.named_modules():
            for part, stored in encoded_parts(module).items():
                prefix = f"{name}." if name else ""
                for one in stored:
                    state.pop(f"{prefix}{one}", None)
                assert isinstance(module, EncodedModule)
                state[f"{prefix}{part}"] = module.dense(part, dtype)
        return state, {}

    def dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """``model`` with dense weights in the dtype that it computes in; all of it in ``dtype`` where one is given."""
        computes_in = _computes_in(model)
        for name, module in list(model.named_modules()):
            if isinstance(module, nn.Linear) and isinstance(module, EncodedModule):
                model.set_submodule(name, dense_linear(module, computes_in))
            elif isinstance(module, NF4Experts):
                model.set_submodule(name, module.dense_experts(computes_in))
        self.remove_quantization_config(model)
        return model if dtype is None else model.to(getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def _computes_in(model: Any) -> torch.dtype:
    dtype: torch.dtype = compute_dtype(model) or model.dtype
    return dtype
