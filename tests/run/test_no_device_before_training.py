"""B01: importing, validating, preparing data touches no device; training twice in one process works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from tests.support import runs

SCRIPT = """
import sys, threading
import torch
touched = []
def record(*args, **kwargs):
    touched.append("".join(__import__("traceback").format_stack(limit=6)))
    raise RuntimeError("a device was opened")
torch.cuda._lazy_init = record
torch._C._cuda_init = record
if hasattr(torch._C, "_cuda_getDeviceCount"):
    torch._C._cuda_getDeviceCount = record

import frugal
config = frugal.load_config(sys.argv[1])
import frugal.run.train
frugal.preview(config, rows=1, html=sys.argv[2])
assert not touched, touched[0]
assert not torch.cuda.is_initialized()
print("clean")
"""


def test_import_validate_and_prepare_touch_no_device(tmp_path: Path, tiny_llama_folder: Path) -> None:
    config = runs.config(tiny_llama_folder, runs.write_rows(tmp_path / "rows.jsonl"), tmp_path / "run")
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "c.yaml"), str(tmp_path / "page.html")],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("clean\n")
    assert (tmp_path / "page.html").exists()
    assert not (tmp_path / "run").exists()
