"""What a rank sends in a step, and how long that takes on common links beside an estimate of the step's computing.

Counted as rings do it: gathering or scattering B bytes over N ranks sends B (N - 1) / N from every rank, an all-reduce
twice that. Nothing is taken off for what overlaps with computing: FSDP2 fetches the next layer meanwhile, so a share
below a half is mostly hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from frugal.planning.sharding import Sharing

LINKS: dict[str, float] = {
    "PCIe 3.0 x16": 12e9,
    "PCIe 4.0 x16": 24e9,
    "NVLink (RTX 3090 bridge)": 45e9,
    "NVLink (A100)": 240e9,
    "10 Gb Ethernet": 1.1e9,
    "100 Gb Ethernet": 11e9,
}
"""Bytes a second in one direction that a ring reaches: about three quarters of a PCIe or NVLink number, nine tenths of
an Ethernet's. GPUs without peer access copy through the host and reach half of PCIe."""

UTILISATION = 0.4
"""Part of a GPU's nominal rate that a QLoRA step reaches."""
USUAL_FLOPS = 70e12
# Dense 16-bit matrix products with fp32 sums, 1e12 a second, from the makers' data sheets.
_TFLOPS = {
    "T4": 65, "V100 16GB": 125, "V100 32GB": 125, "RTX 3060": 26, "RTX 3060 Ti": 32, "RTX 3070": 41, "RTX 3080": 60,
    "RTX 3080 12GB": 61, "RTX 3090": 71, "RTX A4000": 77, "RTX A5000": 111, "RTX A6000": 155, "A10": 125, "A10G": 70,
    "A40": 150, "A30": 165, "A100 40GB": 312, "A100 80GB": 312, "RTX 4060": 30, "RTX 4060 Ti 16GB": 44,
    "RTX 4070": 58, "RTX 4070 Ti Super": 88, "RTX 4080": 97, "RTX 4090": 165, "L4": 60, "L40S": 362,
    "RTX 6000 Ada": 182, "H100 80GB": 989, "H200": 989, "B200": 2250, "RTX 5070": 62, "RTX 5070 Ti": 88,
    "RTX 5080": 113, "RTX 5090": 210, "RTX PRO 6000": 252,
}  # fmt: skip


def gpu_flops(name: str) -> float:
    """Nominal operations a second of a GPU, a usual one's where its name says nothing."""
    return _TFLOPS[name] * 1e12 if name in _TFLOPS else USUAL_FLOPS


def step_flops(
    *, parameters: int, embedding: int, trained: int, layers: int, width: int, rows: int, length: int, recompute: bool
) -> float:
    """Operations of one micro-batch of frozen weights with adapters.

    Each weight takes 2 a token forward, 2 in backward (its input's gradient alone), and 2 more where the layer is run
    again; an adapter 2 more for its own gradient. Causal attention over ``width`` = heads x head size takes
    2 x length x width a token and layer forward, two and a half times that backward.
    """
    tokens, passes = rows * length, 3 if recompute else 2
    products = 2 * (parameters - embedding) * passes + 2 * trained * (passes + 1)
    attention = 2 * length * width * layers * (3.5 + (1 if recompute else 0))
    return float(tokens * (products + attention))


def sent_bytes(sharing: Sharing) -> dict[str, int]:
    """Bytes that one rank sends in an optimizer step, by kind."""
    units, micro_batches = sharing.units, sharing.accumulation
    part = (sharing.world_size - 1) / sharing.world_size
    trained = units.trained * part
    if sharing.strategy == "ddp":
        return {"all-reduce of gradients": round(2 * trained)}
    if sharing.strategy in ("zero1", "zero2"):  # DeepSpeed reduces to all ranks (measured: benchmarks/sharding.py)
        return {"all-reduce of gradients": round(2 * trained), "all-gather of adapters": round(trained)}
    found = {"reduce-scatter of gradients": trained}
    if not sharing.shard_base:  # ZeRO-3 gathers adapters like everything else: for forward and again for backward
        times = 2 * micro_batches if sharing.strategy == "zero3" else 1
        found["all-gather of adapters"] = trained * times
        return {kind: round(count) for kind, count in found.items()}
    passes = 2 * micro_batches
    if sharing.strategy == "fsdp2":  # with every micro-batch, so that no whole gradients wait
        found["reduce-scatter of gradients"] *= micro_batches
    found["all-gather of the base, forward and backward"] = units.layers * units.layer_frozen * part * passes
    found["all-gather of adapters"] = units.layers * units.layer_trained * part * passes
    tables = units.embedding + units.head
    found["all-gather of embedding and head"] = tables * part * micro_batches
    found["all-gather of the rest"] = units.root * part * (passes if sharing.strategy == "zero3" else 1)
    return {kind: round(count) for kind, count in found.items() if count}


@dataclass(frozen=True)
class Network:
    """Traffic of one rank and what it costs."""

    sent: dict[str, int]
    """Bytes a step by kind."""
    step_seconds: float
    """Computing of one optimizer step on one rank, estimated."""
    flops_per_second: float
    gpus_per_host: int
    hosts: int

    @property
    def sent_bytes(self) -> int:
        """All of a step."""
        return sum(self.sent.values())

    def seconds(self, link: str) -> float:
        """Of a step's traffic over ``link``."""
        return self.sent_bytes / LINKS[link]

    def share(self, link: str) -> float:
        """Part of a step that the traffic would take, were nothing of it hidden."""
        return self.seconds(link) / (self.seconds(link) + self.step_seconds)

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "sent_bytes_per_step": self.sent_bytes,
            "sent_by_kind": self.sent,
            "step_seconds": self.step_seconds,
            "hosts": self.hosts,
            "gpus_per_host": self.gpus_per_host,
            "links": {
                link: {"bytes_per_second": rate, "seconds": self.seconds(link), "share_of_step": self.share(link)}
                for link, rate in LINKS.items()
            },
            "assumptions": self.assumptions(),
        }

    def assumptions(self) -> list[str]:
        """What the numbers rest on."""
        between = f"; {self.hosts} hosts: the slowest link is the network's" if self.hosts > 1 else ""
        return [
            f"computing at {self.flops_per_second / 1e12:.0f}e12 operations a second "
            f"({UTILISATION:.0%} of the nominal rate)",
            f"rings: a rank sends (N - 1) / N of what is gathered or reduced{between}",
            "links at the rates of links.*.bytes_per_second; nothing hidden behind computing",
        ]
