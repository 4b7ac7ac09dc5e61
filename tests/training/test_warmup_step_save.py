"""The checkpoint of the warm-up step: written whole before the first step, measured, noted, and gone."""

from __future__ import annotations

import json
from pathlib import Path

import frugal


def test_a_run_writes_a_checkpoint_before_its_first_step(tiny_llama_folder: Path, tmp_path: Path) -> None:
    rows = [{"prompt": f"Say {i}", "completion": "word " * (i % 5 + 1)} for i in range(24)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    run = tmp_path / "run"
    frugal.train(
        {
            "model": {"base": str(tiny_llama_folder)},
            "lora": {"r": 4},
            "data": {"train": str(tmp_path / "rows.jsonl"), "max_length": 64, "eval_split": 0.2},
            "train": {"max_steps": 2, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1},
            "output": {"dir": str(run)},
        }
    )
    manifest = json.loads((run / "manifest.json").read_text())
    warmup, forecast = manifest["warm-up step"], manifest["forecast"]["device"]["phases"]
    assert warmup["step_bytes"] > warmup["eval_bytes"] > warmup["save_bytes"] > 0
    for phase, measured in (("steady_step", "step_bytes"), ("evaluation", "eval_bytes"), ("save", "save_bytes")):
        assert abs(forecast[phase]["bytes"] / warmup[measured] - 1) <= 0.05, phase
    left = sorted(path.name for path in run.iterdir() if path.is_dir())
    assert left == ["checkpoint-2"]
