"""What is trained beside LoRA: whole modules (`modules_to_save`) and rows of tables (`trainable_token_indices`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft.utils.other import TrainableTokensWrapper
from torch import nn
from transformers import PreTrainedModel

from frugal.codecs.base import encoded_parts
from frugal.codecs.dense import UpcastEmbedding, UpcastLinear, compute_dtype, upcast_embedding
from frugal.errors import UnsupportedError


def prepare_trained(model: PreTrainedModel, modules_to_save: Sequence[str], *, trains_tokens: bool) -> None:
    """Make ready what is trained beside LoRA: copies of it are float32, and must still take and give the compute dtype.

    Linear layers and embeddings are replaced by the forms that cast while used. Rows of a 16-bit table under float32
    compute cannot be trained in place: that table becomes float32. ``modules_to_save`` are names or ends of names.
    """
    if trains_tokens:
        widen_tables(model)
    for name, module in list(model.named_modules()):
        if not any(name == end or name.endswith(f".{end}") for end in modules_to_save):
            continue
        if any(encoded_parts(inner) for inner in module.modules()):
            raise UnsupportedError(
                f"lora.modules_to_save: {name} is stored in NF4 and cannot be trained whole. Adapt it with LoRA "
                "(lora.target_modules), or write `model.quantize: none`."
            )
        for inner_name, inner in list(module.named_modules()):
            full = f"{name}.{inner_name}" if inner_name else name
            if type(inner) is nn.Linear:
                model.set_submodule(full, cast_linear(inner))
            elif isinstance(inner, nn.Embedding):
                model.set_submodule(full, _upcast_embedding(inner))


def widen_tables(model: PreTrainedModel) -> None:
    """Make embedding and head float32 where that is computed in: PEFT takes their rows out and puts trained ones in."""
    compute = compute_dtype(model)
    for table in (model.get_input_embeddings(), model.get_output_embeddings()):
        while isinstance(table, TrainableTokensWrapper):
            table = table.token_adapter.get_base_layer()
        if compute is not None and table is not None and table.weight.dtype != compute:
            table.weight.data = table.weight.data.to(compute)  # a tied head shares the Parameter


def widen_trained_tables(model: PreTrainedModel, *_: Any) -> None:
    """Forward pre-hook of a base that others adapt: `widen_tables` when PEFT has come to train rows of a table."""
    tables = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(isinstance(table, TrainableTokensWrapper) for table in tables):
        widen_tables(model)


def cast_linear(old: nn.Linear) -> UpcastLinear:
    """The form of a linear layer that casts its weight while used, with the same Parameters."""
    rows, columns = old.weight.shape  # PEFT's tied head has its two sizes the wrong way round
    new = UpcastLinear(columns, rows, bias=False, device="meta")
    new.weight, new.bias = old.weight, old.bias
    return new.train(old.training)


def _upcast_embedding(old: nn.Embedding) -> nn.Embedding:
    if isinstance(old, UpcastEmbedding):
        return old
    return upcast_embedding(old, old.weight.dtype) or old
