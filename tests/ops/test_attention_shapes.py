"""N07: attention of every head size, head ratio and length equals a naive fp32 reference; the soft cap is applied."""

import pytest
import torch

from frugal.ops import attention
from frugal.ops.attention import attention_reference

FORMS = ["cpu_flash", "sdpa", "blockwise"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("softcap", [None, 50.0])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("size", [64, 80, 96, 128, 256, 20])
def test_every_head_size(size, kv_heads, softcap, form):
    if softcap is not None and form != "blockwise":
        form = None  # what the table picks must still apply the cap
    for ratio_heads in (4, 8):
        for tokens in (1, 7, 33, 129):
            g = torch.Generator().manual_seed(tokens)
            q = torch.randn(1, ratio_heads, tokens, size, generator=g)
            k, v = (torch.randn(1, kv_heads, tokens, size, generator=g) for _ in range(2))
            if softcap is not None:
                q = q * 500 / (q @ k.repeat_interleave(ratio_heads // kv_heads, 1).transpose(-1, -2)).abs().max()
                q = q * size**0.5  # the largest scaled score is 500
            got, want = [], []
            for fn, out in ((attention, got), (attention_reference, want)):
                leaves = [t.clone().requires_grad_() for t in (q, k, v)]
                kw = {"implementation": form} if fn is attention else {}
                y = fn(*leaves, softcap=softcap, **kw)
                out += [y, *torch.autograd.grad(y.square().sum(), leaves)]
            # A gradient of q or k is a difference of numbers as large as k or q: that is its scale in fp32.
            sizes = [t.abs().max().item() for t in (want[0], k, q, want[3])]
            for a, b, scale in zip(got, want, sizes, strict=True):
                assert (a - b).abs().max() < 1e-4 * max(1.0, scale)


def test_soft_cap_values():
    # One query, two keys: softmax of (capped score, 0) weighs values (1, 0), so its logit is the capped score.
    for score, capped in ((10.0, 9.869), (50.0, 38.080), (100.0, 48.201), (500.0, 50.000)):
        q = torch.zeros(1, 1, 2, 64, dtype=torch.float64)
        q[..., 1, 0] = score
        k = torch.zeros_like(q)
        k[..., 0, 0] = 1.0
        v = torch.zeros_like(q)
        v[..., 0, 0] = 1.0
        v[..., 1, 1] = 1.0
        weights = attention(q, k, v, scale=1.0, softcap=50.0)[0, 0, 1, :2]
        assert abs((weights[0] / weights[1]).log().item() - capped) < 5e-4
