"""Proof of an export: the file is read back and asked the same rows as the adapter on its base, token by token.

The reference is made by stock transformers and PEFT, which share no code with what writes the file.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from peft import PeftModel
from torch import Tensor, nn

from frugal.codecs import CODECS
from frugal.errors import CheckpointError
from frugal.exports.base import Export
from frugal.files import read_json, write_json
from frugal.memory.space import OutOfHostMemory, refuse_when_host_is_full
from frugal.models.skeleton import expert_cuts
from frugal.models.stock import load_stock

ROWS, LENGTH = 6, 64
_TEXTS = (
    "What is the capital of France?",
    "Two and two are four; three times three is nine.",
    "Write a short letter to a friend about the weather, the garden and 12 old books.",
)
TOLERANCES = {"f32": (5e-3, 1e-6), "f16": (1e-1, 1e-4), "bf16": (5e-1, 2e-3), "q8_0": (1.0, 5e-3)}
"""Of the type: largest difference of a row's own tokens' log-probs, and mean KL divergence in nats. The first is wide,
for tokens of small probability: SmolLM2 in f16 differs by 0.03 there at a mean of 8e-6."""


@dataclass(frozen=True)
class Proof:
    """What was measured."""

    reader: str
    tokens: int
    log_prob: float
    """Largest difference of the log-probs of the rows' own tokens."""
    kl: float
    """Mean KL divergence from the adapter on its base, in nats."""
    agreement: float
    """Share of the positions where both find the same token most likely."""
    update_kl: float
    """The same divergence for the base without the adapter: what training changed on these rows."""
    tolerance: tuple[float, float]
    passed: bool
    note: str = ""

    def line(self) -> str:
        """One line for the terminal."""
        return (
            f"proof ({self.reader}, {self.tokens} tokens): log-probs within {self.log_prob:.2g} of the "
            f"adapter on its base, KL {self.kl:.2g} (the adapter itself: {self.update_kl:.2g}), "
            f"same first choice {self.agreement:.1%}"
        )


def proof_rows(export: Export, tokenizer: Any, vocabulary: int) -> list[list[int]]:
    """Rows of token ids: the run's own questions in its template, then fixed sentences."""
    questions = []
    samples = export.run.root / "samples.json"
    if samples.is_file():
        content = read_json(samples)
        found = content.get("samples", []) if isinstance(content, dict) else content
        questions = [(str(row["prompt"]), str(row.get("after", ""))) for row in found if "prompt" in row]
    rows = []
    for question, answer in [*questions[: ROWS // 2], *((text, "Yes.") for text in _TEXTS)][:ROWS]:
        text = f"{question} {answer}"
        if tokenizer.chat_template:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            text = tokenizer.apply_chat_template(turns, tokenize=False)
        ids = tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"][:LENGTH]
        rows.append([index for index in ids if index < vocabulary])
    return [row for row in rows if len(row) > 1]


def reference(export: Export, *, dequantized: bool, linears: set[str], vocabulary: int) -> Any:
    """The adapter on its base in float32, by stock transformers and PEFT; over NF4's values if ``dequantized``."""
    run, base = export.run, export.base
    model: Any = load_stock(base.path, dtype=torch.float32, trust_remote_code=export.trust_remote_code)
    if vocabulary != model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(vocabulary, mean_resizing=False)
    if dequantized:
        codec = CODECS["nf4"](torch.float32, run.double_quant)
        cuts = expert_cuts(model) if run.quantized_experts else {}
        for name, parameter in model.named_parameters():
            if name in cuts:
                parameter.data = torch.stack([cuts[name].through(codec, matrix) for matrix in parameter.data])
            elif name in linears:
                held = codec.merge_source(parameter.data)
                parameter.data = held.dequantize_rows(0, parameter.shape[0], torch.float32).view(parameter.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT on tied heads; the plan of the merge has dealt with them
        return PeftModel.from_pretrained(model, str(run.adapter)).eval()


@torch.no_grad()
def log_probs(model: nn.Module, rows: list[list[int]]) -> list[Tensor]:
    """Log-probs of each row's next tokens, [tokens - 1, vocabulary]."""
    return [model(torch.tensor([row])).logits[0, :-1].float().log_softmax(-1) for row in rows]


def prove(
    export: Export,
    rows: list[list[int]],
    make_reference: Callable[[], Any],
    read_back: Callable[[], nn.Module],
    *,
    reader: str,
    kind: str,
) -> Proof:
    """Measure; one model is in memory at a time.

    Raises:
        CheckpointError: beyond the tolerance, or no nearer to the trained model than to the base. What was measured
            lies beside the folder that was not written.
    """
    trained = make_reference()
    wanted = log_probs(trained, rows)
    with trained.disable_adapter():
        untrained = log_probs(trained, rows)
    del trained
    got = log_probs(read_back(), rows)
    own, agree, tokens = 0.0, 0, 0
    divergence = [0.0, 0.0]
    for row, want, have, base in zip(rows, wanted, got, untrained, strict=True):
        width = min(want.shape[1], have.shape[1])
        want, have, base = want[:, :width], have[:, :width], base[:, :width]
        targets = torch.tensor(row[1:])[:, None]
        own = max(own, float((want.gather(1, targets) - have.gather(1, targets)).abs().max()))
        agree += int((want.argmax(1) == have.argmax(1)).sum())
        for place, other in enumerate((have, base)):
            divergence[place] += float((want.exp() * (want - other)).sum())
        tokens += len(row) - 1
    kl, update = (max(total / tokens, 0.0) for total in divergence)
    most, mean = TOLERANCES[kind]
    # not `>`: what is no number is beyond every tolerance
    near = own <= most and kl <= mean
    kept = update <= 1e-9 or kl < 0.5 * update
    note = ""
    if not near:
        note = f"log-probs differ by {own:.3g} (allowed {most:g}), KL {kl:.3g} (allowed {mean:g})"
    elif not kept:
        note = f"no nearer to the trained model (KL {kl:.3g}) than the base without the adapter is ({update:.3g})"
    exact = kind in ("f32", "f16")
    proof = Proof(reader, tokens, own, kl, agree / tokens, update, (most, mean), near and (kept or not exact), note)
    if not proof.passed:
        seen = export.out.with_name(f"{export.out.name}.proof-failed.json")
        seen.parent.mkdir(parents=True, exist_ok=True)
        write_json(seen, asdict(proof))
        raise CheckpointError(
            f"The export is not what was trained: {note}. Nothing was written to {export.out}; what was measured is in "
            f"{seen}. Try --type f32; if that fails too, please report it with that file."
        )
    return proof


def check_memory(needed: int) -> None:
    """Raise CheckpointError when a model of ``needed`` bytes does not fit the memory that is free."""
    try:
        refuse_when_host_is_full(needed)
    except OutOfHostMemory as error:
        raise CheckpointError(
            f"The proof reads the model back in float32, which does not fit: {error}. Export on a machine with more "
            "memory, or leave the proof out with --no-proof and compare answers yourself."
        ) from error
