"""Fixtures that several parts share: a tiny real model with a real tokenizer, and the real 135M model."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from frugal.assets import fetch
from tests.support.slow import is_long, is_slow

torch.set_num_threads(1)
# child processes of tests import tests.support, whatever folder they work in
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
)


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `make test-quick` and `make test` leave out."""
    for item in items:
        if is_long(item.path):
            item.add_marker(pytest.mark.long)
        if is_slow(item.path) or item.get_closest_marker("model"):
            item.add_marker(pytest.mark.slow)


CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_TEXT = [
    "What is the capital of France? The capital of France is Paris.",
    "How are you today? I am fine, thank you, and you?",
    "user assistant system tool: hello world, good morning, good night.",
    "Two and two are four; three times three is nine. The quick brown fox jumps over the lazy dog.",
]


def make_tokenizer(
    vocab_size: int = 300, *, pad: bool = True, template: str | None = CHATML
) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few sentences: ``vocab_size`` tokens, ids 0-2 special."""
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True) for token in specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(_TEXT * 4, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>" if pad else None,
        model_max_length=512,
    )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def make_llama(vocab_size: int = 300, *, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """A tiny Llama in float32 with seeded weights (hidden 64, 2 layers, 4 heads, 2 key/value heads, tied)."""
    settings: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.1,
    }
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval()


@pytest.fixture(scope="session")
def make_tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Factory: ``make_tiny_llama(**config_changes) -> folder`` with weights, config, tokenizer and template.

    Also takes ``seed``, ``dtype`` (of the stored weights), ``pad`` and ``template``.
    """

    def make(
        *,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        pad: bool = True,
        template: str | None = CHATML,
        **changes: Any,
    ) -> Path:
        folder = tmp_path_factory.mktemp("tiny") / "tiny-llama"
        tokenizer = make_tokenizer(300, pad=pad, template=template)
        make_llama(changes.pop("vocab_size", len(tokenizer)), seed=seed, **changes).to(dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="session")
def tiny_llama_folder(make_tiny_llama: Callable[..., Path]) -> Path:
    """A saved tiny Llama (float32, tied, 300 tokens) with its tokenizer and a ChatML template. Read only."""
    return make_tiny_llama()


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """The fetched SmolLM2-135M-Instruct. Mark tests that use it with ``@pytest.mark.model``."""
    return fetch("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def corpus_folder() -> Path:
    """The fetched chatterbot corpus: one JSONL file a language."""
    return fetch("chatterbot-corpus")
