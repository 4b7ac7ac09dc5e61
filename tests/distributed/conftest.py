"""Tests of several processes, started through ranks/harness.py: every case has 60 s for a collective."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two ranks and the test share the cores."""
    import torch

    torch.set_num_threads(1)
