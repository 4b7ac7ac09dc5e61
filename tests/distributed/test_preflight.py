"""A prepared run is what was asked for, or is refused: sharded 4-bit storage, wrapper, optimizer, storage, clipping."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.ranks.harness import Outcomes, run_cases

TRAPS = {
    "whole_codes": "was to be cut over 2 processes, but this one holds",
    "no_wrapper": "each process would train alone",
    "stale_optimizer": "must be built after the model is sharded",
    "other_optimizer": "bitsandbytes.optim.adam.Adam8bit cannot step shards",
    "float_storage": "holds 4-bit storage as torch.float16",
}
WITH_DEEPSPEED = importlib.util.find_spec("deepspeed") is not None


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, make_tiny_llama: Callable[..., Path]) -> Outcomes:
    base = make_tiny_llama(num_hidden_layers=4, tie_word_embeddings=False)
    cases = ["right", *TRAPS, *(["zero"] if WITH_DEEPSPEED else [])]
    return run_cases(tmp_path_factory.mktemp("preflight"), "cases_preflight", cases, TINY_UNTIED=str(base))


def test_right_setups_pass_and_are_counted(outcomes: Outcomes) -> None:
    for report in outcomes["right"].reports:
        for name, cut in {"ddp": (), "adapters": ("trained",), "fsdp2": ("nf4", "base", "trained")}.items():
            for kind, whole in report[name]["whole"].items():
                share = report[name]["local"][kind] / whole
                assert share == pytest.approx(0.5 if kind in cut else 1.0, abs=0.03), (name, kind)


@pytest.mark.skipif(not WITH_DEEPSPEED, reason="needs deepspeed")
def test_zero(outcomes: Outcomes) -> None:
    for report in outcomes["zero"].reports:
        for stage, share in (("2", 1.0), ("3", 0.5)):
            for kind, whole in report[stage]["whole"].items():
                assert report[stage]["local"][kind] / whole == pytest.approx(share, abs=0.03), (stage, kind)
        assert "DeepSpeed clips gradients at 1.0, and train.max_grad_norm is 0.5" in report["clipping"]


@pytest.mark.parametrize("trap", TRAPS)
def test_traps_are_refused(outcomes: Outcomes, trap: str) -> None:
    for report in outcomes[trap].reports:
        assert TRAPS[trap] in report["said"]
