"""PEFT's model and LoRA layer over weights that are kept encoded (NF4): merging, saving and counting as on dense ones.

Both are PEFT's own classes with the methods that read the base's weight put right; nothing of PEFT is changed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModelForCausalLM
from peft.tuners.lora import Linear as LoraLinear
from peft.tuners.tuners_utils import check_adapters_to_merge
from torch import nn

from frugal.adapters.conversion import layers_as_parameters, refuse_rewritten_dora
from frugal.adapters.trained import prepare_trained
from frugal.codecs.base import EncodedModule, encoded_parts
from frugal.codecs.dense import compute_dtype, dtype_after
from frugal.codecs.nf4 import NF4Linear
from frugal.files import atomic_path, read_json, write_json
from frugal.tensor_files import read_all, write_tensors

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"
FINGERPRINT = "frugal_base_fingerprint"
QUANTIZE = "frugal_base_quantize"
EXPERTS = "frugal_base_experts"
"""Keys of an adapter file's metadata: the base that it was trained on, and how that was kept (`base_record`)."""


class EncodedLoraLinear(LoraLinear):  # type: ignore[misc]
    """LoRA over a linear layer whose weight is encoded.

    Merging puts a dense layer in the place of the encoded one, which `unmerge` puts back: exact both ways, where adding
    to 4-bit numbers would round most of the adapter away.
    """

    base_layer: nn.Module
    merged_dtype: torch.dtype = torch.float32
    """Of the dense weight: what the model computes in."""
    _kept: tuple[nn.Module, ...] = ()
    """The encoded layer while adapters are merged; in a tuple, so that it is no child that is moved and saved."""

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Merge adapters into a dense copy of the base's weight."""
        base = self.get_base_layer()
        if not (isinstance(base, nn.Linear) and isinstance(base, EncodedModule)):
            super().merge(safe_merge, adapter_names)
            return
        if not check_adapters_to_merge(self, adapter_names):
            return
        self._kept, self.base_layer = (base,), dense_linear(base, self.merged_dtype)
        try:
            super().merge(safe_merge, adapter_names)
        except BaseException:
            self._kept, self.base_layer = (), base
            self.merged_adapters.clear()  # those before the broken one
            raise

    def unmerge(self) -> None:
        """Put the encoded weight back, bit for bit."""
        if not self._kept:
            super().unmerge()
            return
        self.base_layer, self._kept = self._kept[0], ()
        self.merged_adapters.clear()

    def olora_init(self, adapter_name: str) -> None:
        """OLoRA takes the adapter's start out of the base: the rest is quantised again, as over bitsandbytes."""
        base = self.get_base_layer()
        if not (isinstance(base, nn.Linear) and isinstance(base, EncodedModule)):
            super().olora_init(adapter_name)
            return
        dense = self.base_layer = dense_linear(base, torch.float32)
        try:
            super().olora_init(adapter_name)
        finally:
            self.base_layer = base
        base.encode_("weight", dense.weight)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> EncodedLoraLinear:
        self.merged_dtype = dtype_after(fn, self.merged_dtype)  # `to`, `half` and the like
        super()._apply(fn, recurse)
        return self


def dense_linear(layer: nn.Linear, dtype: torch.dtype) -> nn.Linear:
    """An ordinary linear layer with the numbers of an encoded one; the bias is copied."""
    assert isinstance(layer, EncodedModule)
    new = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
    new.weight = nn.Parameter(
        layer.encoded("weight").dequantize_rows(0, layer.out_features, dtype), requires_grad=False
    )
    if layer.bias is not None:
        new.bias = nn.Parameter(layer.bias.detach().clone().to(dtype), requires_grad=False)
    return new.train(layer.training)


def over_encoded(config: LoraConfig) -> LoraConfig:
    """``config`` with PEFT told, by its own register of layers, to put `EncodedLoraLinear` over encoded layers."""
    config._register_custom_module({NF4Linear: EncodedLoraLinear})
    return config


class FrugalPeftModel(PeftModelForCausalLM):  # type: ignore[misc]
    """A PEFT model whose base may be encoded."""

    @property
    def base_record(self) -> dict[str, str]:
        """What the adapter is trained on, for the metadata of its file; also when PEFT saves it.

        Kept with the base, so that the next adapter on it (`unload`, then `frugal.get_peft_model`) has it too.
        """
        found: dict[str, str] = getattr(self.get_base_model(), "frugal_base_record", {})
        return found

    @base_record.setter
    def base_record(self, record: dict[str, str]) -> None:
        self.get_base_model().frugal_base_record = record

    @property
    def dtype(self) -> torch.dtype:
        """What the model computes in; tables of a checkpoint may be kept in another dtype."""
        base = self.get_base_model()
        found: torch.dtype = compute_dtype(base) or base.dtype
        return found

    def add_adapter(self, adapter_name: str, peft_config: Any, *args: Any, **options: Any) -> Any:
        """As PEFT does it, over encoded layers and 16-bit tables too."""
        if isinstance(peft_config, LoraConfig):
            over_encoded(peft_config)
            tokens = peft_config.trainable_token_indices is not None
            prepare_trained(self.get_base_model(), peft_config.modules_to_save or [], trains_tokens=tokens)
        found = super().add_adapter(adapter_name, peft_config, *args, **options)
        compute_in(self, self.dtype)
        return found

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """(trained values, all values): an encoded weight counts as the matrix it stands for, not as its bytes."""
        trained, total = super().get_nb_trainable_parameters()
        for module in self.modules():
            for part, names in encoded_parts(module).items():
                shape = module.encoded(part).shape
                stored = sum(p.numel() for n in names if isinstance(p := getattr(module, n, None), nn.Parameter))
                total += int(torch.Size(shape).numel()) - stored
        return trained, total

    def train(self, mode: bool = True) -> FrugalPeftModel:
        """As in torch; warns when nothing would be trained."""
        if mode and not any(parameter.requires_grad for parameter in self.parameters()):
            warnings.warn(
                "No parameter of this model is trainable: a trainer would change nothing. Load the run with "
                "frugal.load(RUN, trainable=True) to go on training its adapter.",
                stacklevel=2,
            )
        super().train(mode)
        return self

    def save_pretrained(self, save_directory: str | Path, *args: Any, **options: Any) -> None:
        """As PEFT does; the weights' metadata says too what they were trained on.

        Layers whose names PEFT rewrites are named so that it reads them as what they are. Raises UnsupportedError for
        DoRA on such layers.
        """
        names = options.get("selected_adapters") or list(self.peft_config)
        for name in names:
            refuse_rewritten_dora(self, self.peft_config[name])
        super().save_pretrained(str(save_directory), *args, **options)
        if not options.get("is_main_process", True):
            return
        for name in names:
            folder = Path(save_directory) / name if name != "default" else Path(save_directory)
            config = read_json(folder / CONFIG)
            layers_as_parameters(self, self.peft_config[name], config)
            write_json(folder / CONFIG, config)
            if self.base_record and (path := folder / WEIGHTS).is_file():
                tensors = read_all(path)
                with atomic_path(path) as beside:
                    write_tensors(beside, tensors, texts=self.base_record)


def base_record(
    quantize: str, *, double_quant: bool = True, experts: bool = False, fingerprint: str | None = None
) -> dict[str, str]:
    """Metadata of an adapter's file: how its base was kept (`none`, `nf4`, `nf4 single`), and which it was.

    ``experts``: its stacks of experts were in NF4 too. In files of frugal before they could be, nothing says so.
    """
    kept = quantize if quantize == "none" or double_quant else f"{quantize} single"
    stacks = {EXPERTS: quantize} if experts else {}
    return {QUANTIZE: kept, **stacks, **({FINGERPRINT: fingerprint} if fingerprint else {})}


def adapted(model: nn.Module, config: LoraConfig, adapter_name: str) -> FrugalPeftModel:
    """PEFT's injection, as `get_peft_model` does it, with the classes of this file."""
    config = over_encoded(config)
    config.base_model_name_or_path = getattr(model, "name_or_path", None) or config.base_model_name_or_path
    return FrugalPeftModel(model, config, adapter_name=adapter_name)


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Tell the LoRA layers over encoded weights what merged weights are to be."""
    for module in model.modules():
        if isinstance(module, EncodedLoraLinear):
            module.merged_dtype = dtype
