"""Each operation, plain definition against frugal torch form: peak bytes and seconds of forward and backward, as CSV.

    python benchmarks/ops.py                      # sizes of SmolLM2-135M, 2 x 512 tokens -> benchmarks/results/ops.csv
    python benchmarks/ops.py --quick --out FILE   # tiny sizes: does it run

Peak bytes are those above what lives before the operation (weights, inputs), from the live-bytes meter; seconds are the
median of interleaved repeats, in wall and CPU time. The definition keeps whatever autograd keeps.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import environment
from torch import Tensor

from frugal import ops
from frugal.codecs.nf4 import quantize_nf4
from frugal.files import atomic_path
from frugal.memory.meter import LiveBytesMeter
from frugal.ops.projection import Projection


@dataclass(frozen=True)
class Sizes:
    """Sizes of one run."""

    rows: int = 2
    tokens: int = 512
    hidden: int = 576
    mlp: int = 1536
    vocab: int = 49152
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    rank: int = 16


@dataclass(frozen=True)
class Case:
    """One operation: the same leaves through both forms."""

    name: str
    shape: str
    leaves: list[Tensor]
    reference: Callable[[], Tensor]
    frugal: Callable[[], Tensor]


def leaf(*shape: int, scale: float = 1.0, grad: bool = True) -> Tensor:
    """A random tensor that may get a gradient."""
    return (torch.randn(*shape) * scale).requires_grad_(grad)


def cases(s: Sizes) -> list[Case]:
    """The operations at the sizes of a model."""
    n = s.rows * s.tokens
    found: list[Case] = []

    hidden, head = leaf(n, s.hidden), leaf(s.vocab, s.hidden, scale=s.hidden**-0.5, grad=False)
    labels = torch.randint(0, s.vocab, (n,))
    found.append(Case(
        "linear_cross_entropy", f"{n}x{s.hidden}x{s.vocab}", [hidden],
        lambda: ops.linear_cross_entropy_reference(hidden, head, labels),
        lambda: ops.linear_cross_entropy(hidden, head, labels),
    ))  # fmt: skip

    q, k, v = (leaf(s.rows, s.tokens, h, s.head_size).detach().transpose(1, 2).requires_grad_()
               for h in (s.heads, s.kv_heads, s.kv_heads))  # fmt: skip
    offsets = [0, n // 3, s.tokens, n]
    for name, kw in (("causal", {}), ("packed", {"cu_seqlens": offsets}), ("window", {"window": s.tokens // 8}),
                     ("softcap", {"softcap": 50.0})):  # fmt: skip
        found.append(Case(
            f"attention {name}", f"{s.rows}x{s.heads}/{s.kv_heads}x{s.tokens}x{s.head_size}", [q, k, v],
            lambda kw=kw: ops.attention_reference(q, k, v, **kw),
            lambda kw=kw: ops.attention(q, k, v, **kw),
        ))  # fmt: skip

    def projection(n_out: int, n_in: int) -> Projection:
        weight = quantize_nf4(torch.randn(n_out, n_in) * n_in**-0.5)
        return Projection(weight, None, (leaf(s.rank, n_in, scale=n_in**-0.5), leaf(n_out, s.rank), 2.0))

    x, gate, up, down = leaf(n, s.hidden), projection(s.mlp, s.hidden), projection(s.mlp, s.hidden), None
    down = projection(s.hidden, s.mlp)
    adapters = [t for p in (gate, up, down) for t in p.tensors() if t is not None]
    found.append(Case(
        "lora_linear nf4", f"{n}x{s.hidden}x{s.mlp}", [x, *gate.lora[:2]],
        lambda: ops.lora_linear_reference(x, gate.weight, lora=gate.lora),
        lambda: ops.lora_linear(x, gate.weight, lora=gate.lora),
    ))  # fmt: skip
    found.append(Case(
        "gated_mlp nf4", f"{n}x{s.hidden}x{s.mlp}", [x, *adapters],
        lambda: ops.gated_mlp_reference(x, (gate, up), down),
        lambda: ops.gated_mlp(x, (gate, up), down),
    ))  # fmt: skip

    weight = leaf(s.hidden)
    found.append(Case(
        "rms_norm", f"{n}x{s.hidden}", [x, weight],
        lambda: ops.rms_norm_reference(x, weight, 1e-5), lambda: ops.rms_norm(x, weight, 1e-5),
    ))  # fmt: skip
    angle = torch.rand(s.tokens, s.head_size)
    cos, sin = angle.cos(), angle.sin()
    found.append(Case(
        "rope", f"{s.rows}x{s.heads}x{s.tokens}x{s.head_size}", [q],
        lambda: ops.rope_reference(q * 1, cos, sin), lambda: ops.rope(q * 1, cos, sin, in_place=True),
    ))  # fmt: skip
    return found


def run(make: Callable[[], Tensor], leaves: list[Tensor]) -> tuple[float, float]:
    """Wall and CPU seconds of forward and backward."""
    for t in leaves:
        t.grad = None
    wall, cpu = time.perf_counter(), time.process_time()
    y = make()
    y.backward(torch.ones_like(y))
    return time.perf_counter() - wall, time.process_time() - cpu


def peak_bytes(make: Callable[[], Tensor], leaves: list[Tensor]) -> int:
    """Bytes above what lived before: output, what was kept, gradients and temporaries at their worst moment."""
    for t in leaves:
        t.grad = None
    with LiveBytesMeter() as meter:
        run(make, leaves)
    report = meter.report()
    return report.peak_bytes - report.start_bytes


def main() -> None:
    """Measure all cases and write the CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "ops.csv")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, one repeat")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    sizes = Sizes(2, 24, 32, 64, 300, 4, 2, 8, 4) if arguments.quick else Sizes()
    torch.manual_seed(0)
    about = environment()
    rows: list[dict[str, object]] = []
    for case in cases(sizes):
        forms = {"reference": case.reference, "frugal": case.frugal}
        peaks = {name: peak_bytes(make, case.leaves) for name, make in forms.items()}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in forms}
        for _ in range(1 if arguments.quick else arguments.repeats):
            for name, make in forms.items():
                times[name].append(run(make, case.leaves))
        for name in forms:
            rows.append({
                "op": case.name, "shape": case.shape, "form": name, "dtype": "float32", "peak_bytes": peaks[name],
                "seconds": round(statistics.median(t[0] for t in times[name]), 6),
                "cpu_seconds": round(statistics.median(t[1] for t in times[name]), 6),
                "device": f"{about['processor']} {about['cpu_capability']}", "threads": about["threads"],
                "torch": about["versions"]["torch"], "commit": about["commit"],
            })  # fmt: skip
        ours, plain = rows[-1], rows[-2]
        print(f"{case.name:22} {case.shape:20} bytes {ours['peak_bytes'] / max(1, plain['peak_bytes']):6.3f}x  "
              f"cpu seconds {ours['cpu_seconds'] / max(1e-9, plain['cpu_seconds']):6.2f}x", flush=True)  # fmt: skip
    with atomic_path(arguments.out) as path, path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    print(f"written to {arguments.out}")


if __name__ == "__main__":
    main()
