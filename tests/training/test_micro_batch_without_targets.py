"""N04, the training side: a micro-batch with nothing to train adds exactly 0 to loss and gradient, never 0/0."""

from __future__ import annotations

import pytest
import torch

from frugal.data import collate
from frugal.models.attention import use_attention
from frugal.objectives import LossModule
from tests.support import training as toy


@pytest.mark.parametrize("flat", [False, True])
def test_no_target_is_exactly_zero(flat: bool) -> None:
    model = toy.tiny_model()
    if flat:
        use_attention(model.get_base_model())
    module = LossModule(model)
    data = toy.rows([0, 0, 3])
    empty = collate([data[0], data[1]], 0, flat=flat)
    loss, sums = module(empty)
    loss.backward()
    assert (loss.item(), sums.tolist()) == (0.0, [0.0, 0.0])
    gradients = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is None or not gradient.any() for gradient in gradients)

    # and it changes nothing in a window with others
    good = collate([data[2]], 0, flat=flat)
    model.zero_grad()
    module(good)[0].backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    module(empty)[0].backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, alone[name]), name
