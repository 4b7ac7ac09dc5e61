"""Run by test_resume_exact.py in a new process: resumes every run of a list. Argument: list of [config, resume]."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from frugal.run.train import train

torch.set_num_threads(1)
for config, resume in json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")):
    train(config, resume=resume)
