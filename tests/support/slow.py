"""Tests that `make test-quick` leaves out: they start whole runs, processes, compilers or the interpreter of kernels.

One list, by what was measured in CPU seconds: the quick part is to stay under 2 minutes on two cores. Tests with the
marker `model`, or marked `slow` themselves, are left out too.
"""

from pathlib import Path

TESTS = Path(__file__).parents[1]

SLOW = (
    "benchmarks/",
    "checkpoints/test_disk_full.py",
    "checkpoints/test_killed_while_saving.py",
    "codecs/test_sharding.py",
    "convergence/",
    "distributed/",
    "inference/",
    "kernels/interpreted/",
    "kernels/test_attention_compile.py",
    "kernels/test_kernels_compile.py",
    "kernels/test_kernels_interpreted.py",
    "planning/test_forecast.py",
    "planning/test_load_forecast.py",
    "planning/test_plan.py",
    "planning/test_ranks.py",
)


def is_slow(path: Path) -> bool:
    """Whether a test file is in the list."""
    return path.relative_to(TESTS).as_posix().startswith(SLOW)
