"""NF4 layers under FSDP2: codes and scales are cut by output row, and nothing that is computed changes by a bit."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from frugal.codecs.nf4 import NF4Linear


class Block(nn.Module):
    """A frozen NF4 layer beside a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = NF4Linear.from_linear(nn.Linear(192, 512).requires_grad_(False))
        self.adapter = nn.Linear(192, 512, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.adapter(x)


def run(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60))
    mesh = init_device_mesh("cpu", (2,))
    result = {}
    for policy in ("plain", "bf16"):
        torch.manual_seed(0)
        block = Block()
        x = torch.randn(4, 192, requires_grad=True)
        expected = block(x)
        (wanted,) = torch.autograd.grad(expected.sum(), x)
        dense = block.base.dequantize()
        options = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)} if policy == "bf16" else {}
        fully_shard(block, mesh=mesh, **options)
        out = block(x)
        out.float().sum().backward()
        assert x.grad is not None
        local = {name: list(p.to_local().shape) for name, p in block.base.named_parameters()}  # type: ignore[attr-defined]
        block.unshard()
        result[policy] = {
            "local": local,
            "same_output": torch.equal(out, expected),
            "same_gradient": torch.equal(x.grad, wanted),
            "same_weights": torch.equal(block.base.dequantize(), dense),
        }
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(run, args=(str(tmp_path),), nprocs=2)
    for rank in range(2):
        result = json.loads((tmp_path / f"{rank}.json").read_text())
        assert result["plain"]["local"] == {"weight": [256, 96], "absmax": [256, 3], "bias": [256]}
        assert result["plain"]["same_output"]
        assert result["plain"]["same_gradient"]
        # A mixed-precision policy casts floats; codes and scales are none.
        assert result["plain"]["same_weights"]
        assert result["bf16"]["same_weights"]
