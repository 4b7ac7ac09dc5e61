# ruff: noqa: E501
"""Plant faults in the kernels, one at a time, and see the tests catch each: `make mutants`.

    python tests/kernels/mutants.py [--only WORD]

A fault is a replacement of text in a copy of one kernel's file in frugal/ops; the file's tests run against the copy in a
forked process. Exits with 1 if a fault survives, if its text is not there any more, or if the tests fail without one.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}

from tests.kernels.attention_mutants import ATTENTION_MUTANTS

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "nf4": "weights/triton.py", "rms_norm": "rms_norm/triton.py", "rope": "rope/triton.py",
    "gated": "gated_mlp/triton.py", "cross_entropy": "linear_cross_entropy/triton.py",
    "cross_entropy_once": "linear_cross_entropy/triton.py", "adam8bit": "adam8bit/triton.py",
    "attention": "attention/triton.py", "attention_backward": "attention/triton_backward.py",
}  # fmt: skip
SECONDS = 240  # of CPU time for one fault: a kernel that never ends is caught too, a busy machine catches nothing

# (kernel, its tests, what is wrong, text, replacement)
MUTANTS: list[tuple[str, str, str, str, str]] = [
    ("nf4", "nf4", "nibbles swapped", "tl.join(tl.load(CODE + (codes >> 4)), tl.load(CODE + (codes & 15)))\n    values",
     "tl.join(tl.load(CODE + (codes & 15)), tl.load(CODE + (codes >> 4)))\n    values"),
    ("nf4", "nf4", "offset of the scales dropped", " * nested + tl.load(OFFSET)", " * nested"),
    ("nf4", "nf4", "nested scale of the wrong group", "NESTED + block // 256", "NESTED + (block + 1) // 256"),
    ("nf4", "nf4", "scale of the block before", "start // 64 + local, local * 64", "start // 64, local * 64"),
    ("nf4", "nf4", "start ignored in the codes", "PACKED + start // 2 + byte", "PACKED + byte"),
    ("nf4", "nf4", "one element too many stored", "mask=element < count)", "mask=element <= count)"),
    ("nf4", "nf4", "last codes of an odd count not read", "mask=byte * 2 < count", "mask=byte * 2 + 1 < count"),
    ("nf4", "nf4", "scale of the update dropped", "(dense + lora_scale * update)", "(dense + update)"),
    ("nf4", "nf4", "first row ignored in B", "b_at = (first_row + row)", "b_at = row"),
    ("nf4", "nf4", "columns of A beyond the matrix", "mask=(inner[:, None] < rank) & column_in", "mask=inner[:, None] < rank"),
    ("nf4", "nf4", "rank not masked", "mask=row_in & (inner[None, :] < rank)", "mask=row_in"),
    ("nf4", "nf4", "TF32 products", 'input_precision="ieee"', 'input_precision="tf32"'),
    ("nf4", "real_sizes", "32-bit rows of the update's output", "out_at = row.to(tl.int64)[:, None]", "out_at = row[:, None]"),
    ("nf4", "real_sizes", "32-bit blocks", "tl.program_id(0).to(tl.int64) * BLOCKS", "tl.program_id(0) * BLOCKS"),
    ("rms_norm", "rms_norm", "eps dropped", "rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)\n        y",
     "rstd = tl.rsqrt(tl.sum(x * x, 1) / columns)\n        y"),
    ("rms_norm", "rms_norm", "mean over the padded row", "tl.sum(x * x, 1) / columns + eps)\n        y",
     "tl.sum(x * x, 1) / BLOCK + eps)\n        y"),
    ("rms_norm", "rms_norm", "offset added to y", "other=0.0).to(tl.float32) + offset\n    for step in range(STEPS):\n"
     "        row = (tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)\n"
     "        mask = (row[:, None] < rows) & inside[None, :]\n        x = tl.load(X + row[:, None] * stride_x + "
     "column[None, :], mask=mask, other=0.0).to(tl.float32)\n        rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)\n"
     "        y = x", "other=0.0).to(tl.float32)\n    for step in range(STEPS):\n"
     "        row = (tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS + tl.arange(0, ROWS)\n"
     "        mask = (row[:, None] < rows) & inside[None, :]\n        x = tl.load(X + row[:, None] * stride_x + "
     "column[None, :], mask=mask, other=0.0).to(tl.float32)\n        rstd = tl.rsqrt(tl.sum(x * x, 1) / columns + eps)\n"
     "        y = offset + x"),
    ("rms_norm", "rms_norm", "programs overlap by a row", "row = (tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS",
     "row = (tl.program_id(0) * (STEPS - 1) + step).to(tl.int64) * ROWS"),
    ("rms_norm", "rms_norm", "projection on x dropped", "(dy - normed * mean[:, None])", "dy"),
    ("rms_norm", "rms_norm", "weight left out of dx", "            dy = dy * weight[None, :]\n        mean",
     "            dy = dy * 1.0\n        mean"),
    ("rms_norm", "rms_norm", "weight's gradient after the weight", "total += tl.sum(dy * normed, 0)",
     "total += tl.sum(dy * weight[None, :] * normed, 0)"),
    ("rms_norm", "rms_norm", "last rows not masked", "mask = (row[:, None] < rows) & inside[None, :]",
     "mask = (row[:, None] <= rows) & inside[None, :]"),
    ("rms_norm", "rms_norm", "garbage in masked lanes", "column[None, :], mask=mask, other=0.0).to(tl.float32)\n        rstd",
     "column[None, :], mask=mask).to(tl.float32)\n        rstd"),
    ("rms_norm", "real_sizes", "32-bit rows", "(tl.program_id(0) * STEPS + step).to(tl.int64) * ROWS",
     "(tl.program_id(0) * STEPS + step) * ROWS"),
    ("rope", "rope", "sign of the sine", "(b * cos[None, :] + a * sin", "(b * cos[None, :] - a * sin"),
    ("rope", "rope", "first half overwritten before use", "b = tl.load(at + half, mask=mask, other=0.0)",
     "b = tl.load(at, mask=mask, other=0.0)"),
    ("rope", "rope", "backward turns forward", "        sin = -sin\n", "        sin = sin\n"),
    ("rope", "rope", "angles of the first row for all", "batch * c_batch + token", "token"),
    ("rope", "rope", "token of another row", "tl.program_id(0) // tokens", "tl.program_id(0) % tokens"),
    ("rope", "rope", "heads not masked", "mask = (head[:, None] < heads) & ", "mask = (head[:, None] <= heads) & "),
    ("rope", "rope", "key heads counted as query heads", "token * k_token, k_heads, k_head",
     "token * k_token, q_heads, k_head"),
    ("rope", "rope", "size in place of half", "tl.load(at + half, mask", "tl.load(at + HALF, mask"),
    ("rope", "real_sizes", "32-bit tokens", "(tl.program_id(0) % tokens).to(tl.int64)", "tl.program_id(0) % tokens"),
    ("gated", "gated", "tail not masked", "mask = column < columns\n    g", "mask = column <= columns\n    g"),
    ("gated", "gated", "slope of SiLU", "slope = s + value * (1.0 - s)\n", "slope = s + value * (1.0 + s)\n"),
    ("gated", "gated", "constant of GELU", "0.7071067811865476", "0.7071167811865476"),
    ("gated", "gated", "cubic term of tanh GELU", "0.044715 * g", "0.044615 * g"),
    ("gated", "gated", "gradients in each other's place", "(d * u * slope).to(GATE", "(d * value).to(GATE"),
    ("gated", "gated", "up's stride for the gate", "GATE + row * stride_gate + column, (d", "GATE + row * stride_grad + column, (d"),
    ("gated", "gated", "programs of one piece", "tl.program_id(0) % pieces).to(tl.int64) * BLOCK", "tl.program_id(0) % 1).to(tl.int64) * BLOCK"),
    ("gated", "real_sizes", "32-bit rows", "row = (tl.program_id(0) // pieces).to(tl.int64)",
     "row = tl.program_id(0) // pieces"),
    ("cross_entropy", "cross_entropy", "masked columns count as zero", 'z = tl.where(column < vocab, z, -float("inf"))',
     "z = tl.where(column < vocab, z, 0.0)"),
    ("cross_entropy", "cross_entropy", "sum not rescaled", "total = total * tl.exp(top - finite)", "total = total"),
    ("cross_entropy", "cross_entropy", "gradients of ignored rows left", "        if GRADIENT:\n            zero_row", "        if False:\n            zero_row"),
    ("cross_entropy", "cross_entropy", "target twice subtracted", "tl.where(column == label, d - hit, d) * slope",
     "tl.where(column == label, d - 2.0 * hit, d) * slope"),
    ("cross_entropy", "cross_entropy", "slope of the cap dropped", "d = tl.where(lane == label, d - hit, d) * slope",
     "d = tl.where(lane == label, d - hit, d) * scale"),
    ("cross_entropy", "cross_entropy", "mean over the padded vocabulary", "(lse - sum_z / vocab)", "(lse - sum_z / BLOCK)"),
    ("cross_entropy", "cross_entropy", "smoothing also off the target", "hit = 1.0 - smoothing", "hit = 1.0"),
    ("cross_entropy", "cross_entropy", "a piece skipped", "(pieces - 1 - back) * BLOCK", "(pieces - 2 - back) * BLOCK"),
    ("cross_entropy", "cross_entropy", "a piece of -inf", "tl.where(higher == -float(\"inf\"), 0.0, higher)", "higher"),
    ("cross_entropy", "cross_entropy", "stride ignored", "logits = LOGITS + row * stride", "logits = LOGITS + row * vocab"),
    ("cross_entropy", "real_sizes", "32-bit rows", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    ("cross_entropy_once", "cross_entropy", "masked columns count as zero", 'z = tl.where(column < vocab, z, -float("inf"))',
     "z = tl.where(column < vocab, z, 0.0)"),
    ("cross_entropy_once", "cross_entropy", "level never raised", "tl.where(top > level + allowed, top, level)",
     "tl.where(piece == 0, tl.maximum(top, level), level)"),
    ("cross_entropy_once", "cross_entropy", "sum not rescaled", "total = total * tl.exp(level - finite)", "total = total"),
    ("cross_entropy_once", "cross_entropy", "earlier pieces not rescaled", "if tl.load(levels) != last:", "if False:"),
    ("cross_entropy_once", "cross_entropy", "rescaled the wrong way", "tl.exp(written - last)", "tl.exp(last - written)"),
    ("cross_entropy_once", "cross_entropy", "a piece of -inf", 'tl.where(higher == -float("inf"), 0.0, higher)', "higher"),
    ("cross_entropy_once", "cross_entropy", "float16's total unbounded", "if total > most:", "if False:"),
    ("cross_entropy_once", "cross_entropy", "slope of the cap dropped", "0.0, e) * slope", "0.0, e) * scale"),
    ("cross_entropy_once", "cross_entropy", "label's own share dropped", "(tl.exp(target - last) - total)", "(0.0 - total)"),
    ("cross_entropy_once", "cross_entropy", "slope of the cap dropped at the label", "- total) * target_slope", "- total) * scale"),
    ("cross_entropy_once", "cross_entropy", "a factor of one", "1.0 / total)", "1.0)"),
    ("cross_entropy_once", "cross_entropy", "factor of ignored rows left", "tl.store(FACTOR + row, 0.0)", "pass"),
    ("cross_entropy_once", "cross_entropy", "gradients of ignored rows left", "        zero_row(logits, vocab, BLOCK)\n", "        pass\n"),
    ("cross_entropy_once", "cross_entropy", "levels of the first row for all", "levels = LEVELS + row * pieces", "levels = LEVELS"),
    ("cross_entropy_once", "cross_entropy", "stride ignored", "logits = LOGITS + row * stride", "logits = LOGITS + row * vocab"),
    ("cross_entropy_once", "real_sizes", "32-bit rows", "row = tl.program_id(0).to(tl.int64)", "row = tl.program_id(0)"),
    ("adam8bit", "adam8bit", "search stops early", "tl.static_range(8)", "tl.static_range(7)"),
    ("adam8bit", "adam8bit", "nearest becomes lower", "tl.where(tl.load(MAP + above) - value < value - tl.load(MAP + index), above, index)", "index"),
    ("adam8bit", "adam8bit", "decay dropped", "other=0.0).to(tl.float32) * decay", "other=0.0).to(tl.float32)"),
    ("adam8bit", "adam8bit", "correction of the second moment", "tl.sqrt(second) / correction2 + eps", "tl.sqrt(second) + eps"),
    ("adam8bit", "adam8bit", "gradient not squared", "rest2 * grad * grad", "rest2 * grad"),
    ("adam8bit", "adam8bit", "zero block divides by zero", "tl.where(scale == 0.0, 1.0, scale)", "scale"),
    ("adam8bit", "adam8bit", "scales not masked", "tl.store(ABSMAX + block, scale, mask=block < n_blocks)",
     "tl.store(ABSMAX + block, scale)"),
    ("adam8bit", "real_sizes", "32-bit blocks", "tl.program_id(0).to(tl.int64) * BLOCKS", "tl.program_id(0) * BLOCKS"),
    *ATTENTION_MUTANTS,
]  # fmt: skip


def overlay(folder: Path) -> None:
    """The repository by links, with frugal/ops as a copy."""
    (folder / "frugal").mkdir()
    for entry in (ROOT / "frugal").iterdir():
        if entry.name != "ops":
            (folder / "frugal" / entry.name).symlink_to(entry)
    for name in ("tests", "benchmarks"):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "frugal" / "ops", folder / "frugal" / "ops")


def passes(folder: Path, tests: str, file: str) -> bool:
    """Whether ``tests`` pass with the kernels in ``folder``, in a forked process."""
    child = os.fork()
    if child == 0:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)  # ends the child
        code = 1
        try:
            os.chdir(folder)
            sys.dont_write_bytecode = True
            import pytest

            path = str(folder / "tests" / "kernels" / "interpreted" / f"test_{tests}.py")
            select = [
                "-k",
                {
                    "adam8bit": "adam",
                    "cross_entropy": "cross_entropy and not once",
                    "cross_entropy_once": "once",
                    "rms_norm": "rms",
                }.get(file, file),
            ]
            with redirect_stdout(io.StringIO()):
                code = int(pytest.main([path, "-x", "-q", "--confcutdir", str(Path(path).parent), "-p", "no:cacheprovider",
                                        "-p", "no:xdist", "--rootdir", str(folder), "-o", f"pythonpath={folder}", *(select if tests == "real_sizes" else [])]))  # fmt: skip
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose file or description contains this")
    only = parser.parse_args().only
    chosen = [m for m in MUTANTS if only in f"{m[0]}: {m[2]}"]
    import bitsandbytes  # noqa: F401  (imported once for all processes)
    import triton.language  # noqa: F401

    failed = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overlay(folder)
        for file, tests in dict.fromkeys((m[0], m[1]) for m in chosen):
            if not passes(folder, tests, file):
                print(f"{file}: test_{tests}.py fails without a fault")
                return 1
        for number, (file, tests, what, text, replacement) in enumerate(chosen, 1):
            path = folder / "frugal" / "ops" / FILES[file]
            source = path.read_text(encoding="utf-8")
            began = time.perf_counter()
            if source.count(text) == 0:
                outcome = "TEXT NOT FOUND"
            else:
                path.write_text(source.replace(text, replacement), encoding="utf-8")
                outcome = "SURVIVED" if passes(folder, tests, file) else "caught"
                path.write_text(source, encoding="utf-8")
            if outcome != "caught":
                failed.append(f"{file}: {what}: {outcome}")
            print(
                f"{number:3}/{len(chosen)} {file:14} {what:44} {outcome} ({time.perf_counter() - began:.1f} s)",
                flush=True,
            )
    print("\n".join([*failed, f"{len(chosen) - len(failed)} of {len(chosen)} faults caught"]))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
