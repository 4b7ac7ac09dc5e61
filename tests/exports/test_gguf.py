"""GGUF and LoRA-GGUF files hold the trained model: read back, they answer as stock transformers with PEFT does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.errors import CheckpointError, ConfigError, UnsupportedError
from frugal.exports import gguf_families, gguf_file, gguf_formats
from frugal.exports.gguf_vocab import cut_name
from frugal.exports.registry import export
from tests.conftest import make_tokenizer
from tests.support.merged import make_run
from tests.support.tiny_models import FAMILIES, tiny_model


def base_of(folder: Path, family: str, **changes: Any) -> Path:
    tiny_model(family, vocab_size=300, **changes).save_pretrained(folder)
    make_tokenizer(300).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_comes_back_as_it_was_trained(family: str, tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", family)
    make_run(tmp_path / "run", base, quantize="none")
    report = export(tmp_path / "run", tmp_path / "out", "gguf", type="f32")
    assert isinstance(report, gguf_formats.GgufReport)
    assert report.proof is not None
    assert report.proof.log_prob < 1e-4
    assert report.proof.update_kl > 1e-5, "the adapter changes something, so a no-op would be seen"
    assert json.loads((tmp_path / "out" / "proof.json").read_text())["passed"]
    half = export(tmp_path / "run", tmp_path / "half", "gguf", type="f16")
    assert isinstance(half, gguf_formats.GgufReport)
    assert half.proof is not None
    assert half.proof.log_prob < 5e-3
    lora = export(tmp_path / "run", tmp_path / "lora", "lora-gguf", type="f32")
    assert isinstance(lora, gguf_formats.GgufReport)
    assert lora.proof is not None
    assert lora.proof.log_prob < 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run over a llama of tied head, rows of 64 so that 8-bit blocks divide them, with an rsLoRA scale."""
    folder = tmp_path_factory.mktemp("gguf")
    base = base_of(
        folder / "base", "llama", hidden_size=64, head_dim=16, tie_word_embeddings=True, intermediate_size=96
    )
    make_run(folder / "run", base, size=0.1, use_rslora=True)
    return folder / "run"


def test_8_bits_are_close_and_other_types_say_how_they_are_made(trained: Path, tmp_path: Path) -> None:
    report = export(trained, tmp_path / "q8", "gguf", type="Q8_0")
    assert isinstance(report, gguf_formats.GgufReport)
    assert report.proof is not None
    assert report.proof.kl < 1e-3
    kinds = {tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "q8" / "model-q8_0.gguf").tensors}
    assert kinds == {gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F32}
    with pytest.raises(UnsupportedError, match=r"llama-quantize DIR/model-f16.gguf DIR/model-q4_k_m.gguf Q4_K_M"):
        export(trained, tmp_path / "q4", "gguf", type="q4_k_m")
    with pytest.raises(ConfigError, match="must be one of f32, f16, bf16, q8_0"):
        export(trained, tmp_path / "q4", "gguf", type="int8")
    with pytest.raises(ConfigError, match="must be one of f32, f16, bf16"):
        export(trained, tmp_path / "q4", "lora-gguf", type="q8_0")
    with pytest.raises(ConfigError, match="give a folder"):
        export(trained, tmp_path / "model.gguf", "gguf")
    assert not (tmp_path / "q4").exists()


def test_the_file_says_what_llama_cpp_must_know(trained: Path, tmp_path: Path) -> None:
    export(trained, tmp_path / "out", "gguf", type="bf16")
    fields = gguf.GGUFReader(tmp_path / "out" / "model-bf16.gguf").fields
    found = {key: field.contents() for key, field in fields.items()}
    wanted = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.attention.head_count_kv": 2,
        "llama.rope.dimension_count": 16,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {key: found[key] for key in wanted} == wanted
    assert "<|im_start|>" in found["tokenizer.chat_template"]
    assert found["tokenizer.ggml.token_type"][:3] == [3, 3, 3]
    assert "output.weight" not in {
        tensor.name for tensor in gguf.GGUFReader(tmp_path / "out" / "model-bf16.gguf").tensors
    }


def test_a_lora_file_of_patterns_scales_each_tensor_by_its_own_alpha(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    make_run(tmp_path / "run", base, quantize="none", rank_pattern={"q_proj": 2}, alpha_pattern={"up_proj": 32})
    report = export(tmp_path / "run", tmp_path / "out", "lora-gguf", type="f32")
    assert isinstance(report, gguf_formats.GgufReport)
    assert report.proof is not None
    assert report.proof.log_prob < 1e-4


def test_what_a_lora_file_cannot_hold_is_named(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    make_run(tmp_path / "run", base, quantize="none", use_dora=True)
    with pytest.raises(UnsupportedError, match="DoRA"):
        export(tmp_path / "run", tmp_path / "out", "lora-gguf")
    make_run(tmp_path / "head", base, quantize="none", target_modules=["q_proj", "lm_head"])
    with pytest.raises(UnsupportedError, match=r"lm_head\.weight is the token table or the head"):
        export(tmp_path / "head", tmp_path / "out", "lora-gguf")
    assert not (tmp_path / "out").exists()


def test_other_families_and_models_that_llama_cpp_computes_otherwise_are_refused(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "gemma3_text", num_hidden_layers=2, layer_types=["full_attention"] * 2)
    make_run(tmp_path / "run", base, quantize="none")
    with pytest.raises(UnsupportedError, match=r"differs from what llama\.cpp computes for gemma3: every 6th layer"):
        export(tmp_path / "run", tmp_path / "out", "gguf")
    base = base_of(tmp_path / "other", "stablelm")
    make_run(tmp_path / "run2", base, quantize="none")
    with pytest.raises(UnsupportedError, match="family stablelm; it can for llama"):
        export(tmp_path / "run2", tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def _changed(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """Plant a fault in what is written: ``change`` gets the writer and the entries."""
    write = gguf_file.finish

    def finish(writer: Any, entries: list[gguf_file.Entry]) -> int:
        return write(writer, change(writer, entries))

    monkeypatch.setattr(gguf_formats, "finish", finish)


def _replace(entries: list[gguf_file.Entry], end: str, **fields: Any) -> list[gguf_file.Entry]:
    from dataclasses import replace

    assert any(entry.name.endswith(end) for entry in entries)
    return [replace(entry, **fields) if entry.name.endswith(end) else entry for entry in entries]


def _drop(writer: Any, entries: list[gguf_file.Entry], key: str) -> list[gguf_file.Entry]:
    del writer.kv_data[0][key]
    return entries


def _ones(writer: Any, entries: list[gguf_file.Entry]) -> list[gguf_file.Entry]:
    return _replace(entries, "ffn_norm.weight", make=lambda: [torch.ones(64)])


def _other_head(writer: Any, entries: list[gguf_file.Entry]) -> list[gguf_file.Entry]:
    make = lambda: [torch.randn(300, 64, generator=torch.Generator().manual_seed(0))]  # noqa: E731
    return [*entries, gguf_file.Entry("output.weight", (300, 64), gguf_file.Kind.F16, make)]


def _fewer_merges(writer: Any, entries: list[gguf_file.Entry]) -> list[gguf_file.Entry]:
    merges = writer.kv_data[0]["tokenizer.ggml.merges"]
    merges.value = merges.value[:3]
    return entries


FAULTS = {
    "rows not changed": (lambda w, e: _replace(e, "attn_q.weight", heads=None), "log-probs differ"),
    "rows changed by the wrong heads": (lambda w, e: _replace(e, "attn_k.weight", heads=4), "log-probs differ"),
    "norm lost": (_ones, "log-probs differ"),
    "another head": (_other_head, "log-probs differ"),
    "template lost": (lambda w, e: _drop(w, e, "tokenizer.chat_template"), "chat template is another"),
    "end token lost": (lambda w, e: _drop(w, e, "tokenizer.ggml.eos_token_id"), r"ends at \[\], in training at \[2\]"),
    "merges lost": (_fewer_merges, "other ids, for example of"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_leaves_nothing(
    fault: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change, message = FAULTS[fault]
    _changed(monkeypatch, change)
    with pytest.raises(CheckpointError, match=message):
        export(trained, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()
    if message.startswith("log"):
        seen = json.loads((tmp_path / "out.proof-failed.json").read_text())
        assert not seen["passed"]
        assert seen["log_prob"] > seen["tolerance"][0]


def test_lost_alpha_no_op_and_transposed_updates_are_found(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from frugal.exports import merge_math

    planted = {
        "alpha": lambda self, rows: (self.b[rows] @ self.a) * 1.0,
        "no-op": lambda self, rows: (self.b[rows] @ self.a) * 0.0,
        "turned": lambda self, rows: (self.b.flip(0)[rows] @ self.a) * self.update.scaling,
    }
    for name, delta in planted.items():
        with monkeypatch.context() as patch:
            patch.setattr(merge_math._Applied, "_delta", delta)
            with pytest.raises(CheckpointError, match="not what was trained"):
                export(trained, tmp_path / name, "gguf", type="f16")
        assert not (tmp_path / name).exists()

    def lost(writer: Any, entries: list[gguf_file.Entry]) -> list[gguf_file.Entry]:
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, 1.0)
        return entries

    _changed(monkeypatch, lost)
    with pytest.raises(CheckpointError, match="not what was trained"):
        export(trained, tmp_path / "lora", "lora-gguf")


def test_a_lora_file_that_changes_nothing_is_bit_equal_to_the_base(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    make_run(tmp_path / "run", base, quantize="none", size=0.0)
    report = export(tmp_path / "run", tmp_path / "out", "lora-gguf")
    assert isinstance(report, gguf_formats.GgufReport)
    assert report.proof is not None
    assert (report.proof.log_prob, report.proof.update_kl) == (0.0, 0.0)


def test_ways_of_cutting_are_named_by_what_the_tokenizer_does() -> None:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    digits = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]}
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    )

    def split(pattern: str) -> dict[str, Any]:
        parts = [{"type": "Split", "pattern": {"Regex": pattern}}, {**byte_level, "use_regex": False}]
        return {"type": "Sequence", "pretokenizers": parts}

    def name(step: Any, **model: Any) -> str:
        return cut_name({"pre_tokenizer": step, "model": model})

    assert name(byte_level) == "gpt-2"
    assert name(digits) == "smollm"
    assert (name(split(llama3), ignore_merges=True), name(split(llama3))) == ("llama-bpe", "dbrx")
    assert name(split(llama3.replace("{1,3}", ""))) == "qwen2"
    for unknown in (split(r"\w+"), {"type": "Whitespace"}, {**byte_level, "add_prefix_space": True}, None):
        with pytest.raises(UnsupportedError, match="no name for the way"):
            name(unknown)


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Pieces as SentencePiece's BPE has them, with bytes for what is in no piece."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    merges = [
        ("t", "h"),
        ("▁", "th"),
        ("▁th", "e"),
        ("q", "u"),
        ("i", "c"),
        ("qu", "ic"),
        ("quic", "k"),
        ("▁", "quick"),
    ]
    vocab = {text: index for index, text in enumerate([*words, *letters, *(a + b for a, b in merges)])}
    core = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def test_a_tokenizer_of_pieces_and_bytes_is_read_back_with_its_scores(tmp_path: Path) -> None:
    base = base_of(tmp_path / "base", "llama")
    tokenizer = sentencepiece_like()
    tokenizer.save_pretrained(base)
    make_run(tmp_path / "run", base, quantize="none", tokenizer=tokenizer)
    report = export(tmp_path / "run", tmp_path / "out", "gguf")
    fields = gguf.GGUFReader(tmp_path / "out" / "model-f16.gguf").fields
    tokens, kinds, scores = (fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "token_type", "scores"))
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_space_prefix"].contents() is True
    score = dict(zip(tokens, scores, strict=True))
    assert score["th"] > score["▁th"] > score["▁the"] > score["quick"] > score["a"]
    assert [kinds[tokens.index(text)] for text in ("<unk>", "<0x0A>", "the"[0])] == [2, 6, 1]
    assert isinstance(report, gguf_formats.GgufReport)
    assert [line for line in report.warnings if "other ids" in line] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--to", "gguf", "--type", "q4_k_m"], "llama-quantize DIR/model-f16.gguf DIR/model-q4_k_m.gguf Q4_K_M"),
        (["--to", "merged", "--type", "q8_0"], "a merged model is f32, f16, bf16. Other types need --to gguf"),
        (["--to", "adapter", "--type", "f16"], "an adapter is written as it was trained"),
        (["--to", "lora-gguf", "--base-weights", "original"], "--base-weights is for --to merged and gguf"),
        (["--to", "onnx"], "'onnx' is not one of"),
    ],
)
def test_the_command_refuses_in_one_message(trained: Path, tmp_path: Path, words: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["export", str(trained), "--out", str(tmp_path / "out"), *words])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "out").exists()


def test_the_command_prints_what_the_proof_measured(trained: Path, tmp_path: Path) -> None:
    words = ["export", str(trained), "--to", "lora-gguf", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "proof (read by frugal" in done.output
    again = CliRunner().invoke(app, words)
    assert (again.exit_code, "exists and is not empty" in again.output) == (2, True)
    plain = CliRunner().invoke(app, [*words[:-1], str(tmp_path / "plain"), "--no-proof"])
    assert "not proven (--no-proof)" in plain.output
    assert not (tmp_path / "plain" / "proof.json").exists()


def test_rotation_is_turned_and_turned_back() -> None:
    rows = torch.arange(24.0).reshape(12, 2)
    turned = gguf_families.to_interleaved(rows, 2)
    assert turned[:, 0].tolist() == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]
    assert torch.equal(gguf_families.to_halves(turned, 2), rows)
