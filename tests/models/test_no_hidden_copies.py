"""G01: preparing a 4-bit base costs more than it saves (hidden fp32 copies)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from frugal.adapters import apply_adapters
from frugal.codecs.dense import upcast_on_use
from frugal.config import LoraSection
from frugal.models.load import load_base
from frugal.models.materialize import resident_dtype
from frugal.models.report import count_bytes
from frugal.models.resolve import resolve_base
from frugal.models.skeleton import insert_nf4, linear_kinds

VOCAB, WIDTH = 128256, 4096


@pytest.mark.parametrize("compute", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tied", [True, False])
def test_a_large_table_on_meta(compute: torch.dtype, tied: bool) -> None:
    """Bytes by dtype after preparation, without memory: the tables stay 16-bit whatever the arithmetic is."""
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=14336,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(resident_dtype(parameter.dtype, parameter.ndim, compute))
    insert_nf4(model, linear_kinds(model)[0], double_quant=True)
    upcast_on_use(model, compute)
    counts = count_bytes(model)
    table = VOCAB * WIDTH * 2
    sixteen = {kind: size for kind, size in counts.items() if kind.endswith(("embedding", "head"))}
    assert sum(sixteen.values()) == table * (1 if tied else 2)
    assert not any(kind.startswith("float32") for kind in sixteen)
    layer = 2 * (WIDTH * WIDTH) + 2 * (1024 * WIDTH) + 3 * 14336 * WIDTH
    assert counts["nf4 codes"] == 2 * layer // 2
    vectors = 5 * WIDTH * (4 if compute == torch.float32 else 2)
    assert sum(size for kind, size in counts.items() if kind.endswith("other")) == vectors


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tied", [True, False])
def test_a_real_model_with_its_adapter(
    make_tiny_llama: Callable[..., Path], dtype: torch.dtype, compute: torch.dtype, tied: bool
) -> None:
    loaded = load_base(resolve_base(str(make_tiny_llama(dtype=dtype, tie_word_embeddings=tied))), dtype=compute)
    model = apply_adapters(loaded.model, LoraSection(r=4), seed=0).model
    base = model.get_base_model()
    for table in (base.get_input_embeddings().weight, base.get_output_embeddings().weight):
        assert table.dtype.itemsize == 2
    tables = 300 * 64 * 2 * (1 if tied else 2)
    kinds = loaded.report.bytes_by_kind
    assert sum(size for kind, size in kinds.items() if kind.endswith(("embedding", "head"))) == tables
    frozen32 = [n for n, p in model.named_parameters() if p.dtype == torch.float32 and not p.requires_grad]
    assert all("norm" in name for name in frozen32)
    assert bool(frozen32) == (compute == torch.float32)
    # The report is the sum of what is there, each storage once.
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in loaded.model.state_dict().values()
    }
    buffers = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in loaded.model.buffers()}
    adapters = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    assert sum({**storages, **buffers}.values()) - adapters == loaded.report.total_bytes


def test_float32_arithmetic_on_16_bit_tables_is_exact(make_tiny_llama: Callable[..., Path]) -> None:
    """Keeping the bytes costs no accuracy: the same logits as with float32 copies of the same numbers."""
    folder = make_tiny_llama(dtype=torch.bfloat16)
    ids = torch.tensor([[1, 5, 9, 200]])
    ours = load_base(resolve_base(str(folder)), quantize="none", dtype=torch.float32).model
    stock = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(ours(input_ids=ids).logits, stock(input_ids=ids).logits, atol=1e-6, rtol=1e-6)
