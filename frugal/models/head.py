"""The language-model head apart from the decoder, so that the loss never sees all logits.

`split_head` finds decoder, head and what is done to the logits (a scale, a soft cap), then proves it: on random tokens
the head's own arithmetic must give the stock model's logits. Where it does not, the stock logits are used, and
`HeadSpec.reason` says why. Parameters are read at every call, so adapters may be switched afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from frugal.models.equivalence import largest_difference, model_tolerance, probe
from frugal.models.lora_layers import LoraWeights, gathered, lora_weights, one_adapter, whole_weight
from frugal.models.masks import documents_known
from frugal.ops import IGNORE_INDEX, linear_cross_entropy
from frugal.ops.host_values import known, remember
from frugal.ops.weights import matmul_t

_PROBE_TOKENS = 5  # each gives a row of logits
# Names under which transformers' families keep what they do to logits: multiplied by, divided by, capped at.
_SCALES = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
_SOFTCAPS = ("final_logit_softcapping",)


def shift_labels(labels: Tensor) -> Tensor:
    """Labels [rows, tokens] in transformers' convention (label t is token t) -> label t is what token t predicts.

    The last position of a row gets `IGNORE_INDEX`. In a flat packed row the first token of each document carries it
    already, so no document predicts the next one's first token.
    """
    shifted = labels.new_full(labels.shape, IGNORE_INDEX)
    shifted[..., :-1] = labels[..., 1:]
    return shifted


@dataclass
class HeadSpec:
    """How to get from model inputs to the loss. `exact` False means stock logits, for `reason`."""

    model: Any
    decoder: Any
    head: nn.Module
    logit_scale: float
    softcap: float | None
    exact: bool
    reason: str

    def hidden_states(self, inputs: Mapping[str, Any]) -> Tensor:
        """Decoder output [rows, tokens, hidden_size] after the last norm, for the keywords a model takes but labels."""
        hidden: Tensor = self.decoder(**inputs, use_cache=False).last_hidden_state
        return hidden

    def loss(
        self,
        hidden: Tensor,
        labels: Tensor,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int | None = None,
        reduction: Literal["sum", "none"] = "sum",
    ) -> Tensor:
        """Sum of the losses of hidden states [tokens, hidden_size] and shifted labels [tokens]: fp32 scalar.

        ``reduction="none"``: each token's, [tokens]; its backward pass reads the head's weight again, which has to be
        whole then.
        """
        weight = whole_weight(self.head, hidden.device)
        # of a sum gradients are made in here, backward needs no weight
        with gathered(self.head) if weight is None else contextlib.nullcontext():
            parts = self._parts()
            parts = parts if weight is None else replace(parts, weight=weight)
            lora, lora_input = one_adapter(parts.adapters), None
            if any(adapter.dropout for adapter in parts.adapters):
                lora_input = F.dropout(hidden, parts.adapters[0].dropout)
            return linear_cross_entropy(
                hidden, parts.weight, labels, bias=parts.bias, logit_scale=self.logit_scale, softcap=self.softcap,
                label_smoothing=label_smoothing, lora=lora, lora_input=lora_input, chunk_tokens=chunk_tokens,
                reduction=reduction,
            )  # fmt: skip

    def loss_sum(
        self,
        inputs: Mapping[str, Any],
        labels: Tensor,
        *,
        label_smoothing: float = 0.0,
        chunk_tokens: int | None = None,
    ) -> Tensor:
        """Sum over supervised tokens for model ``inputs`` and labels [rows, tokens] in transformers' convention.

        Through stock logits, all of which exist then, where the head could not be proven.
        """
        return self._losses(inputs, labels, label_smoothing, chunk_tokens, "sum")

    def log_probs(self, inputs: Mapping[str, Any], labels: Tensor, *, chunk_tokens: int | None = None) -> Tensor:
        """Log-probability of each token [rows * tokens], at the position that predicts it; 0 where there is no target.

        Arguments as of `loss_sum`.
        """
        return -self._losses(inputs, labels, 0.0, chunk_tokens, "none")

    def _losses(
        self,
        inputs: Mapping[str, Any],
        labels: Tensor,
        label_smoothing: float,
        chunk_tokens: int | None,
        reduction: Literal["sum", "none"],
    ) -> Tensor:
        shifted, on_host = shift_labels(labels).flatten(), known(labels)
        if on_host is not None:
            remember(shifted, shift_labels(on_host).flatten())
        if self.exact and not self._refusal():
            with documents_known(self.model, inputs) as given:
                hidden = self.hidden_states(given).flatten(0, -2)
            return self.loss(
                hidden, shifted, label_smoothing=label_smoothing, chunk_tokens=chunk_tokens, reduction=reduction
            )
        with documents_known(self.model, inputs) as given:
            logits = self.model(**given, use_cache=False).logits.flatten(0, -2)
        return F.cross_entropy(
            logits.to(torch.promote_types(logits.dtype, torch.float32)), shifted, ignore_index=IGNORE_INDEX,
            label_smoothing=label_smoothing, reduction=reduction,
        )  # fmt: skip

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., vocab] of hidden states, for proofs and for sampling a few positions. No gradients."""
        parts = self._parts()
        with torch.no_grad():
            flat = hidden.flatten(0, -2)
            out = matmul_t(flat, parts.weight)
            if parts.bias is not None:
                out = out + parts.bias.to(out.dtype)
            lora = one_adapter(parts.adapters)
            if lora is not None:
                out = out + (F.linear(F.linear(flat.to(lora[0].dtype), lora[0]), lora[1]) * lora[2]).to(out.dtype)
            out = out * self.logit_scale
            if self.softcap is not None:
                out = self.softcap * torch.tanh(out / self.softcap)
            return out.view(*hidden.shape[:-1], -1)

    def _refusal(self) -> str | None:
        """Why the head as it is now cannot be computed in chunks (PEFT may have switched adapters since the proof)."""
        parts = lora_weights(self.head)
        if isinstance(parts, str):
            return parts
        if len(parts.adapters) > 1 and any(adapter.dropout for adapter in parts.adapters):
            return "several adapters with a dropout each"
        return None

    def _parts(self) -> LoraWeights:
        parts, refusal = lora_weights(self.head), self._refusal()
        if refusal is not None or isinstance(parts, str):
            raise RuntimeError(f"the head changed after it was proven: {refusal}. Call loss_sum, or split_head again")
        return parts


def split_head(model: Any, *, prove: bool = True) -> HeadSpec:
    """Decoder and head of a causal language model (plain or wrapped by PEFT), proven on random tokens.

    The proof compares `HeadSpec.logits` with the stock logits for two short rows (`frugal.models.equivalence`). Soft
    cap and scale are the family's config values, or a constant ratio that was measured.
    ``prove=False`` takes the config's word: a model without memory has no numbers.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    head = inner.get_output_embeddings()
    decoder = getattr(inner, "base_model", inner)
    stock = HeadSpec(model, decoder, head, 1.0, None, False, "")
    if head is None or decoder is inner:
        stock.reason = "no separate decoder and head found: stock logits"
        return stock
    parts = lora_weights(head)
    if isinstance(parts, str):
        stock.reason = f"head: {parts}; stock logits"
        return stock
    config = inner.config.get_text_config()
    scale = _first(config, _SCALES, 1.0) / _first(config, _DIVISORS, 1.0)
    softcap = _first(config, _SOFTCAPS, None)
    if not prove:
        return HeadSpec(model, decoder, head, scale, softcap, True, "by structure, not proven")
    allowed = model_tolerance(model)
    hidden, want = probe(
        model,
        lambda **inputs: decoder(**inputs).last_hidden_state,
        lambda **inputs: model(**inputs).logits,
        tokens=_PROBE_TOKENS,
    )
    spec = HeadSpec(model, decoder, head, scale, softcap, True, "")
    error = _error(spec, hidden, want)
    if error > allowed and softcap is None:
        # A family may scale its logits under a name we do not know: a constant ratio shows that.
        plain = HeadSpec(model, decoder, head, 1.0, None, True, "").logits(hidden).float()
        spec.logit_scale = float((plain * want).sum() / plain.square().sum().clamp(min=1e-30))
        error = _error(spec, hidden, want)
    if error <= allowed:
        what = f"scale {spec.logit_scale:g}" + ("" if softcap is None else f", soft cap {softcap:g}")
        spec.reason = f"logits equal to the stock model's (relative difference {error:.1g}; {what})"
        return spec
    stock.reason = f"head times hidden states differs from the stock logits by {error:.2g} of the largest: stock logits"
    return stock


def _first(config: Any, names: tuple[str, ...], default: Any) -> Any:
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    return default


def _error(spec: HeadSpec, hidden: Tensor, want: Tensor) -> float:
    apart, largest = largest_difference(want, spec.logits(hidden))
    return apart / max(largest, 1e-30)
