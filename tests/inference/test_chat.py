"""Answers: where they stop, what the model is like afterwards, and the conversation in the terminal."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from frugal.checkpoints.side_files import end_of_turn_ids, generation_settings, stop_ids
from frugal.cli.main import app
from frugal.errors import CheckpointError, DataError, UnsupportedError
from frugal.inference.chat import chat, chat_loop
from frugal.inference.generate import answer, answering, as_messages, generate_samples, generation_config, prompt_ids
from frugal.inference.load import LoadedRun, load, load_run
from tests.support.merged import IDS, logits_of, make_run

Make = Callable[..., Path]


@pytest.fixture(scope="module")
def run(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chat") / "run"
    make_run(folder, tiny_llama_folder)
    return folder


@pytest.fixture(scope="module")
def loaded(run: Path) -> LoadedRun:
    return load_run(run, device="cpu")


class AlwaysSays(torch.nn.Module):
    """Stands for the head: the logits choose the tokens of ``ids`` in turn, whatever the input."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        super().__init__()
        self.weight = model.get_output_embeddings().weight
        self.ids, self.step = ids, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(*hidden.shape[:-1], self.weight.shape[0])
        logits[..., self.ids[min(self.step, len(self.ids) - 1)]] = 10.0
        self.step += 1
        return logits


def test_a_run_is_loaded_as_it_was_trained(run: Path, tiny_llama_folder: Path, tmp_path: Path) -> None:
    reference = make_run(tmp_path / "same", tiny_llama_folder)
    loaded = load_run(run, device="cpu")
    torch.testing.assert_close(logits_of(loaded.model), logits_of(reference), rtol=1e-4, atol=1e-5)
    assert not loaded.model.training
    assert loaded.warnings == []
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    assert load_run(run, device="cpu", trainable=True).model.get_nb_trainable_parameters()[0] > 0


def test_stop_ids_come_from_the_template(tiny_llama_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert end_of_turn_ids(tokenizer) == [end]
    tokenizer.eos_token = "<|endoftext|>"
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert stop_ids(tokenizer, {"eos_token_id": 7}) == [end, other, 7]
    assert generation_settings(tokenizer)["eos_token_id"] == [end, other]
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert end_of_turn_ids(tokenizer) == []
    tokenizer.chat_template = None
    assert stop_ids(tokenizer) == [other]


def test_an_answer_ends_with_the_turn(tiny_llama_folder: Path) -> None:
    """The end of turn is not the tokenizer's eos here; the answer stops there all the same (T06)."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    tokenizer.eos_token = "<|endoftext|>"
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
    model.generation_config.eos_token_id = 0
    words = tokenizer("good morning", add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.set_output_embeddings(AlwaysSays(model, [*words, end, *words]))
    pieces: list[str] = []
    config = generation_config(model, tokenizer, max_new_tokens=30)
    text, stopped = answer(model, tokenizer, as_messages("hi"), config, pieces.append)
    assert (text, stopped) == ("good morning", False)
    assert "".join(pieces) == text
    model.set_output_embeddings(AlwaysSays(model, words * 99))
    text, _ = answer(
        model, tokenizer, as_messages("hi"), generation_config(model, tokenizer, max_new_tokens=len(words))
    )
    assert text == "good morning"


def test_surplus_rows_are_never_chosen(make_tiny_llama: Make) -> None:
    folder = make_tiny_llama(vocab_size=320)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.set_output_embeddings(AlwaysSays(model, [len(tokenizer) + 3]))
    config = generation_config(model, tokenizer, max_new_tokens=3)
    out = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), generation_config=config)
    assert int(out.max()) < len(tokenizer)


def test_samples_leave_the_model_as_it_was(tiny_llama_folder: Path, tmp_path: Path) -> None:
    model: PeftModel = make_run(tmp_path / "run", tiny_llama_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_llama_folder)
    base = model.get_base_model()
    model.train()
    base.model.layers[0].eval()  # a state that .train() would not give back
    base.config.use_cache = False
    before = [module.training for module in model.modules()]
    state, random = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    adapted = generate_samples(model, tokenizer, ["hi", "who are you?"], 6)
    plain = generate_samples(model, tokenizer, ["hi"], 6, use_adapter=False)
    assert adapted[0] != plain[0]
    assert generate_samples(model, tokenizer, ["who are you?", "hi"], 6) == adapted[::-1]
    assert [module.training for module in model.modules()] == before
    assert base.config.use_cache is False
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert generate_samples(model, tokenizer, ["hi"], 6) == adapted[:1]
    with pytest.raises(RuntimeError), answering(model):
        raise RuntimeError
    assert [module.training for module in model.modules()] == before


def test_greedy_answers_are_the_argmax_without_a_cache(loaded: LoadedRun) -> None:
    config = generation_config(loaded.model, loaded.tokenizer, max_new_tokens=5)
    ids = prompt_ids(loaded.tokenizer, as_messages("hello world"))
    plain = list(ids)
    with torch.no_grad():
        for _ in range(5):
            plain.append(int(loaded.model(input_ids=torch.tensor([plain]), use_cache=False).logits[0, -1].argmax()))
            if plain[-1] in config.eos_token_id:
                break
    expected = loaded.tokenizer.decode(plain[len(ids) :], skip_special_tokens=True)
    assert loaded.answer("hello world", max_new_tokens=5) == expected.strip()


def test_a_conversation(loaded: LoadedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[dict[str, str]]] = []

    def fake(model: Any, tokenizer: Any, messages: Any, config: Any, write: Any, clock: Any) -> tuple[str, bool]:
        asked.append([dict(message) for message in messages])
        if messages[-1]["content"] == "long":
            raise DataError("too long")
        write("fine")
        return "fine", messages[-1]["content"] == "stop me"

    monkeypatch.setattr("frugal.inference.chat.answer", fake)
    out = io.StringIO()
    lines = "hello\n\n/help\nlong\nstop me\n/reset\nagain\n"
    chat_loop(loaded, source=io.StringIO(lines), out=out)  # ends at the end of input
    assert [message["content"] for message in asked[1]] == ["hello", "fine", "long"]
    assert [message["content"] for message in asked[2]] == ["hello", "fine", "stop me"]  # the failed turn is gone
    assert [message["role"] for message in asked[2]] == ["user", "assistant", "user"]
    assert [message["content"] for message in asked[3]] == ["again"]
    assert "too long" in out.getvalue()
    assert "[stopped]" in out.getvalue()
    asked.clear()
    chat_loop(loaded, source=io.StringIO("/quit\nnever asked\n"), out=out)
    assert asked == []


def test_ctrl_c_stops_the_answer_only(loaded: LoadedRun) -> None:
    pieces: list[str] = []

    def interrupt(text: str) -> None:
        pieces.append(text)
        raise KeyboardInterrupt

    config = generation_config(loaded.model, loaded.tokenizer, max_new_tokens=50)
    config.eos_token_id = None
    text, stopped = answer(loaded.model, loaded.tokenizer, as_messages("hello world"), config, interrupt)
    assert stopped
    assert text == "".join(pieces)


def test_one_shot(run: Path, loaded: LoadedRun, capsys: pytest.CaptureFixture[str]) -> None:
    text = chat(loaded, "hello world", max_new_tokens=5)
    assert chat(run, "hello world", max_new_tokens=5, device="cpu", echo=True) == text
    assert text in capsys.readouterr().out


def test_a_conversation_longer_than_the_model(loaded: LoadedRun) -> None:
    with pytest.raises(DataError, match="512"):
        loaded.answer("word " * 600)


def test_load_for_notebooks(run: Path, tiny_llama_folder: Path) -> None:
    model, tokenizer = load(str(tiny_llama_folder), lora={"r": 2}, device="cpu")
    assert isinstance(model, PeftModel)
    plain = AutoModelForCausalLM.from_pretrained(tiny_llama_folder, dtype=torch.float32)
    out = model.generate(input_ids=IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)
    assert out.shape[0] == 1
    full, _ = load(str(tiny_llama_folder), quantize="none", device="cpu")
    torch.testing.assert_close(logits_of(full.eval()), logits_of(plain.eval()), rtol=1e-4, atol=1e-5)
    assert model.get_nb_trainable_parameters()[0] > 0
    again, _ = load(run, device="cpu")
    assert isinstance(again, PeftModel)
    assert len(tokenizer) == 300


def test_what_cannot_be_loaded(tmp_path: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no adapter"):
        load_run(tmp_path)
    with pytest.raises(CheckpointError, match="does not exist"):
        load_run(tmp_path / "gone")
    with pytest.raises(UnsupportedError, match="allowed: cpu"):
        load_run(run, device="mps")


def test_the_command(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "frugal", "chat", str(run), "--prompt", "hello world", "--max-new-tokens", "4"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == load_run(run).answer("hello world", max_new_tokens=4)
    missing = CliRunner().invoke(app, ["chat", str(tmp_path / "none")])
    assert missing.exit_code == 2
    assert "does not exist" in missing.stderr
    talk = CliRunner().invoke(app, ["chat", str(run), "--max-new-tokens", "2"], input="hello\n/reset\n/quit\n")
    assert talk.exit_code == 0
    assert "starts anew" in talk.stdout
    assert json.loads((run / "generation_config.json").read_text())["eos_token_id"] == [2]
