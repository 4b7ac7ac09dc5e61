"""Tests of several processes. They start ranks through harness.py, in which every case has 60 s for a collective."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

for folder in (Path(__file__).parent, Path(__file__).parent.parent / "train"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two ranks and the test share the cores."""
    import torch

    torch.set_num_threads(1)
