"""S01: what a sharded run saves is what one process saves: no empty tensor, no frozen base, a saved module whole."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from frugal.run.train import train
from tests.distributed.ranks import cases_saved, resumed_runs
from tests.distributed.ranks.harness import Outcomes, run_cases
from tests.support.runs import write_rows

ADAPTER = "adapter_model.safetensors"
DEEPSPEED = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="deepspeed is not installed: pip install deepspeed"
)
pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(scope="module")
def place(make_tiny_llama: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINY", str(make_tiny_llama(tie_word_embeddings=False)))
        patch.setenv("ROWS", str(write_rows(root / "rows.jsonl", 23)))
        patch.setenv("RUNS", str(root))
        train(resumed_runs.config(root / "one", 1, **cases_saved.SECTIONS))
        yield root


@pytest.fixture(scope="module")
def outcomes(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    names = ["fsdp2", *(["zero3"] if importlib.util.find_spec("deepspeed") else [])]
    return run_cases(tmp_path_factory.mktemp("two"), "cases_saved", names, timeout=900)


@pytest.mark.parametrize("strategy", ["fsdp2", pytest.param("zero3", marks=DEEPSPEED)])
def test_saved_whole(place: Path, outcomes: Outcomes, strategy: str) -> None:
    assert outcomes[strategy].world == 2
    for folder in ("", "checkpoint-3"):
        mine, one = place / strategy / folder, place / "one" / folder
        got, want = load_file(mine / ADAPTER), load_file(one / ADAPTER)
        assert {key: (t.shape, t.dtype) for key, t in got.items()} == {k: (t.shape, t.dtype) for k, t in want.items()}
        assert any("lm_head" in key for key in got)
        for key, tensor in got.items():
            assert tensor.numel() > 0, key
            assert float((tensor - want[key]).abs().max()) < 1e-5, key
    files = {path.name: path.stat().st_size for path in (place / strategy / "checkpoint-3").glob("*.safetensors")}
    assert set(files) == {ADAPTER, "optimizer.safetensors", "rng.safetensors"}
    adapter = sum(tensor.nbytes for tensor in load_file(place / "one" / ADAPTER).values())
    saved = files[ADAPTER] + files["optimizer.safetensors"]
    assert saved <= 1.1 * 3 * adapter, "adapter and two moments, nothing of the base"
