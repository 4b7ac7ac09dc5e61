"""Tensors without memory, which plans are made of."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def is_fake(value: Any) -> bool:
    """A fake tensor of any device, or a tensor on the ``meta`` device: it has a shape and no values.

    Plans for GPUs run on plain ``meta`` tensors, which torch's C++ handles several times as fast as fake ones.
    """
    return isinstance(value, FakeTensor) or (isinstance(value, torch.Tensor) and value.device.type == "meta")
