"""M01: merging an adapter that was trained over a 4-bit base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.codecs.nf4 import dequantize_nf4, quantize_nf4
from frugal.exports.merge_math import LoraUpdate, Maker, WeightPlan
from frugal.exports.registry import merge
from frugal.tensor_files import read_header
from tests.support.merged import logits_here, logits_of, make_run


@pytest.fixture
def layer(tmp_path: Path) -> tuple[dict[str, torch.Tensor], WeightPlan]:
    """Weights N(0, 1) 64 x 64 and a delta whose entries are about 1e-3, stored in bfloat16 and float32."""
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "w": torch.randn(64, 64, generator=generator).to(torch.bfloat16),
        "a": torch.randn(4, 64, generator=generator) * 0.05,
        "b": torch.randn(64, 4, generator=generator) * 0.01,
    }
    save_file(tensors, tmp_path / "layer.safetensors")
    stored = read_header(tmp_path / "layer.safetensors")
    update = LoraUpdate(stored["a"], stored["b"], scaling=1.0, transposed=False)
    return tensors, WeightPlan(stored["w"], (64, 64), update=update, quantized=True)


def test_the_three_ways_on_one_layer(layer: tuple[dict[str, torch.Tensor], WeightPlan]) -> None:
    tensors, plan = layer
    delta = tensors["b"] @ tensors["a"]
    assert 5e-4 < float(delta.abs().mean()) < 2e-3
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1))
    held = dequantize_nf4(quantize_nf4(tensors["w"]), torch.float32)
    trained = x @ held.T + x @ tensors["a"].T @ tensors["b"].T  # base + adapter, what the user tested

    def merged(dequantized: bool, dtype: torch.dtype) -> tuple[torch.Tensor, Maker]:
        maker = Maker(dequantized, double_quant=True, measure=True)
        return torch.cat(list(maker.producer(plan, dtype)())), maker

    exact, _ = merged(True, torch.float32)
    torch.testing.assert_close(x @ exact.T, trained, rtol=1e-5, atol=1e-5)
    rounded, maker = merged(True, torch.bfloat16)
    assert torch.equal(rounded, (held + delta).to(torch.bfloat16))  # (a): to 16-bit rounding, nothing else
    original, _ = merged(False, torch.float32)
    torch.testing.assert_close(original, tensors["w"].float() + delta, rtol=1e-6, atol=1e-6)  # (b)
    apart = float((x @ original.T - trained).norm() / trained.norm())
    assert 0.05 < apart < 0.15  # the quantisation error that the adapter never saw the lack of

    report = maker.difference.report()
    error = (held - tensors["w"].float()).norm() / tensors["w"].float().norm()
    assert report["quantization_error_over_weights"] == pytest.approx(float(error), rel=1e-4)
    assert report["update_over_weights"] == pytest.approx(float(delta.norm() / tensors["w"].float().norm()), rel=1e-2)

    again = dequantize_nf4(quantize_nf4(exact), torch.float32)  # (c), which frugal does not offer: the update is gone
    lost = float(((again - held) - delta).norm() / delta.norm())
    assert lost > 0.9


def test_export_claims_no_4_bit_and_loads_the_same_twice(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = make_run(tmp_path / "run", tiny_llama_folder)
    reports = {name: merge(tmp_path / "run", tmp_path / name, weights=name) for name in ("dequantized", "original")}
    for name, report in reports.items():
        config = json.loads((tmp_path / name / "config.json").read_text())
        assert "quantization_config" not in config
        assert report.weights == name
        assert any("differ by" in line for line in report.lines())
        assert report.difference["quantization_error_over_weights"] > 0.05
        first, second = logits_here(tmp_path / name), logits_here(tmp_path / name)
        assert torch.equal(first, second)
    torch.testing.assert_close(logits_here(tmp_path / "dequantized"), logits_of(model), rtol=1e-4, atol=2e-5)
    assert float((logits_here(tmp_path / "original") - logits_of(model)).abs().max()) > 1e-2
    saved = load_file(tmp_path / "original" / "model.safetensors")
    stock = load_file(tiny_llama_folder / "model.safetensors")
    assert torch.equal(saved["model.embed_tokens.weight"], stock["model.embed_tokens.weight"])


def test_a_quantised_base_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    import shutil

    base = tmp_path / "base"
    shutil.copytree(tiny_llama_folder, base)
    make_run(tmp_path / "run", base)
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "quantization_config": {"load_in_4bit": True}}))
    result = CliRunner().invoke(app, ["merge", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert result.exit_code == 2
    assert "the entry is stale" in result.stderr
    assert "--base" in result.stderr
    assert not (tmp_path / "out").exists()
