"""Cases of test_preflight.py: right set-ups pass, each silent trap is refused."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from frugal.codecs.nf4 import NF4Linear
from frugal.config import TrainSection
from frugal.distributed.fsdp2 import FullyShard
from frugal.distributed.sanity_checks import preflight
from frugal.distributed.strategy import DataParallel
from frugal.distributed.zero.config import ZeroSettings
from frugal.distributed.zero.engine import Zero
from frugal.errors import FrugalError
from frugal.model_structure import decoder_layers
from frugal.objectives import LossModule
from frugal.training.optim import build_optimizer, trainable
from tests.distributed.ranks.sharded_runs import Setting, tiny
from tests.distributed.ranks.worker import Rank

CPU = torch.device("cpu")


def message(strategy: Any, wrapped: Any, module: nn.Module, optimizer: Any, norm: float = 1.0) -> str:
    try:
        preflight(strategy, wrapped, module, optimizer, max_grad_norm=norm)
    except FrugalError as error:
        return str(error)
    return ""


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return build_optimizer(trainable(module), TrainSection())


def case_right(rank: Rank) -> dict[str, Any]:
    found = {}
    for name, strategy in {
        "ddp": DataParallel(CPU),
        "fsdp2": FullyShard(CPU),
        "adapters": FullyShard(CPU, shard_base=False),
    }.items():
        module = LossModule(tiny(Setting()))
        wrapped, optimizer = strategy.prepare(module, lambda module=module: optimizer_of(module))
        checked = preflight(strategy, wrapped, module, optimizer, max_grad_norm=1.0)
        found[name] = {"local": checked.local, "whole": checked.whole}
    return found


def case_zero(rank: Rank) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (2, 3):
        strategy = Zero(CPU, ZeroSettings(stage=stage, micro_batch=1, accumulation=1, max_grad_norm=1.0))
        module = LossModule(tiny(Setting()))
        wrapped, optimizer = strategy.prepare(module, lambda module=module: optimizer_of(module))
        checked = preflight(strategy, wrapped, module, optimizer, max_grad_norm=1.0)
        found[str(stage)] = {"local": checked.local, "whole": checked.whole}
        found["clipping"] = message(strategy, wrapped, module, optimizer, norm=0.5)
        strategy.close()
    return found


def case_whole_codes(rank: Rank) -> dict[str, Any]:
    """What accelerate's FSDP2 does: every parameter is cut but the 4-bit ones."""
    strategy, module = FullyShard(CPU), LossModule(tiny(Setting()))
    mesh = init_device_mesh("cpu", (rank.world,))
    codes = {p for layer in module.modules() if isinstance(layer, NF4Linear) for p in (layer.weight, layer.absmax)}
    for layer in decoder_layers(module).values():
        fully_shard(layer, mesh=mesh, ignored_params=codes)
    wrapped = fully_shard(module, mesh=mesh, ignored_params=codes)
    return {"said": message(strategy, wrapped, module, optimizer_of(module))}


def case_no_wrapper(rank: Rank) -> dict[str, Any]:
    module = LossModule(tiny(Setting()))
    return {"said": message(DataParallel(CPU), module, module, optimizer_of(module))}


def case_stale_optimizer(rank: Rank) -> dict[str, Any]:
    """Built before the model is sharded: it steps tensors that nothing uses any more."""
    strategy, module = FullyShard(CPU), LossModule(tiny(Setting()))
    early = optimizer_of(module)
    wrapped, _ = strategy.prepare(module, lambda: optimizer_of(module))
    return {"said": message(strategy, wrapped, module, early)}


def case_other_optimizer(rank: Rank) -> dict[str, Any]:
    from bitsandbytes.optim import Adam8bit

    strategy, module = FullyShard(CPU), LossModule(tiny(Setting()))
    wrapped, _ = strategy.prepare(module, lambda: optimizer_of(module))
    return {"said": message(strategy, wrapped, module, Adam8bit(trainable(module).values()))}


def case_float_storage(rank: Rank) -> dict[str, Any]:
    module = LossModule(tiny(Setting()))
    layer = next(layer for layer in module.modules() if isinstance(layer, NF4Linear))
    layer.weight = nn.Parameter(layer.weight.data.view(torch.float16), requires_grad=False)
    wrapped, optimizer = DataParallel(CPU).prepare(module, lambda: optimizer_of(module))
    return {"said": message(DataParallel(CPU), wrapped, module, optimizer)}
