"""One DPO step, frugal against TRL's DPOTrainer over PEFT + bitsandbytes: peak live bytes and seconds, side by side.

    python benchmarks/peer_dpo.py --json out.json          # SmolLM2-135M, 1 and 2 pairs of prompt 768 + 2 x 256
    python benchmarks/peer_dpo.py --quick                  # short pairs, one repeat: does it run

Both sides run the base without its adapter for the reference in the step; NF4, r = 16, float32 compute, checkpointing
on. Memory and time are taken in separate steps (the meter slows a step down). Without a GPU TRL's head runs in a torch
form that holds several tiles of logits where its kernel holds one.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import (
    ALPHA,
    MODEL,
    RANK,
    Side,
    adamw,
    environment,
    interleaved,
    lora_config,
    quantised_base,
)
from torch import Tensor

from frugal.assets import fetch
from frugal.config import LoraSection
from frugal.data import TokenDataset
from frugal.files import write_json
from frugal.models.attention import join_rows
from frugal.models.build import ModelSpec, build
from frugal.models.resolve import resolve_base
from frugal.objectives import LossModule, make_objective
from frugal.units import MIB

CASES = [(1, 768, 256), (2, 768, 256)]
QUICK_CASES = [(1, 48, 16), (2, 48, 16)]
BETA = 0.1


def main() -> None:
    """Measure, print, and write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="where to write the result")
    parser.add_argument("--quick", action="store_true", help="short pairs, one repeat")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each side and case")
    arguments = parser.parse_args()
    cases = QUICK_CASES if arguments.quick else CASES
    result = measure(cases, repeats=1 if arguments.quick else arguments.repeats)
    print(summary(result))
    if arguments.json is not None:
        write_json(arguments.json, result)
    else:
        print(json.dumps({key: value for key, value in result.items() if "ratio" in key}, indent=2))


def frugal_side() -> Side:
    """frugal's own load, adapters, replaced modules, checkpointing, rows and objective."""
    built = build(ModelSpec(source=resolve_base(MODEL), lora=LoraSection(r=RANK, lora_alpha=ALPHA)))
    flat = join_rows(built.base, built.attention.value, packing=False).value
    objective = make_objective("dpo", beta=BETA, flat=flat)
    module = LossModule(built.model.train(), objective, head=built.head).train()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        rows = dataset(batch)
        total, sums = module(objective.collate(rows, range(len(rows))))
        return total / sums[1]

    side = Side("frugal", built.model, loss, adamw(built.model))
    side.checkpoint("recompute")
    return side


def trl_side() -> Side:
    """TRL's DPOTrainer, given the base and the adapter's configuration: then the reference is the base."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(prefix="frugal-trl-"),  # it writes nothing there before it saves
        use_cpu=True,
        bf16=False,
        beta=BETA,
        report_to=[],
        max_length=None,
        gradient_checkpointing=True,
        gradient_checkpointing_kwargs={"use_reentrant": False},
    )
    trainer = DPOTrainer(
        model=quantised_base(),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": " b", "rejected": " c"}]),
        processing_class=AutoTokenizer.from_pretrained(fetch(MODEL)),
        peft_config=lora_config(),
    )
    model = trainer.model.train()

    def loss(batch: dict[str, Tensor]) -> Tensor:
        names = ("prompt", "chosen", "rejected")
        pairs = zip(*(batch[name].tolist() for name in names), strict=True)
        rows = [{f"{name}_ids": ids for name, ids in zip(names, pair, strict=True)} for pair in pairs]
        result: Tensor = trainer.compute_loss(model, trainer.data_collator(rows))
        return result

    return Side("trl", model, loss, adamw(model))


def random_pairs(count: int, prompt: int, answer: int, seed: int = 0) -> dict[str, Tensor]:
    """Random token ids of prompts [count, prompt] and of two answers [count, answer] each."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"prompt": prompt, "chosen": answer, "rejected": answer}
    return {name: torch.randint(5, 49152, (count, size), generator=generator) for name, size in sizes.items()}


def dataset(batch: dict[str, Tensor]) -> TokenDataset:
    """The pairs as frugal's rows."""
    ids, trained, origins = [], [], []
    for index, prompt in enumerate(batch["prompt"]):
        for name in ("chosen", "rejected"):
            document = torch.cat([prompt, batch[name][index]])
            ids.append(document.numpy().astype("int32"))
            trained.append((torch.arange(len(document)) >= len(prompt)).numpy())
            origins.append(index)
    documents = TokenDataset.from_documents(ids, trained, origins)
    return documents.grouped([(at, at + 1) for at in range(0, len(documents), 2)])


def measure(cases: list[tuple[int, int, int]], *, repeats: int) -> dict[str, Any]:
    """All cases; the ratios are of the first."""
    ours = frugal_side()
    sides = [ours, trl_side()]
    rows: list[dict[str, Any]] = []
    for count, prompt, answer in cases:
        batch = random_pairs(count, prompt, answer)
        row: dict[str, Any] = {"pairs": count, "prompt": prompt, "answer": answer}
        with torch.no_grad():
            row["loss"] = {side.name: float(side.loss(batch)) for side in sides}
        reports = {side.name: side.meter(batch) for side in sides}
        seconds = interleaved(sides, batch, repeats)
        for name, report in reports.items():
            row[name] = {"peak_bytes": report.peak_bytes, **seconds[name], "at_peak": report.by_category}
        with tempfile.TemporaryDirectory() as folder:
            ours.checkpoint("disk", Path(folder))
            report = ours.meter(batch)
            row["frugal_disk"] = {"peak_bytes": report.peak_bytes, "at_peak": report.by_category}
            ours.checkpoint("recompute")
        rows.append(row)
        print(f"{count} x ({prompt} + 2 x {answer}): {row}", flush=True)
    return {"cases": rows, **ratios(rows), "environment": environment()}


def ratios(rows: list[dict[str, Any]]) -> dict[str, float]:
    """frugal over TRL: peak, peak with activations on disk, seconds; `_second` of the second case. Tokens through the
    model are equal (a prompt stands before each of its two answers)."""
    found: dict[str, float] = {"token_ratio": 1.0}
    for row, end in zip(rows, ("", "_second"), strict=False):
        peer = row["trl"]
        found |= {
            f"peak_ratio{end}": row["frugal"]["peak_bytes"] / peer["peak_bytes"],
            f"peak_ratio_disk{end}": row["frugal_disk"]["peak_bytes"] / peer["peak_bytes"],
            f"seconds_ratio{end}": row["frugal"]["seconds"] / peer["seconds"],
            f"cpu_seconds_ratio{end}": row["frugal"]["cpu_seconds"] / peer["cpu_seconds"],
        }
    return found


def summary(result: dict[str, Any]) -> str:
    """The result as a small table."""
    heads = ("frugal", "disk", "TRL", "frugal s", "TRL s")
    lines = [f"{'MiB':<18}" + "".join(f"{head:>11}" for head in heads)]
    for row in result["cases"]:
        peaks = [f"{row[side]['peak_bytes'] / MIB:.1f}" for side in ("frugal", "frugal_disk", "trl")]
        times = [f"{row[side]['seconds']:.2f}" for side in ("frugal", "trl")]
        name = f"{row['pairs']} x {row['prompt']} + 2 x {row['answer']}"
        lines.append(f"{name:<18}" + "".join(f"{cell:>11}" for cell in (*peaks, *times)))
    lines += [f"{key:<28}{value:12.3f}" for key, value in result.items() if isinstance(value, float)]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
