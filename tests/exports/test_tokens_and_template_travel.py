"""M03: what must travel with the adapter: added tokens, resized tables, the template, the stop ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from frugal.exports.registry import merge
from frugal.inference.load import load_run
from frugal.run.train import train

Make = Callable[..., Path]

ADDED = ["<|tool|>", "<|done|>"]
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)

IN_A_NEW_PROCESS = """
import json, sys
import torch
from safetensors.torch import save_file
torch.set_num_threads(1)
run, merged, out = sys.argv[1:]
from frugal.inference.load import load_run
from transformers import AutoModelForCausalLM, AutoTokenizer
loaded = load_run(run, device="cpu")
model, tokenizer = loaded
stock = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
stock_tokenizer = AutoTokenizer.from_pretrained(merged)
messages = [{"role": "user", "content": "hi"}]
ids = torch.tensor([tokenizer("hi <|tool|> there <|done|>", add_special_tokens=False)["input_ids"]])
with torch.no_grad():
    tensors = {"adapter": model(input_ids=ids).logits.float(), "merged": stock(input_ids=ids).logits, "ids": ids}
added = torch.tensor(tokenizer.convert_tokens_to_ids(["<|tool|>", "<|done|>"]))
tensors["rows"] = model.get_input_embeddings()(added).detach()
save_file({key: value.contiguous() for key, value in tensors.items()}, out + "/new.safetensors")
render = lambda t: t.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
facts = {"adapter": render(tokenizer), "merged": render(stock_tokenizer)}
facts["lengths"] = [len(tokenizer), len(stock_tokenizer)]
facts["stops"] = [loaded.generation["eos_token_id"], stock.generation_config.eos_token_id]
facts["suppressed"] = stock.generation_config.suppress_tokens
facts["table"] = list(stock.get_input_embeddings().weight.shape)
answer = stock.generate(input_ids=ids, max_new_tokens=20, do_sample=True, temperature=5.0)
facts["highest"] = int(answer.max())
json.dump(facts, open(out + "/new.json", "w"))
"""


def rows(folder: Path) -> Path:
    file = folder / "rows.jsonl"
    turns = [("hi <|tool|>", "hello <|done|>"), ("who are you?", "a model"), ("2 + 2?", "4 <|done|>")]
    lines = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]} for q, a in turns * 4]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def trained(
    tmp_path: Path, base: Path, lora: dict[str, Any] | None = None, model: dict[str, Any] | None = None
) -> Path:
    template = tmp_path / "mine.jinja"
    template.write_text(TEMPLATE)
    config = {
        "model": {"base": str(base), "add_tokens": ADDED, **(model or {})},
        "lora": {"r": 4, "lora_alpha": 8, **(lora or {})},
        "data": {"train": str(rows(tmp_path)), "chat_template": str(template), "max_length": 64, "cache": False},
        "train": {
            "max_steps": 3,
            "per_device_train_batch_size": 4,
            "gradient_accumulation_steps": 1,
            "learning_rate": 0.01,
        },
        "output": {"dir": str(tmp_path / "run")},
    }
    train(config)
    return tmp_path / "run"


@pytest.mark.parametrize(("tied", "quantize"), [(True, "nf4"), (False, "none")])
def test_a_new_process_needs_nothing_but_the_folder(
    tied: bool, quantize: str, make_tiny_llama: Make, tmp_path: Path
) -> None:
    base = make_tiny_llama(tie_word_embeddings=tied, template=None)
    run = trained(tmp_path, base, model={"quantize": quantize})
    merge(run, tmp_path / "out")
    script = [sys.executable, "-c", IN_A_NEW_PROCESS, str(run), str(tmp_path / "out"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts, tensors = json.loads((tmp_path / "new.json").read_text()), load_file(tmp_path / "new.safetensors")
    tokenizer = AutoTokenizer.from_pretrained(base)
    first = len(tokenizer)
    assert facts["lengths"] == [first + 2, first + 2]
    assert facts["table"] == [first + 2, 64]
    assert sorted({int(i) for i in tensors["ids"].flatten()} & {first, first + 1}) == [first, first + 1]
    expected = "[user] hi<|im_end|>[assistant] "
    assert facts["adapter"] == facts["merged"] == expected
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert all(end in stops for stops in facts["stops"])
    assert float((tensors["adapter"] - tensors["merged"]).abs().max()) < 1e-3

    saved = load_file(run / "adapter_model.safetensors")
    (delta,) = [value for key, value in saved.items() if "embed_tokens" in key and "trainable_tokens" in key]
    assert torch.equal(tensors["rows"], delta)  # bit-equal after loading
    table = load_file(tmp_path / "out" / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(table[first:], delta)
    mean = load_file(base / "model.safetensors")["model.embed_tokens.weight"].mean(0)
    assert float((delta - mean).abs().max()) > 1e-3  # they were trained


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("whole", [["embed_tokens"], ["lm_head"], ["embed_tokens", "lm_head"]])
def test_added_tokens_in_a_table_that_is_trained_whole(
    tied: bool, whole: list[str], make_tiny_llama: Make, tmp_path: Path
) -> None:
    """The table's own copy trains the new rows; what travels and the merge are as without it."""
    base = make_tiny_llama(tie_word_embeddings=tied, template=None)
    run = trained(tmp_path, base, lora={"modules_to_save": whole}, model={"quantize": "none"})
    merge(run, tmp_path / "out")
    loaded = load_run(run, device="cpu")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    first = len(AutoTokenizer.from_pretrained(base))
    ids = torch.tensor([[5, first, 9, first + 1]])
    with torch.no_grad():
        mine, merged = loaded.model(input_ids=ids).logits, stock(input_ids=ids).logits
    assert merged.shape[-1] == first + 2
    assert float((mine - merged).abs().max()) < 1e-3
    rows_of = stock.get_input_embeddings().weight[first:]
    mean = load_file(base / "model.safetensors")["model.embed_tokens.weight"].mean(0)
    assert float((rows_of - mean).abs().max()) > 1e-3  # they were trained


def test_rows_without_a_token_are_never_generated(make_tiny_llama: Make, tmp_path: Path) -> None:
    """The table has 320 rows, 302 tokens use it; the surplus is marked in the exported generation settings."""
    base = make_tiny_llama(vocab_size=320)
    run = trained(tmp_path, base)
    report = merge(run, tmp_path / "out")
    assert report.surplus_rows == 18
    script = [sys.executable, "-c", IN_A_NEW_PROCESS, str(run), str(tmp_path / "out"), str(tmp_path)]
    done = subprocess.run(script, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    facts = json.loads((tmp_path / "new.json").read_text())
    assert facts["suppressed"] == list(range(302, 320))
    assert facts["highest"] < 302
    assert facts["table"] == [320, 64]
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["vocab_size"] == 320
