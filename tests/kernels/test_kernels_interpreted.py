"""Each file of interpreted/ in a process of its own, with Triton's interpreter. Its output is shown when it fails."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

FOLDER = Path(__file__).parent / "interpreted"
FILES = sorted(path.name for path in FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", FILES)
def test_interpreted(name: str) -> None:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", str(FOLDER / name), "-p", "no:cacheprovider", "-p", "no:xdist",
               "--confcutdir", str(FOLDER), "--durations", "3"]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, f"{done.stdout[-12000:]}\n{done.stderr[-3000:]}"
    assert re.search(r"\d+ passed", done.stdout), done.stdout
    assert "skipped" not in done.stdout, done.stdout
