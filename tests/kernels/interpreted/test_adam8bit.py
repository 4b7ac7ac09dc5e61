"""The 8-bit AdamW step against bitsandbytes' own operation, from the same state."""

from __future__ import annotations

import bitsandbytes  # noqa: F401  (registers torch.ops.bitsandbytes)
import pytest
import torch
from bitsandbytes.functional import create_dynamic_map
from torch import Tensor

from frugal.ops.adam8bit.triton import adam8bit_
from tests.kernels.support import checked

MAPS = create_dynamic_map(signed=True), create_dynamic_map(signed=False)


def start(count: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    blocks = -(count // -256)
    param = torch.randn(count, generator=torch.Generator().manual_seed(count)).to(dtype)
    codes = [torch.zeros(count, dtype=torch.uint8) for _ in range(2)]
    scales = [torch.zeros(blocks) for _ in range(2)]
    return param, *codes, *scales


def decoded(state: tuple[Tensor, ...], which: int) -> Tensor:
    codes, scales = state[1 + which], state[3 + which]
    return MAPS[which][codes.long()] * scales.repeat_interleave(256)[: codes.numel()]


def encoded(value: Tensor, which: int) -> tuple[Tensor, Tensor]:
    """(nearest codes, scales) of a moment."""
    padded = torch.cat([value, value.new_zeros(-value.numel() % 256)]).view(-1, 256)
    scales = padded.abs().amax(1)
    normed = padded / scales.where(scales > 0, 1.0)[:, None]
    codes = (normed[..., None] - MAPS[which]).abs().argmin(-1)
    return codes.flatten()[: value.numel()], scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("count", "decay"), [(256 * 5, 0.0), (1000, 0.1), (1, 0.1), (257, 0.0)])
def test_numbers_of_bitsandbytes(count: int, decay: float, dtype: torch.dtype) -> None:
    ours, theirs = start(count, dtype), start(count, dtype)
    generator = torch.Generator().manual_seed(7)
    lr, betas, eps = 0.01, (0.9, 0.95), 1e-6
    for step in range(1, 5):
        grad = (torch.randn(count, generator=generator) * torch.logspace(-3, 1, count)).to(dtype)
        if step == 3:
            grad.zero_()
        first = decoded(ours, 0) * betas[0] + (1 - betas[0]) * grad.float()
        second = decoded(ours, 1) * betas[1] + (1 - betas[1]) * grad.float() ** 2
        param, code1, code2, scale1, scale2 = theirs
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", grad, param, code1, code2, *betas, 0.0, 0.0, eps, step, lr, *MAPS, scale1, scale2, decay, 1.0,
            False,
        )  # fmt: skip
        p, c1, c2, s1, s2 = ours
        with checked():
            adam8bit_(p, grad, c1, c2, s1, s2, *MAPS, lr=lr, betas=betas, eps=eps, weight_decay=decay, step=step)
        torch.testing.assert_close(p, param, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        for which, (moment, codes, scales) in enumerate(((first, c1, s1), (second, c2, s2))):
            nearest, expected = encoded(moment, which)
            torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)
            # Products in another order differ in the last bit, which may turn the rare code at a midpoint.
            assert ((codes.long() - nearest).abs() > 0).sum() <= count // 500
            cell = 3.1e-5 * scales.repeat_interleave(256)[:count]
            inner = codes.long().clamp(1, 254)
            gaps = MAPS[which][1:] - MAPS[which][:-1]
            gap = torch.maximum(gaps[inner - 1], gaps[inner])
            apart = (decoded(ours, which) - decoded(theirs, which)).abs()
            assert (apart <= 1.01 * gap * scales.repeat_interleave(256)[:count] + cell).all()
        for mine, other in zip(ours, theirs, strict=True):  # no drift: every step from the same state
            mine.copy_(other)


def test_no_gradient_and_no_state_change_nothing_but_decay() -> None:
    param, *state = start(300, torch.float32)
    before = param.clone()
    with checked():
        adam8bit_(param, torch.zeros(300), *state, *MAPS, lr=0.1, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.5,
                  step=1)  # fmt: skip
    torch.testing.assert_close(param, before * 0.95, rtol=1e-6, atol=0)
    assert (MAPS[0][state[0].long()] == 0).all()
    assert (MAPS[1][state[1].long()] == 0).all()
    assert (state[2] == 0).all()


def test_a_gradient_of_another_dtype() -> None:
    param, *state = start(512, torch.float32)
    twin, *twin_state = (t.clone() for t in (param, *state))
    grad = torch.randn(512).bfloat16()
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    with checked():
        adam8bit_(param, grad, *state, *MAPS, **options)
        adam8bit_(twin, grad.float(), *twin_state, *MAPS, **options)
    assert torch.equal(param, twin)


def test_shapes_that_do_not_fit() -> None:
    param, code1, code2, scale1, scale2 = start(300, torch.float32)
    with pytest.raises(ValueError, match="2 scales expected, got 1 and 2"):
        adam8bit_(param, param.clone(), code1, code2, scale1[:1], scale2, *MAPS, lr=0.1, betas=(0.9, 0.9), eps=1e-8,
                  weight_decay=0.0, step=1)  # fmt: skip
