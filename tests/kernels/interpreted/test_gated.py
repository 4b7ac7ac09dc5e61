"""act(gate) * up and its gradients in place, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from frugal.ops.gated_mlp.triton import Activation, gated, gated_backward_
from tests.kernels.support import checked, close_to_exact

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
ACTIVATIONS: list[Activation] = ["silu", "gelu", "gelu_tanh"]


def act(g: Tensor, activation: Activation) -> Tensor:
    if activation == "silu":
        return F.silu(g)
    return F.gelu(g, approximate="tanh" if activation == "gelu_tanh" else "none")


def halves(rows: int, columns: int, dtype: torch.dtype, joined: bool) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(columns)
    both = (3 * torch.randn(rows, 2 * columns, generator=generator)).to(dtype)
    gate, up = both[:, :columns], both[:, columns:]
    if not joined:
        gate, up = gate.clone(), up.clone()
    return gate, up, torch.randn(rows, columns, generator=generator).to(dtype)


def gradients(gate: Tensor, up: Tensor, d: Tensor, activation: Activation) -> tuple[Tensor, ...]:
    leaves = [gate.clone().requires_grad_(), up.clone().requires_grad_()]
    return torch.autograd.grad(act(leaves[0], activation) * leaves[1], leaves, d)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "joined"), [(3, 700, False), (3, 1030, True), (1, 1, False)])
def test_forward_and_backward(
    rows: int, columns: int, joined: bool, dtype: torch.dtype, activation: Activation
) -> None:
    gate, up, d = halves(rows, columns, dtype, joined)
    wide = gate.double(), up.double(), d.double()
    naive = act(gate, activation) * up
    naive_gradients = gradients(gate, up, d, activation)
    with checked():
        out = torch.empty(rows, columns, dtype=dtype)
        gated(gate, up, out, activation)
    close_to_exact(out, act(wide[0], activation) * wide[1], naive)
    before = d.clone()
    with checked():
        gated_backward_(d, gate, up, activation)
    assert torch.equal(d, before)
    for got, exact, stock in zip((gate, up), gradients(*wide, activation), naive_gradients, strict=True):
        close_to_exact(got, exact, stock)


def test_extreme_values() -> None:
    gate = torch.tensor([[-200.0, -30.0, -1e-6, 0.0, 1e-6, 30.0, 200.0]])
    for activation in ACTIVATIONS:
        up, out = torch.ones_like(gate), torch.empty_like(gate)
        with checked():
            gated(gate, up, out, activation)
        torch.testing.assert_close(out, act(gate, activation), rtol=1e-5, atol=1e-7)
        g, u = gate.clone(), up.clone()
        with checked():
            gated_backward_(torch.ones_like(gate), g, u, activation)
        torch.testing.assert_close(g, gradients(gate, up, torch.ones_like(gate), activation)[0], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("over", ["gate", "up"])
def test_forward_in_place(over: str) -> None:
    gate, up, _ = halves(2, 300, torch.float32, True)
    expected = F.silu(gate.double()) * up.double()
    with checked():
        got = gated(gate, up, gate if over == "gate" else up)
    close_to_exact(got, expected)


def test_shapes_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="of one dtype"):
        gated(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="side by side"):
        gated(torch.zeros(3, 2).t(), torch.zeros(2, 3), torch.zeros(2, 3))
