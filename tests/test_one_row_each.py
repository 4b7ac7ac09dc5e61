"""What comes next is one function and one row: a toy objective, export format, codec and check, added here and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from frugal.codecs import CODECS
from frugal.exports.base import Export, new_folder
from frugal.exports.registry import FORMATS, Format, export
from frugal.models.head import HeadSpec
from frugal.objectives import LossModule, make_objective
from frugal.objectives.base import Batch
from frugal.objectives.causal_lm import CausalLM
from frugal.objectives.registry import OBJECTIVES
from frugal.ops import lora_linear
from frugal.verification import CHECKS, CheckRow, Measurement, Subject, run_checks
from tests.conftest import make_llama
from tests.support.merged import make_run


def test_an_objective(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Doubled(CausalLM):
        name: ClassVar[str] = "doubled"

        def loss(
            self, head: HeadSpec, batch: Batch, *, training: bool, chunk_tokens: int | None
        ) -> tuple[Tensor, Tensor]:
            total, sums = super().loss(head, batch, training=training, chunk_tokens=chunk_tokens)
            return 2 * total, sums * torch.tensor([2.0, 1.0], dtype=sums.dtype)

    monkeypatch.setitem(OBJECTIVES, Doubled.name, Doubled)
    model = make_llama()
    ids = torch.arange(12)[None] % 300
    batch: Batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    plain, plain_sums = LossModule(model, make_objective("sft"))(dict(batch))
    twice, sums = LossModule(model, make_objective("doubled"))(dict(batch))
    assert torch.equal(twice, 2 * plain)
    assert sums[1] == plain_sums[1] == 11
    assert make_objective("doubled").metrics(sums.tolist(), training=True)["loss"] == pytest.approx(
        2 * float(plain) / 11, rel=1e-6
    )


def test_an_export_format(tiny_llama_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Upper:
        upper: bool = False

    class Written:
        def lines(self) -> list[str]:
            return ["wrote a list of names"]

    def write_names(task: Export, options: Upper) -> Written:
        with new_folder(task.out) as folder:
            names = "\n".join(sorted(path.name for path in task.run.adapter.iterdir()))
            (folder / "names.txt").write_text(names.upper() if options.upper else names)
        return Written()

    monkeypatch.setitem(FORMATS, "names", Format("names", "the files of an adapter, by name", write_names, Upper))
    make_run(tmp_path / "run", tiny_llama_folder, quantize="none")
    assert export(tmp_path / "run", tmp_path / "out", "names", upper=True).lines() == ["wrote a list of names"]
    assert "ADAPTER_MODEL.SAFETENSORS" in (tmp_path / "out" / "names.txt").read_text()


def test_a_codec(monkeypatch: pytest.MonkeyPatch) -> None:
    """Signs and one scale: operations and the interface's users take it without knowing it."""

    class Signs:
        codec = "signs"

        def __init__(self, signs: Tensor, scale: Tensor) -> None:
            self.signs, self.scale = signs, scale

        @property
        def shape(self) -> tuple[int, ...]:
            return tuple(self.signs.shape)

        @property
        def nbytes(self) -> int:
            return self.signs.nbytes + self.scale.nbytes

        def tensors(self) -> dict[str, Tensor]:
            return {"signs": self.signs, "scale": self.scale}

        def dequantize_rows(self, start: int, stop: int, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
            rows = (self.signs[start:stop] * self.scale).to(dtype)
            return rows if out is None else out.copy_(rows)

    class SignCodec:
        name = "signs"

        def encode(self, weight: Tensor) -> Signs:
            return Signs(weight.sign().to(torch.int8), weight.abs().mean())

    monkeypatch.setitem(CODECS, "signs", lambda compute, double_quant: SignCodec())  # type: ignore[arg-type, return-value]
    weight = torch.randn(48, 32)
    encoded = CODECS["signs"](torch.float32, True).encode(weight)
    assert encoded.nbytes == weight.numel() + 4
    x = torch.randn(5, 32, requires_grad=True)
    a, b = torch.randn(4, 32, requires_grad=True), torch.randn(48, 4, requires_grad=True)
    got = lora_linear(x, encoded, lora=(a, b, 0.5))
    dense = weight.sign() * weight.abs().mean()
    wanted = x @ dense.t() + 0.5 * (x @ a.t()) @ b.t()
    torch.testing.assert_close(got, wanted)
    upstream = torch.randn_like(got)
    for ours, theirs in zip(
        torch.autograd.grad(got, (x, a, b), upstream), torch.autograd.grad(wanted, (x, a, b), upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("error", "passed"), [(0.4, True), (1.2, False)])
def test_a_check(error: float, passed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def toy_checks(subject: Subject) -> Iterator[Measurement]:
        yield Measurement("toy", "torch", f"in {subject.dtype}", lambda: error)

    subject = Subject(torch.device("cpu"), torch.float32)
    monkeypatch.setitem(CHECKS, "toy", CheckRow("toy", toy_checks))
    (found,) = run_checks(subject, ["toy"])
    assert (found.op, found.what, found.passed, found.error) == ("toy", "in torch.float32", passed, error)
    monkeypatch.setitem(CHECKS, "toy", CheckRow("toy", toy_checks, needs=frozenset({"model"})))
    assert list(run_checks(subject, ["toy"])) == [], "it needs a model, and there is none"
