"""GPUs by name: memory and compute capability, for plans made where the GPU is not."""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from frugal.errors import ConfigError


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU."""

    name: str
    total_bytes: int
    """What the driver reports: a little less than the printed size for some, so plans keep an allowance anyway."""
    capability: tuple[int, int]

    @property
    def has_bf16(self) -> bool:
        """bfloat16 arithmetic in hardware."""
        return self.capability >= (8, 0)


_GIB = 1 << 30
# name -> (GiB, compute capability)
_TABLE: dict[str, tuple[float, tuple[int, int]]] = {
    "GTX 1660": (6, (7, 5)), "RTX 2060": (6, (7, 5)), "RTX 2070": (8, (7, 5)), "RTX 2080": (8, (7, 5)),
    "RTX 2080 Ti": (11, (7, 5)), "T4": (15, (7, 5)), "V100 16GB": (16, (7, 0)), "V100 32GB": (32, (7, 0)),
    "RTX 3050": (8, (8, 6)), "RTX 3060": (12, (8, 6)), "RTX 3060 Ti": (8, (8, 6)), "RTX 3070": (8, (8, 6)),
    "RTX 3080": (10, (8, 6)), "RTX 3080 12GB": (12, (8, 6)), "RTX 3090": (24, (8, 6)), "RTX A4000": (16, (8, 6)),
    "RTX A5000": (24, (8, 6)), "RTX A6000": (48, (8, 6)), "A10": (24, (8, 6)), "A10G": (22.5, (8, 6)),
    "A16": (16, (8, 6)), "A40": (48, (8, 6)), "A30": (24, (8, 0)), "A100 40GB": (40, (8, 0)),
    "A100 80GB": (80, (8, 0)), "RTX 4060": (8, (8, 9)), "RTX 4060 Ti 16GB": (16, (8, 9)), "RTX 4070": (12, (8, 9)),
    "RTX 4070 Ti Super": (16, (8, 9)), "RTX 4080": (16, (8, 9)), "RTX 4090": (24, (8, 9)), "L4": (22.5, (8, 9)),
    "L40S": (45, (8, 9)), "RTX 6000 Ada": (48, (8, 9)), "H100 80GB": (80, (9, 0)), "H200": (140, (9, 0)),
    "B200": (180, (10, 0)), "RTX 5060 Ti 16GB": (16, (12, 0)), "RTX 5070": (12, (12, 0)),
    "RTX 5070 Ti": (16, (12, 0)), "RTX 5080": (16, (12, 0)), "RTX 5090": (32, (12, 0)),
    "RTX PRO 6000": (96, (12, 0)),
}  # fmt: skip

GPUS: dict[str, Gpu] = {name: Gpu(name, int(size * _GIB), capability) for name, (size, capability) in _TABLE.items()}


def _key(name: str) -> str:
    return re.sub(r"nvidia|geforce|tesla|[^a-z0-9]", "", name.lower())


def find_gpu(name: str) -> Gpu:
    """A GPU by its name, written loosely: "rtx3060", "NVIDIA GeForce RTX 3060", "a100" (the smaller one).

    Raises ConfigError naming close ones.
    """
    keys = {_key(known): gpu for known, gpu in GPUS.items()}
    wanted = _key(name)
    if wanted in keys:
        return keys[wanted]
    sized = sorted(
        (gpu.total_bytes, key) for key, gpu in keys.items() if re.fullmatch(re.escape(wanted) + r"\d+gb", key)
    )
    if sized and wanted:
        return keys[sized[0][1]]
    close = difflib.get_close_matches(wanted, keys, n=3, cutoff=0.5)
    shown = ", ".join(keys[key].name for key in close) or ", ".join(GPUS)
    raise ConfigError(f"--gpu {name!r} is not in the table. Close: {shown}. Any other: give its memory, --vram 12GB.")
