"""lora.exclude_modules and lora.layers_to_transform: what gets an adapter, here, in the plan, and in stock PEFT."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from frugal.adapters import apply_adapters
from frugal.adapters.files import save_adapter
from frugal.adapters.patterns import names_single_layers
from frugal.adapters.targets import resolve_targets
from frugal.checkpoints.run_folder import check_depth, open_run
from frugal.config import LoraSection, ModelSection, TrainSection, load_config
from frugal.config.schema import MemorySection
from frugal.device import Device
from frugal.errors import CheckpointError, ConfigError
from frugal.files import read_json
from frugal.models.load import load_base
from frugal.models.resolve import resolve_base
from frugal.models.skeleton import build_meta
from frugal.planning import Planner
from frugal.planning.inputs import planned_device
from frugal.planning.simulate import MemorySimulator
from frugal.run.steps import open_base
from frugal.run.train import train
from tests.support import runs
from tests.support.tiny_models import tiny_config

NARROWED: list[dict[str, Any]] = [
    {"exclude_modules": ["k_proj", "layers.1.mlp.up_proj"]},
    {"exclude_modules": r".*\.layers\.1\..*"},
    {"layers_to_transform": 1, "target_modules": ["q_proj", "up_proj"]},
    {"layers_to_transform": [0], "exclude_modules": "down_proj"},
]


def adapted(model: nn.Module) -> set[str]:
    return {name.removeprefix("base_model.model.") for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def base(folder: Path) -> Any:
    return load_base(resolve_base(str(folder))).model


@pytest.mark.parametrize("settings", NARROWED)
def test_the_layers_are_pefts_and_stock_peft_loads_the_file(
    tiny_llama_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    model = apply_adapters(base(tiny_llama_folder), LoraSection(r=4, **settings), seed=0).model
    options = {"target_modules": "all-linear", **settings}
    if options["target_modules"] == "all-linear" and "layers_to_transform" in options:  # PEFT takes only names for it
        options["target_modules"] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    if options.get("exclude_modules") == "down_proj":  # one name is a list of one here
        options["exclude_modules"] = ["down_proj"]
    theirs = get_peft_model(
        AutoModelForCausalLM.from_pretrained(tiny_llama_folder), LoraConfig(task_type="CAUSAL_LM", r=4, **options)
    )
    assert adapted(model) == adapted(theirs)
    assert 0 < len(adapted(model)) < 14

    save_adapter(model, tmp_path)
    written = read_json(tmp_path / "adapter_config.json")
    numbers = settings.get("layers_to_transform")
    assert written["layers_to_transform"] == ([numbers] if isinstance(numbers, int) else numbers)
    assert written["exclude_modules"] == options.get("exclude_modules")
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama_folder), tmp_path)
    assert adapted(again) == adapted(model)
    keys = load_file(tmp_path / "adapter_model.safetensors")
    assert {key.split(".lora_")[0].removeprefix("base_model.model.") for key in keys} == adapted(again)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"exclude_modules": ["kproj"]}, r"lora\.exclude_modules: 'kproj' matches no layer.*k_proj"),
        ({"exclude_modules": ["lm_head"]}, r"lora\.exclude_modules: 'lm_head' matches no layer"),
        ({"exclude_modules": r"layers\.7.*"}, r"lora\.exclude_modules: .* matches no layer"),
        ({"exclude_modules": "(k_proj"}, r"lora\.exclude_modules: .*no valid regular expression"),
        ({"target_modules": ["q_proj", "v_proj"], "exclude_modules": ["v_proj"]}, "'v_proj' has no layer left"),
        ({"exclude_modules": ".*"}, r"'all-linear' has no layer left: lora\.exclude_modules"),
        ({"layers_to_transform": [0, 2, 9]}, r"lora\.layers_to_transform: .*\(0 to 1\), got 2, 9"),
        (
            {"layers_to_transform": 0, "target_modules": ["layers.1.mlp.up_proj"]},
            r"'layers.1.mlp.up_proj' has no layer left: lora\.layers_to_transform",
        ),
        ({"layers_to_transform": 0, "target_modules": ["embed_tokens", "q_proj"]}, "'embed_tokens' has no layer left"),
    ],
)
def test_what_matches_nothing_is_an_error(settings: dict[str, Any], message: str) -> None:
    model = build_meta(tiny_config("llama"), trust_remote_code=False)
    with pytest.raises(ConfigError, match=message):
        resolve_targets(model, LoraSection(**settings))


def test_a_layer_that_is_not_there_is_found_before_weights_are_read(make_tiny_llama: Any, tmp_path: Path) -> None:
    folder = make_tiny_llama(num_hidden_layers=2)
    (weights,) = folder.glob("*.safetensors")
    kept = weights.read_bytes()
    weights.write_bytes(b"\xff" * 100)  # whoever reads it fails
    config = load_config(
        runs.config(folder, tmp_path / "rows.jsonl", tmp_path / "run", lora={"layers_to_transform": 5})
    )
    try:
        with pytest.raises(ConfigError, match=r"lora\.layers_to_transform: .*\(0 to 1\), got 5"):
            open_base(config)
    finally:
        weights.write_bytes(kept)


def test_the_table_says_which_layers() -> None:
    model = build_meta(tiny_config("llama", num_hidden_layers=3), trust_remote_code=False)
    found = resolve_targets(model, LoraSection(layers_to_transform=[2, 0, 2]))
    assert {name.split(".")[2] for name in found.layers} == {"0", "2"}
    assert found.table[-1].line() == "layers_to_transform '0, 2': 14 layers"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({"bias": "all"}, "lora.bias: must be none, got 'all': write none"),
        ({"bias": "lora_only"}, "lora.modules_to_save"),
        ({"bias": True}, "must be none, got True"),
        ({"layers_to_transform": [-1]}, "must be whole numbers >= 0 (not -1), got a list"),
        ({"layers_to_transform": [0, "x"]}, "must be a whole number"),
        ({"layers_to_transform": True}, "must be a whole number"),
        ({"exclude_modules": "all-linear"}, "it would leave nothing to train"),
        ({"exclude_modules": "q_proj,k_proj"}, "write [q_proj, k_proj]"),
    ],
)
def test_values_that_cannot_be(written: dict[str, Any], message: str) -> None:
    source = {"model": {"base": "m"}, "data": {"train": "r"}, "output": {"dir": "o"}, "lora": written}
    with pytest.raises(ConfigError) as caught:
        load_config(source)
    assert message in str(caught.value)
    assert load_config({**source, "lora": {"bias": "none", "layers_to_transform": "3"}}).lora.layers_to_transform == [3]


def _simulated(lora: LoraSection, layers: int) -> MemorySimulator:
    sizes = {"vocab_size": 500, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", num_hidden_layers=layers, dtype="bfloat16", pad_token_id=0, **sizes)
    gpu = Device("cuda", capability=(8, 0))
    model, train_section = ModelSection(base="x"), TrainSection()
    return MemorySimulator(config, model, lora, train_section, MemorySection(), torch.bfloat16, gpu)


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        ({"layers_to_transform": [7, 9]}, 2 / 12),
        ({"exclude_modules": r".*\.layers\.(9|1[01])\..*"}, 9 / 12),
        ({"target_modules": r".*\.layers\.11\..*_proj"}, 1 / 12),
    ],
)
def test_the_plan_counts_the_layers_that_are_trained(settings: dict[str, Any], part: float) -> None:
    """The planner runs short models and continues them; layers named by number are not all alike."""
    everything = _simulated(LoraSection(r=4), 12).numbers()[1]
    assert _simulated(LoraSection(r=4, **settings), 12).numbers()[1] == round(everything * part)


def test_several_ranks_are_planned_with_the_layers_that_are_trained(make_tiny_llama: Any) -> None:
    folder = make_tiny_llama(num_hidden_layers=6, tie_word_embeddings=False)
    source = {
        "model": {"base": str(folder)},
        "lora": {"r": 4, "layers_to_transform": [4, 5]},
        "data": {"train": "x.jsonl", "max_length": 64},
        "memory": {"checkpoint": "recompute"},
        "output": {"dir": "runs/x"},
    }
    device = planned_device("auto", gpu=None, vram="8GB", host_ram=None)
    planner = Planner.of(load_config(source), device, world_size=2, strategy="fsdp2", shard_base=True)
    sharing = planner.plan(with_line=False).sharing
    assert sharing is not None
    assert sharing.units.trained == 4 * planner.simulation("recompute").numbers()[1]


def test_whether_a_layer_is_named_by_number() -> None:
    for settings in ({"target_modules": "layers.1.q_proj"}, {"rank_pattern": {r"layers\.[0-3]\..*": 4}}, *NARROWED):
        assert names_single_layers(LoraSection(**settings)), settings
    for settings in ({}, {"target_modules": ["w1", "fc_2"]}, {"exclude_modules": ["k_proj"]}):
        assert not names_single_layers(LoraSection(**settings)), settings


def test_a_run_keeps_them_and_goes_on(tiny_llama_folder: Path, tmp_path: Path) -> None:
    """config.yaml, adapter_config.json, a resumed run, and a base that is not deeper than the adapter says."""
    rows = runs.write_rows(tmp_path / "rows.jsonl", 8)
    lora = {"r": 2, "layers_to_transform": 0, "exclude_modules": ["k_proj"]}
    for name, steps in (("whole", 4), ("stopped", 4)):
        plain = runs.config(tiny_llama_folder, rows, tmp_path / name, lora=lora, train={"max_steps": steps})
        plain["output"]["save_steps"] = 2
        train(plain)
        if name == "stopped":
            other = {**plain, "lora": {**plain["lora"], "layers_to_transform": 1}}
            with pytest.raises(CheckpointError, match=r"lora\.layers_to_transform: \[0\] -> \[1\]"):
                train(other, resume=True)
            train(plain, resume=str(tmp_path / name / "checkpoint-2"))
    runs.same_result(tmp_path / "whole", tmp_path / "stopped")
    kept = load_config(tmp_path / "whole" / "config.yaml").lora
    assert (kept.layers_to_transform, kept.exclude_modules) == ([0], ["k_proj"])
    keys = load_file(tmp_path / "whole" / "adapter_model.safetensors")
    assert all(".layers.0." in key and "k_proj" not in key for key in keys)
    check_depth(open_run(tmp_path / "whole"), resolve_base(str(tiny_llama_folder)))
