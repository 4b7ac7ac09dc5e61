"""Kernels in Triton's interpreter: slow per operation, so few programs and one thread."""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    raise pytest.UsageError("these tests need TRITON_INTERPRET=1; run tests/kernels/test_kernels_interpreted.py")

torch.set_num_threads(1)
