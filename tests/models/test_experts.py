"""Experts of every family: ours, over dense and NF4 stacks, against transformers' own over the same numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from frugal.codecs import NF4Codec, Piece
from frugal.model_structure import stacked_experts
from frugal.models.modules.experts import STACKS, FrugalExperts, NF4Experts, experts_candidate
from frugal.models.skeleton import build_meta
from frugal.ops import ExpertStack
from frugal.ops import experts as run_experts
from frugal.ops.projection import Lora
from tests.support.tiny_models import MOE_FAMILIES, tiny_config, tiny_model

RANK, TOKENS = 3, 23


def stock(family: str) -> tuple[Any, nn.Module]:
    """(the last layer's experts, the module around them), of a tiny random model."""
    model = tiny_model(family)
    name, module = [(n, m) for n, m in model.named_modules() if stacked_experts(m)][-1]
    module.config = copy.copy(module.config)
    module.config._experts_implementation = "eager"
    return module, model.get_submodule(name.rpartition(".")[0])


def inputs(module: Any, k: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, 48, generator=generator)
    count = module.gate_up_proj.shape[0]
    index = torch.stack([torch.randperm(count - 1, generator=generator)[:k] for _ in range(TOKENS)])  # the last is idle
    return x, index, torch.rand(TOKENS, k, generator=generator)


def adapters(ours: FrugalExperts) -> list[Tensor]:
    """A and B of both stacks, flat as in PEFT's files."""
    generator = torch.Generator().manual_seed(2)
    found = []
    for count, out, columns in (ours.sizes(part) for part in STACKS):
        found += [torch.randn(count * RANK, columns, generator=generator) * 0.2,
                  torch.randn(out, RANK * count, generator=generator) * 0.2]  # fmt: skip
    return [tensor.requires_grad_() for tensor in found]


def dense(ours: FrugalExperts, part: str) -> Tensor:
    """The stack's numbers, as the stock module has them."""
    stack = ours.matrix_stack(part)
    if not isinstance(stack, Tensor):
        stack = torch.stack([stack.expert(e).dequantize_rows(0, stack.shape[1], torch.float32)
                             for e in range(stack.shape[0])])  # fmt: skip
    return stack.transpose(1, 2) if ours.is_transposed else stack


def delta(a: Tensor, b: Tensor, count: int, transposed: bool) -> Tensor:
    """PEFT's update of a stack, of scale 1."""
    update = torch.einsum("ore,eri->eoi", b.reshape(b.shape[0], RANK, count), a.reshape(count, RANK, -1))
    return update.transpose(1, 2) if transposed else update


def close(got: Tensor, want: Tensor, allowed: float = 1e-5) -> bool:
    return float((got - want).detach().abs().max()) <= allowed * float(want.detach().abs().max())


@pytest.mark.parametrize("stored", ["dense", "nf4"])
@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_as_transformers_over_the_same_numbers(family: str, stored: str) -> None:
    old, _ = stock(family)
    ours = experts_candidate(old, NF4Codec() if stored == "nf4" else None)
    assert isinstance(ours, FrugalExperts), ours
    if isinstance(ours, NF4Experts):
        for part in STACKS:
            ours.encode_(part, old.get_parameter(part).detach())
    ours.tile_tokens = 4
    x, index, weights = inputs(old)
    factors = adapters(ours)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *factors]
    updated = {
        part: dense(ours, part) + 0.7 * delta(a, b, ours.num_experts, ours.is_transposed)
        for part, a, b in zip(STACKS, factors[::2], factors[1::2], strict=True)
    }
    want = torch.func.functional_call(old, updated, (x, index, weights))
    up = torch.randn(want.shape, generator=torch.Generator().manual_seed(3))
    loras: list[Lora] = [(a, b, 0.7) for a, b in zip(factors[::2], factors[1::2], strict=True)]
    got = ours(x, index, weights, gate_up_lora=loras[0], down_lora=loras[1])
    assert close(got, want)
    mine, theirs = (torch.autograd.grad(out, leaves, up) for out in (got, want))
    wrong = [i for i, pair in enumerate(zip(mine, theirs, strict=True)) if not close(*pair)]
    assert not wrong, "of x, weights of choices, A and B of gate_up, A and B of down"


def same(one: NF4Experts, other: NF4Experts) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_cut_of_a_checkpoint_changes_no_number(family: str) -> None:
    """Whole stacks, experts in any order, or gate and up of each as matrices of their own: the same bytes."""
    old, _ = stock(family)
    whole, other = NF4Experts(old, NF4Codec()), NF4Experts(old, NF4Codec())
    for part in STACKS:
        stack = old.get_parameter(part).detach()
        whole.encode_(part, stack)
        for expert in reversed(range(stack.shape[0])):
            if whole.parts[part] == 2:
                gate, up = stack[expert].chunk(2)
                other.encode_piece_(part, Piece(expert, 1, 2), up)
                other.encode_piece_(part, Piece(expert, 0, 2), gate)
            else:
                other.encode_piece_(part, Piece(expert), stack[expert])
    assert same(whole, other)
    assert whole.parts["gate_up_proj"] == (1 if family == "gpt_oss" else 2)
    gate = whole.encoded("gate_up_proj").pieces.expert(0)
    rows = old.gate_up_proj[0].t() if whole.is_transposed else old.gate_up_proj[0][: gate.shape[0]]
    alone = NF4Codec().encode(rows)
    assert all(torch.equal(a, b) for a, b in zip(gate.tensors().values(), alone.tensors().values(), strict=True))
    with pytest.raises(ValueError, match="one of 1 matrices of an expert"):
        whole.encode_piece_("down_proj", Piece(0), torch.zeros(3, 3))


def test_dropout_draws_the_same_masks_in_backward() -> None:
    old, _ = stock("gpt_oss")
    ours = FrugalExperts(old.double().requires_grad_(False))
    ours.tile_tokens = 3
    x, index, weights = inputs(old)
    leaves = [t.detach().double().requires_grad_() for t in (x, weights, *adapters(ours))]

    def run(x: Tensor, weights: Tensor, ga: Tensor, gb: Tensor, da: Tensor, db: Tensor) -> Tensor:
        torch.manual_seed(5)
        out: Tensor = ours(x, index, weights, gate_up_lora=(ga, gb, 1.0), down_lora=(da, db, 1.0), dropout=0.3)
        return out

    assert torch.equal(run(*leaves), run(*leaves))
    assert not torch.equal(run(*leaves), ours(leaves[0], index, leaves[1], gate_up_lora=(leaves[2], leaves[3], 1.0)))
    assert torch.autograd.gradcheck(run, leaves, fast_mode=True)


def test_ids_of_no_expert_are_padding() -> None:
    old, _ = stock("qwen3_moe")
    ours = FrugalExperts(old)
    x, index, weights = inputs(old)
    index[::3, 1] = ours.num_experts
    assert close(ours(x, index, weights), old(x, index, weights))
    index[:] = ours.num_experts
    assert not ours(x, index, weights).any()


def test_16_bits_are_summed_wide() -> None:
    old, _ = stock("olmoe")
    x, index, weights = inputs(old, k=5)
    exact = old(x, index, weights).detach()
    ours, half = FrugalExperts(old.bfloat16()), (x.bfloat16(), index, weights.bfloat16())
    error, theirs = (float((module(*half).detach().float() - exact).norm()) for module in (ours, old))
    assert error <= 1.02 * theirs


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_without_memory_the_same_is_decided(family: str) -> None:
    model = build_meta(tiny_config(family), trust_remote_code=False)
    with torch.device("meta"):  # nor may it matter where tensors are being made
        found = [experts_candidate(m, NF4Codec()) for m in model.modules() if stacked_experts(m)]
    assert found
    assert all(isinstance(one, NF4Experts) for one in found), found
    assert all(p.is_meta for one in found for p in one.parameters())  # type: ignore[union-attr]


def test_it_runs_on_tensors_without_memory() -> None:
    model = build_meta(tiny_config("qwen3_moe"), trust_remote_code=False)
    module = next(m for m in model.modules() if stacked_experts(m))
    ours = experts_candidate(module, NF4Codec())
    assert isinstance(ours, NF4Experts)
    x = torch.empty(TOKENS, 48, device="meta", requires_grad=True)
    index, weights = torch.empty(TOKENS, 2, dtype=torch.long, device="meta"), torch.empty(TOKENS, 2, device="meta")
    out = ours(x, index, weights)
    out.backward(torch.empty_like(out))
    assert out.shape == x.shape
    assert x.grad is not None


def test_what_is_not_known_stays_with_a_reason() -> None:
    class Louder(type(stock("qwen3_moe")[0])):  # type: ignore[misc]
        def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
            out: Tensor = super().forward(hidden_states, top_k_index, top_k_weights)
            return 1.01 * out

    old, _ = stock("qwen3_moe")
    old.__class__ = Louder
    assert "output differs" in str(experts_candidate(old))
    old, _ = stock("qwen3_moe")
    old.has_post_expert_norm = True
    assert "norm comes after" in str(experts_candidate(old))
    assert experts_candidate(nn.Conv1d(4, 4, 3)) is None
    llama4 = tiny_model("llama4_text", num_local_experts=4, intermediate_size_mlp=80)
    reasons = [experts_candidate(m) for m in llama4.modules() if stacked_experts(m)]
    assert reasons
    assert all("left to transformers" in str(reason) for reason in reasons)


def test_sizes_that_do_not_fit_are_named() -> None:
    stack = ExpertStack(torch.zeros(3, 8, 5))
    with pytest.raises(ValueError, match="they do not fit"):
        run_experts(torch.zeros(2, 4), torch.zeros(2, 1).long(), torch.zeros(2, 1), stack, stack, torch.relu)
