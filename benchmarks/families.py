"""Which model families train to what stock transformers + PEFT compute: the 55 families of `family_configs.py`.

    python benchmarks/families.py

Every model is tiny and random. The truth is stock transformers and PEFT in float32 with eager attention, three steps of
AdamW over four rows of 20 to 190 tokens, each row by itself, not padded. `frugal train` does the same with one row a
micro-batch, with four, with rows packed, and over an NF4 base (the truth there: its dense weights in the stock model).
Its adapter is then merged, and loaded by stock PEFT. A cell is the largest relative difference of losses and gradient
norms; "refused" is a message that says what to do (in the JSON). Ends with 1 where anything differs or breaks.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft.tuners.lora  # noqa: F401  before forking
import torch
import torch.nn.functional as F
import transformers
from common import environment
from family_configs import FAMILIES, Family
from peft import PeftModel
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

import frugal
import frugal.run.verify
from frugal.codecs.base import EncodedModule, encoded_parts
from frugal.config import load_config
from frugal.data import build as build_data
from frugal.errors import FrugalError

STEPS, RATE, EPSILON, RANK, ALPHA, SEED = 3, 0.02, 1e-3, 4, 8, 42
LOSS, NORM, LOGITS = 1e-5, 2e-4, 1e-4
"""Allowed, relative: of a loss, of a gradient norm (float32, other order of sums), of logits to the largest one."""
WAYS: dict[str, dict[str, Any]] = {
    "alone": {"micro": 1},
    "batch of 4": {"micro": 4},
    "packed": {"micro": 1, "packing": True},
    "nf4": {"micro": 4, "quantize": "nf4"},
}
SECONDS = 120
ROWS = (
    ("Hi?", "Yes, one two."),
    ("Where does the river go in spring", "To the sea, past 3 mills & a lock."),
    ("Tell me about bees", "Bees live in hives; they dance to show where flowers are, and keep warm together (35 C)."),
    ("Write a long line", "The quick brown fox jumps over the lazy dog, then rests: 0123456789! It jumps over the dog "
     "again; pack my box with five dozen jugs of water, please."),
)  # fmt: skip
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def characters() -> PreTrainedTokenizerFast:
    """One character is one token: the table needs rows whose length is known, in 103 ids."""
    words = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"]
    words += [chr(code) for code in range(32, 127)] + ["\n"]
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=core, **special)
    fast.add_tokens([AddedToken(word, special=True) for word in words[4:7]], special_tokens=True)
    fast.chat_template = TEMPLATE
    return fast


def make_base(family: Family, folder: Path) -> None:
    """A random model whose every number matters: no zeros, no ones."""
    torch.manual_seed(0)
    make = AutoModelForCausalLM.from_config
    if family.model_class is not None:
        make = getattr(transformers, family.model_class)._from_config
    model = make(family.config())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            scale = 1.0 if "embed" in name else 0.6 / parameter.shape[-1] ** 0.5 if parameter.dim() else 1.0
            parameter.copy_(noise * scale if parameter.dim() > 1 else parameter + 0.2 * noise)
    model.save_pretrained(folder)
    characters().save_pretrained(folder)


def settings(base: Path, out: Path, *, micro: int, packing: bool = False, quantize: str = "none") -> dict[str, Any]:
    """The configuration of one run: a step is all four rows, however they are cut."""
    return {
        "model": {"base": str(base), "quantize": quantize},
        "lora": {"r": RANK, "lora_alpha": ALPHA},
        "data": {"train": str(out.parent / "rows.jsonl"), "cache": False, "max_length": 448, "packing": packing},
        "train": {
            "max_steps": STEPS, "per_device_train_batch_size": micro,
            "gradient_accumulation_steps": 1 if packing else 4 // micro, "learning_rate": RATE,
            "lr_scheduler_type": "constant", "warmup_ratio": 0.0, "adam_epsilon": EPSILON, "seed": SEED,
        },
        "memory": {"checkpoint": "none"},
        "output": {"dir": str(out)},
    }  # fmt: skip


def stock(folder: Path) -> nn.Module:
    """The base as transformers loads it, in float32, eager attention where the family has it."""
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    except (ValueError, ImportError):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def logits(model: nn.Module, row: Any) -> Tensor:
    """Logits [tokens, vocabulary] of one row by itself."""
    ids = torch.tensor(row.input_ids.astype("int64"))[None]
    text = {} if "gemma3" not in type(model).__name__.lower() else {"token_type_ids": torch.zeros_like(ids)}
    try:
        found: Tensor = model(input_ids=ids, use_cache=False, **text).logits[0]
    except ValueError:  # families with images want to be told that there are none
        names = ("token_type_ids", "mm_token_type_ids")
        found = model(input_ids=ids, use_cache=False, **{name: torch.zeros_like(ids) for name in names}).logits[0]
    return found.float()


def reference(base: Path, start: Path, rows: list[Any]) -> dict[str, list[float]]:
    """Losses and gradient norms of the steps in stock transformers + PEFT from an adapter, each row alone."""
    model = PeftModel.from_pretrained(stock(base), start, is_trainable=True)
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, eps=EPSILON, weight_decay=0.0)
    found: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    labels = [torch.where(torch.tensor(row.trained), torch.tensor(row.input_ids.astype("int64")), -100) for row in rows]
    count = sum(int((each[1:] >= 0).sum()) for each in labels)
    for _ in range(STEPS):
        total = 0.0
        for row, each in zip(rows, labels, strict=True):
            loss = F.cross_entropy(logits(model, row)[:-1], each[1:], reduction="sum") / count
            loss.backward()
            total += float(loss.detach())
        found["loss"].append(total)
        found["grad_norm"].append(float(nn.utils.clip_grad_norm_(trained, 1.0)))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return found


def difference(log: Path, want: dict[str, list[float]]) -> dict[str, float]:
    """Largest relative difference of the losses and of the gradient norms."""
    lines = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    got = [line for line in lines if "grad_norm" in line]
    assert len(got) == STEPS, f"{len(got)} steps in {log}"
    return {
        key: max(abs(line[key] - value) / abs(value) for line, value in zip(got, want[key], strict=True))
        for key in ("loss", "grad_norm")
    }


def shares(run: Path) -> dict[str, float]:
    """Of the base's values: how many are in 4 bits, how many belong to layers with an adapter, how many to tables."""
    model = frugal.load(run, device="cpu").model
    base = model.get_base_model()
    tables = [base.get_input_embeddings(), base.get_output_embeddings()]
    total = encoded = adapted = table = 0
    seen: set[int] = set()
    for name, module in base.named_modules():
        parts = encoded_parts(module) if isinstance(module, EncodedModule) else {}
        held = {stored: part for part, names in parts.items() for stored in names}
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen or ".lora_" in f"{name}.{key}":
                continue
            seen.add(id(parameter))
            if key in held:
                continue
            total += parameter.numel()
            table += parameter.numel() if any(module is each for each in tables) else 0
            adapted += parameter.numel() if name.endswith(".base_layer") and key == "weight" else 0
        for part in parts:
            count = torch.Size(module.encoded(part).shape).numel()
            total, encoded = total + count, encoded + count
            adapted += count if name.endswith(".base_layer") else 0
    return {"4 bits": encoded / total, "adapted": adapted / total, "tables": table / total}


def examine(name: str, folder: Path) -> dict[str, Any]:
    """All cells of one family."""
    family, found = FAMILIES[name], {"family": name, "cells": {}}
    cells: dict[str, Any] = found["cells"]
    base, start, rows_file = folder / "base", folder / "start", folder / "rows.jsonl"
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in ROWS]
    rows_file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    make_base(family, base)
    config = load_config(settings(base, folder / "x", micro=1))
    tokenizer = AutoTokenizer.from_pretrained(base)
    data = build_data(config.data, tokenizer, seed=SEED, vocab_size=128).train
    rows = [data[index] for index in range(len(data))]
    truth: dict[str, dict[str, list[float]]] = {}

    def trained(way: str) -> dict[str, Any]:
        out = folder / way.replace(" ", "-")
        how = dict(WAYS[way])
        if way == "nf4" and "refused" in cells["batch of 4"]:
            how["micro"] = 1
        frugal.train(settings(base, out, **how))
        if not start.is_dir():  # as the run started: the same seed
            frugal.load(settings(base, folder / "x", micro=1), device="cpu").model.save_pretrained(start)
        dense = base
        if way == "nf4":
            dense = folder / "dense"
            frugal.load(str(base), quantize="nf4", device="cpu").model.unload().save_pretrained(dense)
            found["share"] = shares(out)
        if str(dense) not in truth:
            truth[str(dense)] = reference(dense, start, rows)
        off = difference(out / "train_log.jsonl", truth[str(dense)])
        return {**off, "equal": off["loss"] <= LOSS and off["grad_norm"] <= NORM}

    def same_logits(a: nn.Module, b: nn.Module) -> dict[str, Any]:
        with torch.no_grad():
            want, got = logits(a.eval(), rows[-1]), logits(b.eval(), rows[-1])
        off = float((want - got).abs().max() / want.abs().max())
        return {"logits": off, "equal": off <= LOGITS}

    def adapter() -> Path:
        done = [folder / way.replace(" ", "-") for way in ("batch of 4", "alone", "packed")]
        return next(path for path in done if (path / "adapter_model.safetensors").is_file())

    def merged() -> dict[str, Any]:
        frugal.merge(adapter(), folder / "merged")
        return same_logits(PeftModel.from_pretrained(stock(base), adapter()), stock(folder / "merged"))

    def loaded() -> dict[str, Any]:
        mine = frugal.load(adapter(), device="cpu").model
        return same_logits(PeftModel.from_pretrained(stock(base), adapter()), mine)

    steps: dict[str, Callable[[], dict[str, Any]]] = {way: lambda way=way: trained(way) for way in WAYS}  # type: ignore[misc]
    for what, step in {**steps, "merge": merged, "stock PEFT": loaded}.items():
        if what in ("merge", "stock PEFT") and not any("equal" in cells[way] for way in ("batch of 4", "alone")):
            continue
        cells[what] = _cell(step)
    return found


class _TooLong(Exception):
    pass


def _cell(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    def late(*_: Any) -> None:
        raise _TooLong

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    start = time.perf_counter()
    quiet = io.StringIO()
    try:
        with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            cell = step()
    except FrugalError as error:
        cell = {"refused": " ".join(str(error).split())}
    except _TooLong:
        cell = {"broke": f"more than {SECONDS} s"}
    except Exception as error:  # the table is of what happens: every failure is a cell, with its traceback
        cell = {"broke": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    finally:
        signal.alarm(0)
    cell["seconds"] = round(time.perf_counter() - start, 1)
    return cell


def in_a_fork(name: str) -> dict[str, Any]:
    """`examine` in a process of its own that has everything imported already."""
    with tempfile.TemporaryDirectory(prefix="frugal-families-") as folder:
        answer = Path(folder) / "answer.json"
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            try:
                answer.write_text(json.dumps(examine(name, Path(folder))), encoding="utf-8")
            except BaseException:
                text = traceback.format_exc()
                answer.write_text(json.dumps({"family": name, "cells": {"build": {"broke": text}}}), encoding="utf-8")
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if not answer.is_file():
            return {"family": name, "cells": {"build": {"broke": f"the process ended with {status}"}}}
        result: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return result


COLUMNS = (*WAYS, "merge", "stock PEFT")


def shown(cell: dict[str, Any] | None) -> str:
    """One cell in at most ten characters."""
    if cell is None:
        return "-"
    if "equal" not in cell:
        return "BROKE" if "broke" in cell else "refused"
    worst = max(value for key, value in cell.items() if key in ("loss", "grad_norm", "logits"))
    return f"{worst:.0e}{'' if cell['equal'] else ' OFF'}"


def line_of(result: dict[str, Any]) -> str:
    """The row of one family, and its first message below where it was refused or broke."""
    share = result.get("share")
    parts = [f"{share[key]:.0%}" if share else "-" for key in ("4 bits", "adapted", "tables")]
    cells = result["cells"]
    row = f"{result['family']:20}" + "".join(f"{shown(cells.get(key)):>12}" for key in COLUMNS)
    row += "".join(f"{part:>9}" for part in parts)
    said = dict.fromkeys(
        c.get("refused") or c.get("broke", "").splitlines()[-1] for c in cells.values() if "equal" not in c
    )
    return "\n".join([row, *(f"    {text[:200]}" for text in said)])


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 1 where a family is silently different or breaks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="some of them; default: all")
    parser.add_argument("--json", type=Path, help="where to write everything, messages in full")
    asked = parser.parse_args(arguments)
    unknown = sorted(set(asked.families) - set(FAMILIES))
    if unknown:
        parser.error(f"no such family: {', '.join(unknown)}. There are: {', '.join(FAMILIES)}")
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    head = f"{'family':20}" + "".join(f"{key:>12}" for key in (*COLUMNS,))
    print(head + "".join(f"{key:>9}" for key in ("4 bits", "adapted", "tables")), flush=True)
    results = []
    for name in asked.families or FAMILIES:
        results.append(in_a_fork(name))
        print(line_of(results[-1]), flush=True)
    bad = [r["family"] for r in results if any("broke" in c or c.get("equal") is False for c in r["cells"].values())]
    refused = [r["family"] for r in results if any("refused" in c for c in r["cells"].values())]
    print(f"{len(results)} families: {len(results) - len(set(bad) | set(refused))} equal in every cell, "
          f"{len(set(refused) - set(bad))} with something refused, {len(bad)} different or broken")  # fmt: skip
    if asked.json:
        asked.json.write_text(
            json.dumps({"environment": environment(), "families": results}, indent=1), encoding="utf-8"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
