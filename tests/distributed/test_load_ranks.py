"""A base loaded layer by layer in two ranks: each holds its half, and the model computes what it computes whole."""

from __future__ import annotations

import pytest
import torch

from tests.distributed.ranks.harness import Outcomes, run_cases
from tests.support.tiny_models import tiny_model

SAME = ["llama_tied_nf4", "llama_untied_none", "gemma2_nf4", "phi3_nf4", "llama_dora_nf4"]
PEAK = ["peak_nf4", "peak_none"]
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "head_dim": 64}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    models = tmp_path_factory.mktemp("models")
    for name, family, changes in (
        ("llama-tied", "llama", {"tie_word_embeddings": True}),
        ("llama", "llama", {"hidden_size": 64, "head_dim": 16}),
        ("gemma2", "gemma2", {"hidden_size": 64, "head_dim": 16}),
        ("phi3", "phi3", {"hidden_size": 64, "head_dim": 16}),
        ("deep", "mistral", {**WIDE, "num_hidden_layers": 8}),
    ):
        tiny_model(family, **changes).to(torch.bfloat16).save_pretrained(models / name)
    return run_cases(tmp_path_factory.mktemp("load"), "cases_load", SAME + PEAK, FRUGAL_TEST_MODELS=str(models))


@pytest.mark.parametrize("case", SAME)
def test_the_model_is_the_same(outcomes: Outcomes, case: str) -> None:
    reports = outcomes[case].reports
    for report in reports:
        assert report["names"]
        assert report["different"] == []
        assert report["meta"] == []
        assert report["loss"] == pytest.approx(report["expected"], rel=1e-6)
        assert report["gradients"]
        assert report["gradient_error"] < 1e-4
        # uneven rows are padded, and the shard of a rank may be empty
        assert 0.45 * report["whole"] < report["local"] < 0.55 * report["whole"]
    assert reports[0]["local"] + reports[1]["local"] == reports[0]["whole"]


@pytest.mark.parametrize("case", PEAK)
def test_no_rank_holds_the_base(outcomes: Outcomes, case: str) -> None:
    for report in outcomes[case].reports:
        tensor = 512 * 1024 * 2
        quantising = 3 * 4 * (1 << 17) if "nf4" in case else 0
        assert report["shards"] == pytest.approx(report["layers"] * report["layer"] / 2, rel=0.01)
        bound = report["shards"] + report["layer"] + report["rest"] + report["buffers"]
        assert report["peak"] <= bound + tensor + quantising
        assert report["end"] <= bound
