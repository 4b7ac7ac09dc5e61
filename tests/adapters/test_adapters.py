"""Adapters: what is injected, where it starts, what is saved, and that stock PEFT computes the same with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from frugal.adapters import adapter_state, apply_adapters, load_adapter, save_adapter
from frugal.config import LoraSection
from frugal.errors import CheckpointError, ConfigError, ModelError, UnsupportedError
from frugal.models.load import load_base
from frugal.models.resolve import base_fingerprint, resolve_base

IDS = torch.randint(3, 300, (2, 12), generator=torch.Generator().manual_seed(0))


def load(folder: Path, quantize: Any = "nf4", **options: Any) -> Any:
    return load_base(resolve_base(str(folder)), quantize=quantize, **options).model


def perturb(model: torch.nn.Module, seed: int = 0) -> None:
    """Stand-in for training: moves every trained value, B away from zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=IDS).logits
    return out


def stock_base(folder: Path, quantize: str) -> Any:
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    extra = {"quantization_config": config} if quantize == "nf4" else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **extra)
    # bitsandbytes' CPU kernels for eval mode round to bfloat16 on some processors; those for training do not.
    return model.train()


@pytest.mark.parametrize("quantize", ["nf4", "none"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"use_rslora": True, "r": 4},
        {"use_dora": True},
        {"rank_pattern": {"q_proj": 2}, "init_lora_weights": "gaussian"},
    ],
)
def test_stock_peft_computes_the_same(
    tiny_llama_folder: Path, tmp_path: Path, quantize: str, settings: dict[str, Any]
) -> None:
    applied = apply_adapters(load(tiny_llama_folder, quantize), LoraSection(**settings), seed=3, quantize=quantize)
    perturb(applied.model)
    save_adapter(applied.model, tmp_path)
    stock = PeftModel.from_pretrained(stock_base(tiny_llama_folder, quantize), str(tmp_path)).train()
    torch.testing.assert_close(logits(applied.model), logits(stock), atol=2e-4, rtol=1e-4)
    ours = load_adapter(load(tiny_llama_folder, quantize), tmp_path)
    assert torch.equal(logits(ours), logits(applied.model))
    assert not any(parameter.requires_grad for parameter in ours.parameters())


@pytest.mark.parametrize("start", ["pissa", "loftq"])
def test_starts_that_change_the_base(tiny_llama_folder: Path, tmp_path: Path, start: str) -> None:
    lora = LoraSection(init_lora_weights=start, r=4)
    with pytest.raises(UnsupportedError, match=r"model\.quantize: none"):
        apply_adapters(load(tiny_llama_folder), lora, seed=0, quantize="nf4")
    if start == "loftq" and not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="CUDA device"):
            apply_adapters(load(tiny_llama_folder, "none"), lora, seed=0, quantize="none")
        return
    applied = apply_adapters(load(tiny_llama_folder, "none"), lora, seed=0, quantize="none")
    if start == "pissa":  # W_res + A0 B0 = W: training starts where the base is
        torch.testing.assert_close(logits(applied.model), logits(load(tiny_llama_folder, "none")), atol=1e-3, rtol=1e-3)
    perturb(applied.model)
    save_adapter(applied.model, tmp_path / "raw")
    again = load_adapter(load(tiny_llama_folder, "none"), tmp_path / "raw")
    torch.testing.assert_close(logits(again), logits(applied.model), atol=1e-3, rtol=1e-3)
    if start == "pissa":
        save_adapter(applied.model, tmp_path / "plain", plain=True)
        for plain in (
            load_adapter(load(tiny_llama_folder, "none"), tmp_path / "plain"),
            PeftModel.from_pretrained(stock_base(tiny_llama_folder, "none"), str(tmp_path / "plain")),
        ):
            assert plain.peft_config["default"].init_lora_weights is True
            torch.testing.assert_close(logits(plain), logits(applied.model), atol=1e-3, rtol=1e-3)


def test_all_linear_leaves_the_head_out(tiny_llama_folder: Path) -> None:
    applied = apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0)
    assert len(applied.layers) == 14
    assert not any("lm_head" in name or "embed" in name for name in applied.layers)
    assert applied.model.peft_config["default"].target_modules == {
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    }


def test_the_start_depends_on_the_seed_alone(tiny_llama_folder: Path) -> None:
    def start(seed: int, noise: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(noise)
        before = torch.get_rng_state()
        state = adapter_state(apply_adapters(load(tiny_llama_folder), LoraSection(), seed=seed).model)
        assert torch.equal(torch.get_rng_state(), before)
        return state

    first, same, other = start(1, 10), start(1, 20), start(2, 10)
    assert all(torch.equal(first[key], same[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_no_step_changes_the_base(tiny_llama_folder: Path) -> None:
    """Gradients reach A and B and nothing else."""
    applied = apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0)
    applied.model(input_ids=IDS, labels=IDS).loss.backward()
    named = dict(applied.model.named_parameters())
    assert {name for name, p in named.items() if p.grad is not None} == {name for name in named if "lora_" in name}


def test_a_saved_file_is_complete_and_the_same_each_time(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0).model
    fingerprint = base_fingerprint(tiny_llama_folder)
    for name in ("a", "b"):
        save_adapter(model, tmp_path / name, base_fingerprint=fingerprint)
    for file in ("adapter_model.safetensors", "adapter_config.json"):
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes()
    with safe_open(tmp_path / "a" / "adapter_model.safetensors", "pt") as handle:
        assert handle.metadata()["frugal_base_fingerprint"] == fingerprint
        assert len(list(handle.keys())) == 28
    model.base_model.model.model.layers[0].mlp.up_proj.lora_A["default"].weight.data = torch.empty(0, 64)
    with pytest.raises(CheckpointError, match=r"empty tensors.*up_proj\.lora_A"):
        save_adapter(model, tmp_path / "c")


def test_wrong_files_are_refused(tiny_llama_folder: Path, make_tiny_llama: Callable[..., Path], tmp_path: Path) -> None:
    """M05: keys and shapes that do not line up are listed, and a base left untouched when possible."""
    save_adapter(apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0).model, tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    good = load_file(file)
    deeper, wider = make_tiny_llama(num_hidden_layers=3), make_tiny_llama(intermediate_size=192)
    with pytest.raises(ModelError, match=r"missing base_model\.model\.model\.layers\.2"):
        load_adapter(load(deeper), tmp_path)
    with pytest.raises(ModelError, match=r"out_features 192 here, 128 in the file"):
        load_adapter(load(wider), tmp_path)
    key = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"
    renamed = {name.replace("layers.0.mlp.up_proj", "layers.0.mlp.uq_proj"): value for name, value in good.items()}
    save_file(renamed, file)
    with pytest.raises(ModelError, match=r"uq_proj: not in this model"):
        load_adapter(load(tiny_llama_folder), tmp_path)
    save_file({name: value for name, value in good.items() if name != key}, file)
    with pytest.raises(ModelError, match=rf"missing {key}"):
        load_adapter(load(tiny_llama_folder), tmp_path)
    save_file({**good, "base_model.model.extra": torch.zeros(1)}, file)
    with pytest.raises(ModelError, match=r"unexpected base_model\.model\.extra"):
        load_adapter(load(tiny_llama_folder), tmp_path)
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ModelError, match="damaged"):
        load_adapter(load(tiny_llama_folder), tmp_path)
    file.unlink()
    with pytest.raises(ModelError, match="missing"):
        load_adapter(load(tiny_llama_folder), tmp_path)


def test_same_shapes_other_weights_are_noticed(
    tiny_llama_folder: Path, make_tiny_llama: Callable[..., Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = make_tiny_llama(seed=2)
    model = apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0).model
    save_adapter(model, tmp_path, base_fingerprint=base_fingerprint(tiny_llama_folder))
    load_adapter(load(tiny_llama_folder), tmp_path, base_fingerprint=base_fingerprint(tiny_llama_folder))
    assert not caplog.records
    load_adapter(load(other), tmp_path, base_fingerprint=base_fingerprint(other))
    assert "another base model" in caplog.text
    with pytest.raises(ModelError, match="another base model"):
        load_adapter(load(other), tmp_path, base_fingerprint=base_fingerprint(other), on_other_base="error")


def test_an_adapter_named_lora(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """M05: a name that is also the key prefix of LoRA weights."""
    from peft import LoraConfig

    from frugal.adapters import inject

    config = LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    model = inject(load(tiny_llama_folder), config, adapter_name="lora")
    perturb(model)
    save_adapter(model, tmp_path)
    assert torch.equal(logits(load_adapter(load(tiny_llama_folder), tmp_path)), logits(model))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_to_save(make_tiny_llama: Callable[..., Path], tmp_path: Path, tied: bool, dtype: torch.dtype) -> None:
    folder = make_tiny_llama(tie_word_embeddings=tied, dtype=torch.float16)
    lora = LoraSection(modules_to_save=["embed_tokens", "lm_head"], r=4)
    applied = apply_adapters(load(folder, dtype=dtype), lora, seed=0)
    perturb(applied.model)
    loss = applied.model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    trained = {name: p for name, p in applied.model.named_parameters() if p.requires_grad}
    assert all(p.dtype == torch.float32 for p in trained.values())
    assert all(p.grad is not None for p in trained.values())
    head = applied.model.get_base_model().lm_head.modules_to_save["default"].weight
    table = applied.model.get_base_model().model.embed_tokens.modules_to_save["default"].weight
    assert (head is table) == tied
    save_adapter(applied.model, tmp_path)
    assert torch.equal(logits(load_adapter(load(folder, dtype=dtype), tmp_path)), logits(applied.model))


def test_a_quantised_layer_cannot_be_trained_whole(tiny_llama_folder: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"up_proj is stored in NF4.*model\.quantize: none"):
        apply_adapters(load(tiny_llama_folder), LoraSection(modules_to_save=["layers.0.mlp.up_proj"]), seed=0)


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_travel_with_the_adapter(make_tiny_llama: Callable[..., Path], tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_llama(tie_word_embeddings=tied, dtype=torch.float16)
    base = load(folder, vocab_size=302)
    applied = apply_adapters(base, LoraSection(r=4), seed=0, new_token_ids=[300, 301])
    ids = torch.tensor([[5, 300, 9, 301]])
    applied.model(input_ids=ids, labels=ids).loss.backward()
    rows = [p for name, p in applied.model.named_parameters() if "trainable_tokens_delta" in name and p.requires_grad]
    assert len(rows) == (1 if tied else 2)
    assert all(p.shape == (2, 64) and p.dtype == torch.float32 and p.grad is not None for p in rows)
    perturb(applied.model)
    save_adapter(applied.model, tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert sum("trainable_tokens_delta" in key for key in saved) == len(rows)
    assert not any(value.shape[0] > 200 for value in saved.values())  # two rows, not the table
    again = load_adapter(load(folder, vocab_size=302), tmp_path)
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, applied.model(input_ids=ids).logits)
    with pytest.raises(ModelError, match="vocab_size=302"):
        load_adapter(load(folder), tmp_path)
    stock = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    stock.resize_token_embeddings(302, mean_resizing=False)
    stock_peft = PeftModel.from_pretrained(stock, str(tmp_path))
    dense = load_adapter(load(folder, "none", vocab_size=302), tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(
            stock_peft(input_ids=ids).logits[..., [5, 300, 301]], dense(input_ids=ids).logits[..., [5, 300, 301]]
        )


def test_names_that_are_no_layer(tiny_llama_folder: Path) -> None:
    base = load(tiny_llama_folder)
    with pytest.raises(ConfigError, match=r"'mlp' names .*mlp.*Layers inside it: down_proj, gate_proj, up_proj"):
        apply_adapters(base, LoraSection(target_modules=["mlp"]), seed=0)
    with pytest.raises(ConfigError, match="no valid regular expression"):
        apply_adapters(base, LoraSection(target_modules="(q_proj"), seed=0)
    with pytest.raises(ConfigError, match=r"modules_to_save: 'lm_haed'.*lm_head"):
        apply_adapters(base, LoraSection(modules_to_save=["lm_haed"]), seed=0)


def test_a_second_adapter_on_one_model_is_refused(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """R04: neither a second attach nor a load stacks on an adapter; the first stays as it was."""
    base = load(tiny_llama_folder)
    applied = apply_adapters(base, LoraSection(), seed=0)
    save_adapter(applied.model, tmp_path)
    before = {key: value.clone() for key, value in adapter_state(applied.model).items()}
    for model in (applied.model, base):  # PEFT changes the base in place, so the caller's own object carries it too
        with pytest.raises(ConfigError, match="carries an adapter already"):
            apply_adapters(model, LoraSection(), seed=1)
        with pytest.raises(ConfigError, match="carries an adapter already"):
            load_adapter(model, tmp_path)
    after = adapter_state(applied.model)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_loading_gives_the_file_bit_for_bit(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model = apply_adapters(load(tiny_llama_folder), LoraSection(), seed=0).model
    perturb(model)
    save_adapter(model, tmp_path)
    again = load_adapter(load(tiny_llama_folder), tmp_path, trainable=True)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    state = adapter_state(again)
    assert state.keys() == saved.keys()
    assert all(torch.equal(state[key], saved[key]) for key in saved)
    assert sum(p.numel() for p in again.parameters() if p.requires_grad) == sum(v.numel() for v in saved.values())
