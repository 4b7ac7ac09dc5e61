"""Answers from a model: key/value cache, stock attention, greedy by default, stopping where the chat does."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, TextStreamer

from frugal.checkpoints.side_files import stop_ids
from frugal.data import Message, encode_prompt
from frugal.errors import DataError
from frugal.model_structure import input_device

Messages = list[dict[str, str]]
MOST_SUPPRESSED = 4096
"""Surplus rows of the token table that are kept from being generated one by one."""


@contextlib.contextmanager
def answering(model: Any) -> Iterator[None]:
    """Put a model into the state for answering and put everything back afterwards.

    Evaluation mode (so neither dropout nor activation checkpointing runs), the key/value cache on, and stock attention:
    the one for training packed rows knows no cache. Training flags are put back module by module.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    training: dict[nn.Module, bool] = {module: module.training for module in model.modules()}
    config = base.config.get_text_config()
    use_cache, attention = getattr(config, "use_cache", None), base.config._attn_implementation
    model.eval()
    config.use_cache = True
    if attention not in ("sdpa", "eager"):
        base.set_attn_implementation("sdpa" if base._supports_sdpa else "eager")  # Gemma 2 has its soft cap in eager
    try:
        with torch.no_grad():
            yield
    finally:
        if attention not in ("sdpa", "eager"):
            base.set_attn_implementation(attention)
        config.use_cache = use_cache
        for module, was in training.items():
            module.training = was


def prompt_ids(tokenizer: Any, messages: Messages, *, clock: datetime | None = None) -> list[int]:
    """Token ids that ask for the next answer; a tokenizer without a chat template continues the last message's text.

    ``clock`` is the time for a template that prints it: a run asks with the time that its rows hold. None: now.
    """
    if getattr(tokenizer, "chat_template", None):
        # As in training: the same rendering, one begin token, the text of special tokens in messages stays text.
        turns = [Message(**message) for message in messages]  # type: ignore[arg-type]
        return encode_prompt(tokenizer, turns, clock=clock)
    return list(tokenizer(messages[-1]["content"])["input_ids"])


def as_messages(prompt: str, system_prompt: str | None = None) -> Messages:
    """One question as a conversation."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": prompt}]


def generation_config(
    model: Any, tokenizer: Any, *, max_new_tokens: int, temperature: float = 0.0, settings: dict[str, Any] | None = None
) -> GenerationConfig:
    """Settings of one answer: stops at the ids of the template, the tokenizer and ``settings``; only tokens that exist.

    Args:
        settings: the run's ``generation_config.json``; default: what the model came with.
        temperature: 0 is greedy.
    """
    surplus = model.get_output_embeddings().weight.shape[0] - len(tokenizer)
    own = getattr(model, "generation_config", None)
    stops = stop_ids(tokenizer, settings or {"eos_token_id": getattr(own, "eos_token_id", None)})
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops[0] if stops else None)
    chosen: dict[str, Any] = {"do_sample": temperature > 0, "temperature": temperature} if temperature > 0 else {}
    if 0 < surplus <= MOST_SUPPRESSED:
        chosen["suppress_tokens"] = list(range(len(tokenizer), len(tokenizer) + surplus))
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=stops or None,
        pad_token_id=pad,
        bos_token_id=tokenizer.bos_token_id,
        use_cache=True,
        **{"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, **chosen},
    )


class _Pieces(TextStreamer):  # type: ignore[misc]
    """Collects the answer as it comes, and hands each piece on. An interrupted answer keeps what it had."""

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.pieces: list[str] = []
        self.write = write

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.pieces.append(text)
        if self.write is not None and text:
            self.write(text)


def answer(
    model: Any,
    tokenizer: Any,
    messages: Messages,
    config: GenerationConfig,
    write: Callable[[str], None] | None = None,
    *,
    together: bool = False,
    clock: datetime | None = None,
) -> tuple[str, bool]:
    """Generate the next answer.

    Args:
        write: called with each piece of text as it is generated.
        together: several processes hold a part of the model each and all generate; none stops before the others.
        clock: as for `prompt_ids`.

    Returns:
        The text without special tokens, and whether Ctrl-C cut it short.

    Raises:
        DataError: the conversation leaves no room for an answer.
    """
    ids = prompt_ids(tokenizer, messages, clock=clock)
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    limit = getattr(base.config.get_text_config(), "max_position_embeddings", None)
    if limit is not None and len(ids) >= limit:
        raise DataError(f"The conversation is {len(ids)} tokens long, the model takes {limit}. Start anew with /reset.")
    device = input_device(base)
    inputs = torch.tensor([ids], device=device)
    streamer = _Pieces(tokenizer, write)
    room = config.max_new_tokens if limit is None else min(config.max_new_tokens or limit, limit - len(ids))
    if room != config.max_new_tokens:  # beyond its positions a model has no row, or was never trained
        config = copy.deepcopy(config)
        config.max_new_tokens = room
    try:
        with answering(model):
            model.generate(
                input_ids=inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                streamer=streamer,
                synced_gpus=together,
            )
    except KeyboardInterrupt:
        return "".join(streamer.pieces), True
    return "".join(streamer.pieces), False


def generate_samples(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    system_prompt: str | None = None,
    use_adapter: bool = True,
    together: bool = False,
    clock: datetime | None = None,
) -> list[str]:
    """Greedy answers, one prompt at a time, and the model as it was before.

    Batch 1, so that an answer does not depend on the other prompts; greedy, so that no random number is drawn.

    Args:
        model: a PEFT model, or a plain one.
        use_adapter: False answers with the base alone.
        together: as for `answer`.
        clock: as for `prompt_ids`.
    """
    off = model.disable_adapter() if not use_adapter and hasattr(model, "disable_adapter") else contextlib.nullcontext()
    with off:
        config = generation_config(model, tokenizer, max_new_tokens=max_new_tokens)
        answers = []
        for prompt in prompts:
            text, stopped = answer(
                model, tokenizer, as_messages(prompt, system_prompt), config, together=together, clock=clock
            )
            if stopped:
                raise KeyboardInterrupt
            answers.append(text.strip())
    return answers
