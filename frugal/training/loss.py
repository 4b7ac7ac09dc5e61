"""The module that is trained, and wrapped for data parallelism: inputs in, sum of losses and number of targets out.

It divides by nothing. The mean over a whole optimizer step is taken in one place, `loop._accumulate`, which knows the
targets of all micro-batches and ranks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from frugal.models.head import IGNORE_INDEX, HeadSpec, shift_labels, split_head


class LossModule(nn.Module):
    """Cross-entropy of a causal language model, summed over its targets, without the logits of all tokens.

    ``model`` may be plain or a PEFT model; it is the only child, so gradients of its parameters are those that data
    parallelism reduces.
    """

    def __init__(
        self, model: nn.Module, *, chunk_tokens: int | None = None, prove: bool = True, head: HeadSpec | None = None
    ) -> None:
        """``head``: what `split_head` found for ``model`` before, where it cannot be run by itself any more."""
        super().__init__()
        self.model = model
        self.head: HeadSpec = split_head(model, prove=prove) if head is None else head
        self.chunk_tokens = chunk_tokens
        """Tokens of one chunk of logits; None: by size."""

    def forward(self, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Sum of losses (fp32 scalar) and number of targets (int64 scalar).

        ``batch`` is what `frugal.data.collate` makes: `labels` [rows, tokens] with label t at token t and -100 where
        nothing is trained (shifted here), the rest are the model's keywords. A batch without targets gives exactly 0,
        and gradients of exactly 0.
        """
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        labels = batch["labels"]
        count = (shift_labels(labels) != IGNORE_INDEX).sum()
        loss_sum = self.head.loss_sum(inputs, labels, chunk_tokens=self.chunk_tokens)
        return loss_sum.to(torch.promote_types(loss_sum.dtype, torch.float32)), count
