"""The accelerator and the device of this process."""

from __future__ import annotations

import datetime
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, InitProcessGroupKwargs

from frugal.device import Device, describe


def make_accelerator(run_dir: Path, report_to: list[str], *, timeout_seconds: float) -> Accelerator:
    """accelerate's view of this process: device, process group, trackers. Mixed precision is frugal's own business.

    A GPU is used when there is one. Frozen buffers are not broadcast at every forward pass: no rank changes them.
    ``timeout_seconds``: of an operation of the process group, the one that carries gradients.
    """
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no",
        log_with=list(report_to) or None,
        project_dir=str(run_dir),
        kwargs_handlers=[
            DistributedDataParallelKwargs(broadcast_buffers=False),
            # without it: 10 minutes for NCCL, 30 for gloo
            InitProcessGroupKwargs(timeout=datetime.timedelta(seconds=timeout_seconds)),
        ],
    )


def device_of(accelerator: Accelerator) -> Device:
    """The device this process computes on; accelerate has made it the current one."""
    return describe("cuda" if accelerator.device.type == "cuda" else "cpu")
