"""Layer by layer gives what loading, adapting and replacing a whole model give: every parameter, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from frugal.adapters import apply_adapters
from frugal.config import LoraSection
from frugal.errors import ModelError, UnsupportedError
from frugal.memory.meter import LiveBytesMeter
from frugal.models.attention import use_attention
from frugal.models.build import BuiltModel, ModelSpec, build, needs_whole_base
from frugal.models.head import split_head
from frugal.models.load import load_base
from frugal.models.replacement import replace_modules
from frugal.models.resolve import ResolvedModel
from tests.support.tiny_models import FAMILIES, tiny_model

LORA = LoraSection(r=4, lora_alpha=8)


def source(folder: Path) -> ResolvedModel:
    return ResolvedModel("tiny", folder, "folder", None)


def save_tiny(folder: Path, family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> ResolvedModel:
    tiny_model(family, **changes).to(dtype).save_pretrained(folder)
    return source(folder)


def whole(
    base: ResolvedModel,
    lora: LoraSection,
    *,
    seed: int = 3,
    dtype: torch.dtype = torch.float32,
    new_token_ids: tuple[int, ...] = (),
    **options: Any,
) -> BuiltModel:
    """The ordinary hops of a run."""
    loaded = load_base(base, dtype=dtype, **options)
    assert loaded.deferred is None
    choice = use_attention(loaded.model)
    quantize = options.get("quantize", "nf4")
    applied = apply_adapters(loaded.model, lora, seed=seed, quantize=quantize, new_token_ids=new_token_ids)
    report = replace_modules(applied.model, compute_dtype=dtype)
    head = split_head(applied.model)
    loaded.report.embedding = "memory.embedding is device"
    return BuiltModel(applied.model, loaded.model, loaded.report, choice, applied, report, head, [])


def layer_by_layer(
    base: ResolvedModel,
    lora: LoraSection,
    on_layer: Callable[[str, nn.Module], object] = lambda *_: None,
    **options: Any,
) -> BuiltModel:
    return build(ModelSpec(source=base, lora=lora, seed=3, **options), "layerwise", on_layer)


def assert_same(got: BuiltModel, want: BuiltModel) -> None:
    kinds = [{name: type(module) for name, module in each.model.named_modules()} for each in (got, want)]
    assert kinds[0] == kinds[1]
    ties, named = [], []
    for each in (got, want):
        tensors = {
            **dict(each.model.named_parameters(remove_duplicate=False)),
            **dict(each.model.named_buffers(remove_duplicate=False)),
        }
        first: dict[int, str] = {}
        ties.append({name: first.setdefault(id(tensor), name) for name, tensor in tensors.items()})
        named.append(tensors)
    assert ties[0] == ties[1]
    for name, wanted in named[1].items():
        tensor = named[0][name]
        assert not tensor.is_meta, name
        assert (tensor.dtype, tensor.requires_grad) == (wanted.dtype, wanted.requires_grad), name
        assert torch.equal(tensor, wanted), name
    assert got.replacements is not None
    assert want.replacements is not None
    assert sorted(map(str, got.replacements.rows)) == sorted(map(str, want.replacements.rows))
    assert got.attention.value == want.attention.value
    assert got.attention.by_layer == want.attention.by_layer
    assert got.head is not None
    assert want.head is not None
    assert (got.head.exact, got.head.softcap) == (want.head.exact, want.head.softcap)
    assert got.head.logit_scale == pytest.approx(want.head.logit_scale, rel=1e-6)
    unlike = {"seconds"}
    assert {k: v for k, v in vars(got.report).items() if k not in unlike} == {
        k: v for k, v in vars(want.report).items() if k not in unlike
    }
    ids = torch.arange(3, 25)[None]
    with torch.no_grad():
        outputs = [each.model(input_ids=ids, use_cache=False).logits for each in (got, want)]
    assert torch.equal(outputs[0], outputs[1])
    assert got.adapter_lines == want.adapter_lines


STORAGE = [("nf4", True), ("nf4", False), ("none", True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    base = save_tiny(tmp_path, family, torch.bfloat16)
    for quantize, double in STORAGE:
        options: dict[str, Any] = {"quantize": quantize, "double_quant": double}
        names: list[str] = []
        got = layer_by_layer(base, LORA, lambda n, _, to=names: to.append(n), **options)  # type: ignore[misc]
        assert_same(got, whole(base, LORA, **options))
        assert names == [f"base_model.model.model.layers.{i}" for i in range(len(names))]
        assert len(names) == got.model.config.num_hidden_layers
        assert got.attention.value == "frugal"
        assert got.head is not None
        assert got.head.exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_dtypes_of_checkpoint_and_compute(tmp_path: Path, dtype: torch.dtype, tied: bool) -> None:
    base = save_tiny(tmp_path, "llama", dtype, tie_word_embeddings=tied)
    for compute in (torch.float32, torch.bfloat16):
        for quantize in ("nf4", "none"):
            options: dict[str, Any] = {"quantize": quantize, "dtype": compute}
            got = layer_by_layer(base, LORA, **options)
            assert_same(got, whole(base, LORA, **options))


def test_more_rows_new_tokens_trained_head_and_patterns(tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "llama", torch.bfloat16)
    lora = LoraSection(
        r=4,
        target_modules=["q_proj", "down_proj", "embed_tokens"],
        modules_to_save=["lm_head"],
        rank_pattern={"q_proj": 2},
        init_lora_weights="gaussian",
        lora_dropout=0.1,
        use_rslora=True,
    )
    options: dict[str, Any] = {"vocab_size": 140}
    got = layer_by_layer(base, lora, **options)
    assert_same(got, whole(base, lora, **options))
    lora = LoraSection(r=4, modules_to_save=["model.norm"])
    options["new_token_ids"] = (133, 139)
    got = layer_by_layer(base, lora, **options)
    assert_same(got, whole(base, lora, **options))
    assert got.report.resized_rows == (131, 140)


@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_dora_takes_its_magnitudes_when_a_layer_is_filled(tmp_path: Path, quantize: Any) -> None:
    base = save_tiny(tmp_path, "llama", torch.bfloat16)
    lora = LoraSection(r=4, use_dora=True, target_modules=["q_proj", "down_proj", "lm_head"])
    for compute in (torch.float32, torch.bfloat16):
        options: dict[str, Any] = {"quantize": quantize, "dtype": compute}
        got = layer_by_layer(base, lora, **options)
        assert_same(got, whole(base, lora, **options))
        magnitudes = [p for name, p in got.model.named_parameters() if "magnitude" in name]
        assert len(magnitudes) == 5
        assert all(p.requires_grad for p in magnitudes)


def test_a_checkpoint_in_files_and_a_missing_weight(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="30KB")
    base = source(tmp_path)
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    assert_same(layer_by_layer(base, LORA), whole(base, LORA))
    for file in tmp_path.glob("*.safetensors"):
        tensors = load_file(file)
        if tensors.pop("model.layers.1.mlp.up_proj.weight", None) is not None:
            save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        layer_by_layer(base, LORA)


def test_deferred_layers_wait_and_are_filled_once(tmp_path: Path) -> None:
    base = save_tiny(tmp_path, "llama")
    loaded = load_base(base, weights="layerwise")
    assert loaded.deferred is not None
    waiting = {name for name, p in loaded.model.named_parameters() if p.is_meta}
    assert waiting == {n for n, _ in loaded.model.named_parameters() if n.startswith("model.layers.")}
    assert loaded.deferred.waiting == ["model.layers.0", "model.layers.1"]
    ids = torch.arange(5)[None]
    with loaded.deferred.only("model.layers.1"):
        there = {name for name, p in loaded.model.named_parameters() if p.is_meta}
        assert there == {name for name in waiting if name.startswith("model.layers.0.")}
        assert loaded.model(input_ids=ids, use_cache=False).logits.isfinite().all()
    assert {name for name, p in loaded.model.named_parameters() if p.is_meta} == waiting
    assert not any("forward" in vars(layer) for layer in loaded.deferred.layers.values())
    layer = loaded.deferred.fill("model.layers.1")
    assert not any(p.is_meta for p in layer.parameters())
    assert loaded.deferred.waiting == ["model.layers.0"]
    with pytest.raises(KeyError):
        loaded.deferred.fill("model.layers.1")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"init_lora_weights": "pissa"}, r"init_lora_weights: pissa starts from the weights of model\.layers\.0"),
        ({"modules_to_save": ["layers.1.mlp"]}, r"modules_to_save: model\.layers\.1\.mlp is inside a decoder layer"),
    ],
)
def test_adapters_that_need_the_weights_are_refused_before_any_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    base = save_tiny(tmp_path, "llama")
    loaded = load_base(base, quantize="none", weights="layerwise")
    monkeypatch.setattr("frugal.models.load.materialize", lambda *_: pytest.fail("weights were read"))
    lora = LoraSection(**changes)
    with pytest.raises(UnsupportedError, match=reason + r".*distributed\.shard_base: false"):
        layer_by_layer(base, lora, quantize="none")
    with pytest.raises(UnsupportedError, match=reason):
        apply_adapters(loaded.model, lora, seed=3, quantize="none")
    assert needs_whole_base(base, LORA) is None


def test_models_that_cannot_be_loaded_layer_by_layer(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4}
    MixtralForCausalLM(MixtralConfig(**sizes, **heads)).save_pretrained(tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors = load_file(file)
    odd = next(name for name in tensors if name.endswith("experts.3.w1.weight"))
    save_file({**tensors, odd: tensors[odd][1:].clone()}, file, metadata={"format": "pt"})  # does not fit a stack
    for call in (
        lambda: load_base(source(tmp_path), weights="layerwise"),
        lambda: layer_by_layer(source(tmp_path), LORA),
    ):
        with pytest.raises(UnsupportedError, match=r"is converted .*distributed\.shard_base: false"):
            call()


def test_layers_without_linear_layers(tmp_path: Path) -> None:
    """GPT-2's matrices are transposed (Conv1D) and stay dense; its attention masks are buffers of each layer."""
    torch.manual_seed(0)
    GPT2LMHeadModel(GPT2Config(vocab_size=131, n_embd=64, n_layer=2, n_head=4, attn_pdrop=0.0)).save_pretrained(
        tmp_path
    )
    got = layer_by_layer(source(tmp_path), LORA)
    assert_same(got, whole(source(tmp_path), LORA))


def halve(_: str, layer: nn.Module) -> None:
    """What a sharding over two processes leaves of a layer here."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                rows = -(parameter.shape[0] // -2)
                half = parameter.detach()[:rows].clone()
                module._parameters[name] = nn.Parameter(half, requires_grad=parameter.requires_grad)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("quantize", ["nf4", "none"])
def test_live_bytes_stay_at_shards_and_one_layer(
    make_tiny_llama: Callable[..., Path], quantize: Any, fused: bool
) -> None:
    folder = make_tiny_llama(
        dtype=torch.bfloat16,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=12,
        tie_word_embeddings=False,
    )
    meter = LiveBytesMeter(device="cpu")
    with meter:
        filled = layer_by_layer(source(folder), LORA, halve, quantize=quantize, fused=fused)
    assert filled.head is not None
    layers = filled.head.decoder.layers
    shards = sum(p.nbytes for p in layers.parameters())
    rest = sum(p.nbytes for n, p in filled.model.named_parameters() if ".layers." not in n)
    rest += sum(b.nbytes for b in filled.model.buffers())  # nested scales: 4 bytes for 16384 weights, replicated
    layer = 2 * shards / len(layers)
    largest = 512 * 1024 * 2  # bytes of the largest tensor as stored
    quantising = 3 * 4 * (1 << 17) if quantize == "nf4" else 0  # float32 copies of one piece, whatever the model
    # Proving an MLP runs its backward, which has its three matrices dense in float32, as a step of training has.
    proof = 3 * 512 * 1024 * 4 if fused else 0
    assert meter.peak_bytes <= shards + rest + layer + max(proof, largest + quantising)
    assert meter.peak_bytes - max(proof, largest + quantising) < 0.62 * (2 * shards + rest)
