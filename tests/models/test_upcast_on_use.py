"""Frozen 16-bit weights under float32 compute give the numbers of a float32 copy, and keep ties and names."""

import pytest
import torch
from torch import nn

from frugal.codecs import dense as stored
from frugal.codecs.dense import UpcastEmbedding, UpcastLinear, upcast_on_use


class Tied(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 12, padding_idx=3)
        self.head = nn.Linear(12, 37, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype).requires_grad_(False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(ids) * 1.5)


@pytest.mark.parametrize("block_bytes", [1, 12 * 4 * 5, 1 << 20])
def test_stored_equals_a_float32_copy(monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    monkeypatch.setattr(stored, "BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    model = Tied(torch.bfloat16)
    copy = Tied(torch.float32)
    copy.load_state_dict({k: v.float() for k, v in model.state_dict().items()})
    keys = list(model.state_dict())
    assert upcast_on_use(model, torch.float32) == ["embed", "head"]
    assert list(model.state_dict()) == keys
    assert model.head.weight is model.embed.weight
    assert model.embed.weight.dtype == torch.bfloat16
    assert isinstance(model.embed, UpcastEmbedding)
    assert isinstance(model.head, UpcastLinear)
    ids = torch.tensor([[1, 5, 36], [3, 0, 7]])
    torch.testing.assert_close(model(ids), copy(ids), rtol=1e-6, atol=1e-6)

    x = torch.randn(2, 3, 12, requires_grad=True)
    grad = torch.randn(2, 37, 3).transpose(1, 2)  # non-contiguous
    (got,) = torch.autograd.grad(model.head(x), x, grad)
    (want,) = torch.autograd.grad(copy.head(x), x, grad)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_bias_trained_weight_and_empty_input() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5)).to(torch.bfloat16)
    assert upcast_on_use(model, torch.float32) == ["0"]
    x = torch.randn(4, 6)
    want = torch.nn.functional.linear(x, model[0].weight.float(), model[0].bias.float())
    torch.testing.assert_close(model(x), want)  # still trainable: gradients reach the weight
    model(x).sum().backward()
    assert model[0].weight.grad is not None
    model.requires_grad_(False)
    torch.testing.assert_close(model(x), want)
    assert model(torch.randn(0, 6)).shape == (0, 5)


def test_modules_of_the_compute_dtype_stay() -> None:
    model = Tied(torch.float32)
    assert upcast_on_use(model, torch.float32) == []
    assert type(model.embed) is nn.Embedding
