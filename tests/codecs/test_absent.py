"""M04: a weight whose bytes are absent is refused when it is used, by each operation that reads it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from frugal.codecs.dense import UpcastEmbedding, UpcastLinear
from frugal.codecs.nf4 import NF4Linear
from frugal.errors import ModelError
from frugal.ops import linear_cross_entropy, lora_linear


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("meta")


def one_for_all(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_zeros(()).expand(tensor.shape)


def freed(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


def cut(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.new_empty(0)


ABSENT = [on_meta, one_for_all, freed, cut]


@pytest.mark.parametrize("absent", ABSENT)
@pytest.mark.parametrize("part", ["weight", "absmax", "nested_absmax"])
@pytest.mark.parametrize("size", [(512, 64), (2048, 2560)])  # of one block of rows, and of several
def test_nf4(absent: Callable[[torch.Tensor], torch.Tensor], part: str, size: tuple[int, int]) -> None:
    rows, columns = size
    layer = NF4Linear.from_linear(nn.Linear(columns, rows, bias=False))
    x = torch.ones(2, columns, requires_grad=True)
    kept = layer(x)
    stored = getattr(layer, part).detach()
    gone = absent(stored)
    setattr(layer, part, nn.Parameter(gone, requires_grad=False) if part != "nested_absmax" else gone)
    for use in (lambda: layer(x), lambda: lora_linear(x, layer.encoded())):
        with pytest.raises(ModelError, match="weight that is not there was used: its tensor"):
            use()
    kept.sum().backward()  # what autograd kept is there still
    assert x.grad is not None
    layer.to("meta")
    assert layer(x.detach().to("meta")).shape == (2, rows)  # a plan


def test_gone_before_the_backward_pass() -> None:
    layer = NF4Linear.from_linear(nn.Linear(64, 128, bias=False))
    x = torch.ones(2, 64, requires_grad=True)
    y = layer(x)
    layer.weight.untyped_storage().resize_(0)
    with pytest.raises(ModelError, match="has 0 of 4096 bytes"):
        y.sum().backward()


@pytest.mark.parametrize("absent", ABSENT[:3])
def test_dense_tables(absent: Callable[[torch.Tensor], torch.Tensor]) -> None:
    weight: Any = nn.Parameter(absent(torch.randn(300, 64).bfloat16()), requires_grad=False)
    table, head = UpcastEmbedding(300, 64, device="meta"), UpcastLinear(64, 300, bias=False, device="meta")
    table.compute_dtype, table.weight, head.weight = torch.float32, weight, weight
    x = torch.ones(2, 64)
    for use in (
        lambda: table(torch.tensor([1, 2])),
        lambda: head(x),
        lambda: lora_linear(x, weight),
        lambda: linear_cross_entropy(x, weight, torch.tensor([1, 2])),
    ):
        with pytest.raises(ModelError, match="weight that is not there"):
            use()
