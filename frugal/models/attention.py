"""frugal's attention for transformers models, registered under the name "frugal" through the library's own interface.

`register` adds two functions: one that computes attention (`frugal.ops.attention`) and one that would build the mask.
Ours builds none for training: causality, a window and documents are arguments of the operation, and padding at the
end of a row needs no mask. What the operation cannot honour (padding at the left, other patterns) is refused with the
way out, never dropped. Decoding with a cache needs a [1, keys] mask and goes to scaled_dot_product_attention.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from frugal.decision import Decision
from frugal.errors import UnsupportedError
from frugal.model_structure import decoder_layers, input_device
from frugal.models.equivalence import CANNOT_RUN, evaluating, largest_difference, model_tolerance, probe
from frugal.models.masks import NAME, WAY_OUT, MaskInfo, frugal_mask
from frugal.models.materialize import DeferredLayers
from frugal.ops import attention, choose

AUTO = "auto"
_DOCUMENT_LAYERS = {"full_attention", "sliding_attention", "attention"}
"""Kinds of layers, in transformers' words, in which a token sees tokens of its own document only."""
_STATE = re.compile(r"Mamba|Recurrent|DeltaNet|ShortConv|LinearAttention|Rwkv", re.IGNORECASE)
_KEY = "attention"


def register(implementation: str = AUTO) -> str:
    """Make "frugal" known to transformers and return that name; with an ``implementation`` (a row of the table, for
    example "triton") "frugal_triton", which uses that one always. Doing it again changes nothing."""
    name, forward = NAME, frugal_attention_forward
    if implementation != AUTO:
        name = f"{NAME}_{implementation}"
        forward = functools.partial(frugal_attention_forward, implementation=implementation)
    AttentionInterface.register(name, forward)
    AttentionMaskInterface.register(name, frugal_mask)
    return name


def frugal_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | MaskInfo | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    cu_seq_lens_q: Tensor | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    implementation: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: query [B, Hq, S, D], key and value [B, Hkv, S, D] -> [B, S, Hq, D].

    ``cu_seq_lens_q`` [documents + 1] int32: offsets of a packed batch, the keyword of transformers' flash attention.
    """
    if dropout > 0:
        raise UnsupportedError(f"frugal attention has no dropout, and this model asks for {dropout}: {WAY_OUT}")
    if s_aux is not None or position_bias is not None:
        name = "attention sinks" if s_aux is not None else "a position bias"
        raise UnsupportedError(f"frugal attention has no {name}: load it with attn_implementation='eager'")
    if kwargs.get("output_attentions"):
        raise UnsupportedError(
            "attention weights are never built: load it with attn_implementation='eager' to see them"
        )
    if isinstance(attention_mask, Tensor):
        return _masked(query, key, value, attention_mask, scaling, softcap).transpose(1, 2).contiguous(), None
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    attend = functools.partial(attention, implementation=implementation)
    if query.shape[2] != key.shape[2]:
        raise UnsupportedError(f"{query.shape[2]} queries against {key.shape[2]} keys without a mask: {WAY_OUT}")
    cu_seqlens: Any = cu_seq_lens_q
    window = sliding_window or None
    if attention_mask is not None:
        cu_seqlens = cu_seqlens if attention_mask.cu_seqlens is None else attention_mask.cu_seqlens
        # A layer that names no window but was given a windowed mask means the mask's window.
        window = attention_mask.window if window is None else window
    if value.shape[-1] != query.shape[-1]:  # latent attention: values narrower than keys
        padded = F.pad(value, (0, query.shape[-1] - value.shape[-1]))
        out = attend(query, key, padded, cu_seqlens=cu_seqlens, scale=scaling, window=window, softcap=softcap,
                        causal=causal)[..., : value.shape[-1]]  # fmt: skip
    else:
        out = attend(query, key, value, cu_seqlens=cu_seqlens, scale=scaling, window=window, softcap=softcap,
                        causal=causal)  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _masked(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float | None, softcap: float | None
) -> Tensor:
    """Attention under an explicit [B, 1, q, k] boolean or additive mask: decoding, and masks made by the caller."""
    groups = query.shape[1] // key.shape[1]
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=groups > 1)
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    scores = torch.matmul(query, key.transpose(-1, -2)) * (query.shape[-1] ** -0.5 if scale is None else scale)
    scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    return torch.matmul(scores.softmax(-1, dtype=torch.float32).to(query.dtype), value)


@dataclass(frozen=True)
class AttentionDecision(Decision[str]):
    """Which attention a model runs with: "frugal", or transformers' name of the one that the model keeps."""

    by_layer: dict[str, Decision[str]] = field(default_factory=dict)
    """Row of the operations' table by kind of layer ("full" and, where the model has them, "sliding")."""


def use_attention(
    model: Any, implementation: str = AUTO, *, prove: bool = True, deferred: DeferredLayers | None = None
) -> AttentionDecision:
    """Switch a loaded transformers model to frugal attention where that is exact; else leave it and say why.

    Left alone: models whose attention does not go through `AttentionInterface`, attention sinks, dropout in attention,
    and anything whose logits on a tiny random batch differ from the stock ones (`frugal.models.equivalence`).
    ``prove=False`` leaves that comparison out: a model without memory has no numbers. Where decoder layers are
    ``deferred``, one of each kind is compared by itself.

    ``implementation`` (`memory.attention`) other than "auto" is used or is an error: `UnsupportedError` says what
    stands against it.
    """
    before = model.config._attn_implementation
    decision = _switched(model, before, implementation, prove, deferred)
    if decision.value == before and implementation != AUTO:
        raise UnsupportedError(
            f"memory.attention: {implementation} was asked for, but this model keeps {before}: {decision.reason}. "
            "Write `memory.attention: auto`."
        )
    return decision


def _switched(
    model: Any, before: str, implementation: str, prove: bool, deferred: DeferredLayers | None
) -> AttentionDecision:
    name = register(implementation)
    if not getattr(model, "_supports_attention_backend", False) or not model._can_set_attn_implementation():
        return AttentionDecision(_KEY, before, "the model does not use transformers' AttentionInterface")
    if (chunk := _chunk(model)) is not None:  # a window shows the last tokens, a chunk those since its own start
        return AttentionDecision(_KEY, before, f"attention in chunks of {chunk} tokens is no sliding window")
    if not prove:
        model.set_attn_implementation(name)
        if (failure := _refusal(model)) is None:
            return AttentionDecision(_KEY, NAME, "by structure, not proven")
        model.set_attn_implementation(before)
        return AttentionDecision(_KEY, before, failure)
    by_layer = _by_layer(model, implementation)
    error, failure = 0.0, None
    wholes = [contextlib.nullcontext()] if deferred is None else [deferred.only(layer) for layer in deferred.kinds()]
    try:
        for whole in wholes:
            with whole:
                model.set_attn_implementation(before)
                want = _logits(model)
                model.set_attn_implementation(name)
                apart, largest = largest_difference(want, _logits(model))
                failure = failure or _refusal(model)
            if not apart <= model_tolerance(model) * max(largest, 1e-6):
                failure = failure or f"logits differ by {apart:.2g} (largest {largest:.2g})"
            error = max(error, apart)
    except (UnsupportedError, *CANNOT_RUN) as refusal:  # of a mask that is built in a way of its own, for example
        failure = f"it does not run with frugal attention ({refusal})"
    if failure is None:
        reason = f"logits equal to {before}'s on a random batch (largest difference {error:.1g})"
        return AttentionDecision(_KEY, NAME, reason, by_layer=by_layer)
    model.set_attn_implementation(before)
    return AttentionDecision(_KEY, before, failure)


def join_rows(model: nn.Module, attention: str, *, packing: bool) -> Decision[bool]:
    """Whether the rows of a micro-batch lie end to end in one sequence, or are padded side by side.

    Joined, they waste nothing on padding; but a row must not reach into the next. Attention gets the borders of
    documents; layers with a running state (convolution, Mamba, linear attention) and attention in chunks, which are
    counted from the start of the sequence, do not.

    Args:
        model: the base; it may be without memory.
        attention: what it runs with (`AttentionDecision.value`); "frugal" knows the borders of unpacked rows too.

    Packing under an attention of transformers' own is tried on two rows where the model has numbers: some families
    build their mask without positions, and borders are lost on the way.

    Raises:
        UnsupportedError: ``packing`` was asked for where rows cannot be joined.
    """
    reason = across_rows(model)
    if reason is None and packing and not attention.startswith(NAME) and input_device(model).type != "meta":
        reason = rows_leak(model)
    if reason is None:
        joined = packing or attention.startswith(NAME)
        why = "data.packing is true" if packing else f"attention is {attention}"
        return Decision("rows of a micro-batch", joined, why)
    if packing:
        raise UnsupportedError(
            f"data.packing is true, but {reason}: a row would depend on the one before it. Write "
            "`data.packing: false`; rows are then padded side by side, and group_by_length keeps the padding small."
        )
    return Decision("rows of a micro-batch", False, reason)


@torch.no_grad()
def rows_leak(model: Any) -> str | None:
    """Why two rows must not lie in one sequence: what the second one's logits lose beside the first, by numbers."""
    generator = torch.Generator().manual_seed(0)
    vocab = model.get_input_embeddings().weight.shape[0]
    first, second = (torch.randint(0, vocab, (1, n), generator=generator).to(input_device(model)) for n in (9, 7))
    places = torch.cat([torch.arange(row.shape[1]) for row in (first, second)])[None].to(first.device)
    with evaluating(model):
        alone = model(input_ids=second, use_cache=False).logits[0]
        joined = model(input_ids=torch.cat([first, second], 1), position_ids=places, use_cache=False).logits[0, 9:]
    apart, largest = largest_difference(alone, joined)
    if apart <= model_tolerance(model) * max(largest, 1e-6):
        return None
    return (
        f"this model loses the borders of rows in one sequence (logits of a row behind another differ by {apart:.2g}, "
        f"the largest is {largest:.2g})"
    )


def across_rows(model: Any) -> str | None:
    """What would carry something from a row into the next in one sequence; None for attention over documents alone."""
    if (chunk := _chunk(model)) is not None:
        return f"this model attends in chunks of {chunk} tokens, counted from the start of the sequence"
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ()) - _DOCUMENT_LAYERS
    if kinds:
        return f"this model has layers with a running state ({', '.join(sorted(kinds))})"
    for layer in decoder_layers(model).values():
        for module in layer.modules():
            if isinstance(module, nn.Conv1d) or _STATE.search(type(module).__name__):
                return f"this model has layers with a running state ({type(module).__name__})"
    return None


def _chunk(model: Any) -> int | None:
    config = model.config.get_text_config()
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    return int(chunk) if chunk and (kinds is None or "chunked_attention" in kinds) else None


def _logits(model: Any) -> Tensor:
    return probe(model, lambda **inputs: model(**inputs).logits)[0]


def _refusal(model: Any) -> str | None:
    """Why the model does not run with the attention that it has now in training, where its dropout is not zero.

    Names of dropout differ between configurations, so the model is asked itself.
    """

    ids = torch.zeros((2, 5), dtype=torch.int64, device=input_device(model))
    with torch.random.fork_rng(devices=[]), torch.no_grad(), evaluating(model):
        for module in model.modules():
            module.training = True
        try:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False)
        except (UnsupportedError, *CANNOT_RUN) as refusal:
            return f"it does not train with frugal attention ({refusal})"
    return None


def _by_layer(model: Any, implementation: str) -> dict[str, Decision[str]]:
    """What the table chooses for the model's heads, window and soft cap on the device where it is."""
    config = model.config.get_text_config()
    device, dtype = input_device(model), model.get_input_embeddings().weight.dtype
    heads = getattr(config, "num_attention_heads", 1)
    facts = {
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "softcap": getattr(config, "attn_logit_softcapping", None),
        "named": None if implementation == AUTO else implementation,
    }
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"])
    found = {}
    if kinds != {"sliding_attention"}:
        found["full"] = choose("attention", device, dtype, window=None, **facts)
    if window and "sliding_attention" in kinds:
        found["sliding"] = choose("attention", device, dtype, window=window, **facts)
    return found
