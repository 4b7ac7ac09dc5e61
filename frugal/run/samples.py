"""Answers to `output.sample_prompts` before and after training, side by side in samples.json."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from torch import nn

from frugal.data import PreparedData, encode_prompt
from frugal.distributed import group as ranks
from frugal.distributed.strategy import Strategy
from frugal.files import read_json, write_json
from frugal.inference.generate import generate_samples


class Samples:
    """The sample prompts of one run. Where the model is sharded every rank takes part in an answer, so `before` and
    `after` are called by all ranks; rank 0 writes."""

    def __init__(
        self,
        path: Path,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        system_prompt: str | None = None,
        clock: datetime | None = None,
    ) -> None:
        self.path, self.prompts = path, list(prompts)
        self.max_new_tokens, self.system_prompt, self.clock = max_new_tokens, system_prompt, clock
        self.rows: list[dict[str, str]] = []
        """`{"prompt": ..., "before": ..., "after": ...}`; empty on other ranks than the first."""

    def before(self, strategy: Strategy, wrapped: nn.Module, model: Any, tokenizer: Any, *, resumed: bool) -> None:
        """Answer with the base alone. A resumed run keeps the answers that its first part wrote."""
        if not self.prompts:
            return
        answers = ranks.on_first(lambda: _kept_answers(self.path, self.prompts) if resumed else None)
        if answers is None:
            # before the first step the adapter changes nothing; later only the base alone says what was before
            answers = self._answers(strategy, wrapped, model, tokenizer, use_adapter=False)
        if ranks.rank() == 0:
            pairs = zip(self.prompts, answers, strict=True)
            self.rows = [{"prompt": prompt, "before": answer, "after": ""} for prompt, answer in pairs]
            write_json(self.path, self.rows)

    def after(self, strategy: Strategy, wrapped: nn.Module, model: Any, tokenizer: Any) -> None:
        """Answer with the trained adapter."""
        if not self.prompts:
            return
        answers = self._answers(strategy, wrapped, model, tokenizer, use_adapter=True)
        if ranks.rank() == 0:
            for row, answer in zip(self.rows, answers, strict=True):
                row["after"] = answer
            write_json(self.path, self.rows)

    def _answers(
        self, strategy: Strategy, wrapped: nn.Module, model: Any, tokenizer: Any, *, use_adapter: bool
    ) -> list[str]:
        def generate() -> list[str]:
            return generate_samples(
                model,
                tokenizer,
                self.prompts,
                self.max_new_tokens,
                system_prompt=self.system_prompt,
                clock=self.clock,
                use_adapter=use_adapter,
                together=strategy.sharded,
            )

        if strategy.sharded:
            return strategy.inside(wrapped, generate)
        return generate() if ranks.rank() == 0 else []


def asked_otherwise(
    data: PreparedData, tokenizer: Any, *, system_prompt: str | None, clock: datetime | None
) -> list[str]:
    """A warning when chat, samples and evaluation will ask in another form than a trained row has; else nothing.

    The ids that ask for a row's last answer must be a prefix of the row's own ids.
    """
    if data.sample is None:
        return []
    example, trained = data.sample
    if not getattr(tokenizer, "chat_template", None):
        asked = list(tokenizer(example.prompt)["input_ids"]) if example.kind == "prompt_completion" else []
    else:
        asked = encode_prompt(tokenizer, example.messages[:-1], example.tools, system_prompt=system_prompt, clock=clock)
    same = min(len(asked), len(trained))
    if asked[:same] == trained[:same]:
        return []
    at = next(index for index in range(same) if asked[index] != trained[index])
    here = [repr(tokenizer.decode(ids[max(0, at - 8) : at + 8])) for ids in (asked, trained)]
    return [
        f"{example.source}:{example.line}: chat and samples ask in another form than this row is trained, from token "
        f"{at}: asked ...{here[0]}, trained ...{here[1]}. The chat template prints the two differently: set "
        "data.chat_template to one that does not, or write the rows as they will be asked."
    ]


def _kept_answers(path: Path, prompts: list[str]) -> list[str] | None:
    """Answers of the base that an earlier part of the run wrote down; None when one is missing."""
    kept = {row["prompt"]: row["before"] for row in read_json(path)} if path.is_file() else {}
    return [kept[prompt] for prompt in prompts] if set(prompts) <= kept.keys() else None
