"""P01, the attention's part: rows of 3 and 2 tokens packed equal the same rows alone, in every backend."""

from itertools import pairwise

import pytest
import torch

from frugal.models.attention import use_attention
from frugal.ops import attention, attention_reference
from tests.support.tiny_models import tiny_model


@pytest.mark.parametrize("form", ["cpu_flash", "sdpa", "blockwise", "reference"])
@pytest.mark.parametrize("lengths", [(3, 2), (1, 3, 1)])
def test_every_backend(form, lengths):
    g = torch.Generator().manual_seed(0)
    total = sum(lengths) + 2  # two tokens of padding, a document of their own
    q, k, v = (torch.randn(1, 2, total, 8, generator=g) for _ in range(3))
    offsets = [0]
    for n in (*lengths, 2):
        offsets.append(offsets[-1] + n)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    packed = attention(*leaves, cu_seqlens=offsets, implementation=form)
    grads = torch.autograd.grad(packed[:, :, :-2].square().sum(), leaves)
    for lo, hi in pairwise(offsets[:-1]):
        alone = [t.detach()[:, :, lo:hi].clone().requires_grad_() for t in (q, k, v)]
        out = attention_reference(*alone)
        assert (packed[:, :, lo:hi] - out).abs().max() <= 1e-5
        for grad, own in zip(grads, torch.autograd.grad(out.square().sum(), alone), strict=True):
            assert (grad[:, :, lo:hi] - own).abs().max() <= 1e-5
    plain = attention(q, k, v, implementation=form)
    assert (plain - packed).abs().max() > 0.1  # plain causal would have been wrong


def test_losses_and_gradients_packed_against_unpacked():
    model = tiny_model("llama")
    assert use_attention(model).value == "frugal"
    rows = [torch.tensor([[5, 6, 7]]), torch.tensor([[8, 9]]), torch.tensor([[10]])]
    ids = torch.cat(rows, 1)
    labels = ids.clone()
    offsets = torch.tensor([0, 3, 5, 6], dtype=torch.int32)
    labels[0, offsets[:-1].long()] = -100  # a document's first token is nobody's target
    positions = torch.tensor([[0, 1, 2, 0, 1, 0]])

    def total(logits, targets):
        return torch.nn.functional.cross_entropy(logits[0, :-1], targets[0, 1:], reduction="sum")

    found = []
    for packed in (True, False):
        model.zero_grad()
        if packed:
            out = model(input_ids=ids, position_ids=positions, cu_seq_lens_q=offsets, use_cache=False)
            loss = total(out.logits, labels)
        else:
            loss = sum(total(model(input_ids=row, use_cache=False).logits, row) for row in rows[:2])
        loss.backward()
        found.append((loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}))
    torch.testing.assert_close(found[0][0], found[1][0], rtol=1e-5, atol=1e-5)
    for name, grad in found[1][1].items():
        assert (found[0][1][name] - grad).abs().max() <= 1e-5, name
