"""The plan's arithmetic: continued layers and lengths equal direct runs; inputs, verdicts, JSON, solutions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

from frugal.cli.main import app
from frugal.config import LoraSection, MemorySection, ModelSection, TrainSection, load_config
from frugal.device import GPUS, Device, find_gpu
from frugal.errors import ConfigError, ModelError
from frugal.planning import Planner, make_planner
from frugal.planning.architectures import known_architecture
from frugal.planning.host import ROUNDING, device_allowance, tensor_budget
from frugal.planning.inputs import architecture, planned_device
from frugal.planning.show import lines
from frugal.planning.simulate import PHASES, MemorySimulator, Shape
from frugal.planning.skeleton import layer_counts, with_layers
from frugal.planning.sweep import solve, sweep
from frugal.units import parse_size

SIZES: dict[str, Any] = {
    "vocab_size": 2000,
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "pad_token_id": 0,
}
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"] * 4
GPU = Device("cuda", capability=(8, 0))


def simulation(family: str, layers: int, *, whole: bool = False, device: Device = GPU, **kw: Any) -> MemorySimulator:
    config = AutoConfig.for_model(family, num_hidden_layers=layers, dtype="bfloat16", **SIZES, **kw.pop("changes", {}))
    train = TrainSection(gradient_accumulation_steps=kw.pop("accumulate", 1), optim=kw.pop("optim", "adamw"))
    compute = torch.float32 if device.kind == "cpu" else torch.bfloat16
    model = ModelSection(base="x", quantize=kw.pop("quantize", "nf4"))
    return MemorySimulator(config, model, LoraSection(r=4), train, MemorySection(), compute, device, whole=whole, **kw)


@pytest.mark.parametrize(
    ("family", "layers", "options"),
    [
        ("llama", 8, {"policy": "offload", "accumulate": 2}),
        ("llama", 9, {"policy": "none", "optim": "adamw_8bit"}),
        ("qwen3", 7, {"policy": "recompute", "device": Device("cpu")}),
        ("gemma3_text", 12, {"policy": "recompute", "changes": {"sliding_window": 64, "layer_types": PATTERN}}),
        ("gemma2", 9, {"policy": "disk", "quantize": "none"}),
    ],
)
def test_few_layers_continued_equal_the_whole_model(family: str, layers: int, options: dict[str, Any]) -> None:
    shape = Shape(1, 200)
    short, whole = simulation(family, layers, **dict(options)), simulation(family, layers, whole=True, **dict(options))
    assert len(short.counts) == 2
    assert whole.counts == (layers,)
    assert short.numbers() == whole.numbers()
    for phase in PHASES:
        one, other = short.peak(phase, shape), whole.peak(phase, shape)
        assert one.bytes == pytest.approx(other.bytes, rel=2e-4), phase
        assert sum(one.by_category.values()) == pytest.approx(one.bytes, rel=1e-3)


@pytest.mark.parametrize("policy", ["recompute", "offload"])
def test_the_line_over_tokens_equals_a_direct_run(policy: Any) -> None:
    sim = simulation("llama", 3, policy=policy)
    # from about 90,000 tokens on attention takes one key head at a time: before that its workspace does not grow
    line = sim.line("steady_step", Shape(1, 131_072), Shape(1, 262_144))
    for tokens in (400_000, 700_000):
        assert line.at(tokens).bytes == pytest.approx(sim.peak("steady_step", Shape(1, tokens)).bytes, rel=2e-3)
    budget = line.at(300_000).bytes
    assert line.most_tokens(budget) in range(299_990, 300_011)
    assert line.at(line.most_tokens(budget)).bytes <= budget < line.at(line.most_tokens(budget) + 1).bytes
    assert line.most_tokens(1000) == 0
    slope, fixed = line.slope_and_fixed(280_000)
    assert slope * 280_000 + fixed == pytest.approx(line.at(280_000).bytes, rel=1e-6)


QUADRATIC: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"policy": "recompute"}),
    ("llama", {"policy": "none"}),
    ("llama", {"policy": "offload", "packed": True, "documents": 64}),
    ("qwen2", {"policy": "none"}),
    ("qwen3", {"policy": "offload"}),
    ("qwen3", {"policy": "recompute", "device": Device("cpu")}),
    ("gemma2", {"policy": "none", "changes": {"sliding_window": 1024}}),
    ("gemma2", {"policy": "offload", "changes": {"sliding_window": 1024}, "packed": True, "documents": 64}),
    ("gemma3_text", {"policy": "none", "changes": {"sliding_window": 512, "layer_types": PATTERN[:3]}}),
    ("gemma3_text", {"policy": "offload", "changes": {"sliding_window": 512, "layer_types": PATTERN[:3]}}),
    ("phi3", {"policy": "none", "changes": {"sliding_window": None}}),
    ("phi3", {"policy": "offload", "changes": {"sliding_window": None}, "packed": True, "documents": 64}),
]


@pytest.mark.parametrize(("family", "options"), QUADRATIC, ids=lambda value: str(value) if isinstance(value, str) else
                         "-".join(str(part) for part in value.values()))  # fmt: skip
def test_no_memory_grows_with_the_square_of_the_length(family: str, options: dict[str, Any]) -> None:
    """Memory goes on along a straight line: attention, sliding windows, packing, positions and masks included."""
    sim = simulation(family, 3, **dict(options))
    for phase in ("steady_step", "evaluation"):
        line = sim.line(phase, Shape(1, 262_144), Shape(1, 524_288))  # type: ignore[arg-type]
        far = sim.peak(phase, Shape(1, 4_194_304)).bytes  # type: ignore[arg-type]
        assert far == pytest.approx(line.at(4_194_304).bytes, rel=5e-3), phase


def test_position_and_mask_tensors_are_a_few_bytes_a_token() -> None:
    """What a batch and the mask function hold for attention: nothing of [length, length] at any place of a step."""
    for family in ("llama", "gemma2", "gemma3_text", "qwen3", "phi3"):
        changes: dict[str, Any] = {"sliding_window": 256} if family.startswith("gemma") else {}
        if family == "phi3":
            changes = {"sliding_window": None}
        sim = simulation(family, 3, policy="recompute", changes=changes)
        length = 200_000
        sites = sim.sites("steady_step", Shape(1, length))
        rest = sites[("", "at rest")][0]
        largest = max(total for total, _ in sites.values())
        assert largest - rest < length * 64 * SIZES["hidden_size"], family  # a square of one byte would be 40 GB


def test_layer_patterns_end_like_the_whole_model() -> None:
    gemma = known_architecture("google/gemma-3-1b-it")
    short, longer = layer_counts(gemma) or (0, 0)
    assert (26 - short) % 6 == 0
    assert longer - short == 6
    assert with_layers(gemma, short).layer_types == gemma.layer_types[:short]


def test_sizes_and_gpus() -> None:
    assert parse_size("12GB", "x") == parse_size("12 GiB", "x") == parse_size(f"{12 * 2**30}B", "x") == 12 << 30
    assert parse_size("1.5g", "x") == 3 << 29
    for bare in ("12", 12, "12.5", " 800 "):  # U05: 12 bytes are never meant
        with pytest.raises(ConfigError, match=rf"--vram: {str(bare).strip()} has no unit. Write .*GB"):
            parse_size(bare, "--vram")
    for wrong in ("twelve", "12 cm", "0GB", "-3GB", ""):
        with pytest.raises(ConfigError, match="12GB"):
            parse_size(wrong, "--vram")
    assert find_gpu("NVIDIA GeForce RTX 3060").total_bytes == 12 << 30
    assert find_gpu("tesla t4").capability == (7, 5)
    assert not find_gpu("T4").has_bf16
    assert find_gpu("a100").name == "A100 40GB"
    assert all(find_gpu(name).name == name for name in GPUS)
    with pytest.raises(ConfigError, match="RTX 3090"):
        find_gpu("RTX 309")


def test_public_sizes() -> None:
    """Parameter counts of the published models, in thousands of millions."""
    published = {"meta-llama/Llama-3.1-8B-Instruct": 8.030, "unsloth/Qwen3-4B-Instruct-2507": 4.022,
                 "microsoft/phi-4": 14.660, "google/gemma-2-9b-it": 9.242}  # fmt: skip
    for name, billions in published.items():
        planner = make_planner(name, vram="24GB")
        assert planner.simulation("offload").numbers()[0] / 1e9 == pytest.approx(billions, abs=0.001)


def test_unknown_names_say_what_helps(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"meta-llama/Llama-3.1-8B"):
        architecture("no-such-model")
    with pytest.raises(ModelError, match=r"config.json"):
        architecture(str(tmp_path))


def test_more_tokens_than_can_be_described_are_refused(tiny_llama_folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"is 99,999,999,999 .* up to 67,108,864 tokens"):
        make_planner(str(tiny_llama_folder), vram="8GB", tokens=99_999_999_999)
    assert not make_planner(str(tiny_llama_folder), vram="8GB", tokens=1 << 25).plan(with_line=False).fits


def test_allowance_is_inside_the_budget() -> None:
    total = 24 << 30
    budget = tensor_budget("cuda", (8, 6), total)
    assert budget + sum(device_allowance("cuda", (8, 6), budget).values()) == pytest.approx(total, abs=16)


def test_nccl_has_buffers_of_its_own() -> None:
    """M4: a communicator's buffers lie beside tensors on every GPU of several."""
    alone, shared = (device_allowance("cuda", (8, 6), 0, ranks) for ranks in (1, 2))
    assert set(shared) - set(alone) == {"nccl"}
    assert tensor_budget("cuda", (8, 6), 24 << 30) > tensor_budget("cuda", (8, 6), 24 << 30, 2)
    assert "nccl" not in device_allowance("cpu", None, 0, 2)


def budget_of(tensors: int, ranks: int = 1) -> str:
    """The memory.budget of a GPU that leaves ``tensors`` bytes for tensors."""
    fixed = sum(device_allowance("cuda", (8, 0), 0, ranks).values())
    return f"{int(tensors * (1 + ROUNDING)) + fixed + 1}B"


def test_a_budget_counts_the_context(tiny_llama_folder: Path) -> None:
    """M3: "device memory that the run may take" is not what tensors may take."""
    planner = planner_of(tiny_llama_folder, "8GB", budget="2GB")
    assert planner.budget_bytes == tensor_budget("cuda", (8, 0), 2 << 30)
    assert planner_of(tiny_llama_folder, "8GB", budget="9GB").budget_bytes == tensor_budget("cuda", (8, 0), 8 << 30)


def test_what_others_use_is_not_there(tiny_llama_folder: Path) -> None:
    """M1: a desktop and other jobs take from the same device."""
    planner = planner_of(tiny_llama_folder, "8GB")
    shared = replace(planner, device=replace(planner.device, others_bytes=3 << 30))
    assert shared.budget_bytes == tensor_budget("cuda", (8, 0), 5 << 30)
    plan = shared.plan(with_line=False)
    assert any("3.00 GiB of the device's 8.00 GiB are in use by others" in line for line in lines(plan))
    device = plan.to_json()["device"]
    assert device["others_bytes"] == 3 << 30
    assert device["headroom_bytes"] == (5 << 30) - device["need_bytes"]


def planner_of(folder: Path, vram: str, **memory: Any) -> Planner:
    config = load_config(
        {
            "model": {"base": str(folder)},
            "lora": {"r": 4},
            "data": {"train": "x.jsonl", "max_length": 512},
            "memory": memory,
            "output": {"dir": "runs/x"},
        }
    )
    return Planner.of(config, planned_device("auto", gpu=None, vram=vram, host_ram="16GB"))


def test_auto_takes_the_fastest_policy_that_fits(tiny_llama_folder: Path) -> None:
    roomy = planner_of(tiny_llama_folder, "8GB").plan(with_line=False)
    assert (roomy.policy, roomy.fits, roomy.asked_policy) == ("none", True, "auto")
    peaks = {p: planner_of(tiny_llama_folder, "8GB").step_peak(p).bytes for p in ("none", "recompute", "offload")}  # type: ignore[arg-type]
    assert peaks["none"] > peaks["recompute"] >= peaks["offload"]
    tight = planner_of(tiny_llama_folder, "8GB", budget=budget_of((peaks["none"] + peaks["recompute"]) // 2))
    found = tight.plan(with_line=False)
    assert found.policy == "recompute"
    assert found.tried == {"none": peaks["none"], "recompute": peaks["recompute"]}
    hopeless = planner_of(tiny_llama_folder, "8GB", budget="10KB").plan(with_line=False)
    assert not hopeless.fits
    assert "DOES NOT FIT" in lines(hopeless)[0]


def test_json_table_and_command(tiny_llama_folder: Path, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["plan", str(tiny_llama_folder), "--vram", "8GB", "--json", "--tokens", "256"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    device = found["device"]
    assert set(device["phases"]) == {"load", "first_step", "steady_step", "evaluation", "save", "merge"}
    assert device["phases"][device["peak_phase"]]["bytes"] == device["peak_bytes"]
    assert sum(device["breakdown"].values()) == pytest.approx(device["peak_bytes"], rel=1e-3)
    assert device["length"] == 256
    assert device["fixed_bytes"] + device["bytes_per_token"] * device["max_tokens"] <= device["budget_bytes"] * 1.001
    assert {"peak_bytes", "breakdown", "phases", "fits"} <= found["host"].keys()
    assert {"checkpoints", "scratch", "merged export"} <= found["disk"].keys()
    shown = CliRunner().invoke(app, ["plan", str(tiny_llama_folder), "--gpu", "T4"])
    assert shown.exit_code == 0
    assert shown.stdout.startswith("FITS")
    assert "float16" in shown.stdout


def test_sweep_and_solve(tiny_llama_folder: Path) -> None:
    planner = planner_of(tiny_llama_folder, "8GB")
    rows = sweep(planner, "offload", (1, 2, 4))
    lengths = [row.max_tokens for row in rows]
    assert lengths == sorted(lengths)
    assert lengths[0] > 0
    recompute = planner.step_peak("recompute").bytes
    measures = solve(planner_of(tiny_llama_folder, "8GB", budget=budget_of(recompute + 1000)))
    assert [m.settings["memory.checkpoint"] for m in measures] == ["none", "recompute"]
    assert measures[-1].fits
    assert not measures[0].fits


def test_the_model_caps_what_is_promised(tiny_llama_folder: Path) -> None:
    """U06: memory for more tokens than the model has positions is no promise of a longer row."""
    config = AutoConfig.from_pretrained(tiny_llama_folder)
    plan = planner_of(tiny_llama_folder, "8GB", checkpoint="recompute").plan()
    assert plan.max_tokens // plan.shape.rows > config.max_position_embeddings
    assert plan.to_json()["device"]["max_length"] == config.max_position_embeddings
    assert any(f"ends at {config.max_position_embeddings:,} positions" in line for line in lines(plan))
