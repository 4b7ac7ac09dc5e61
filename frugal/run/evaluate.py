"""Loss of a trained run on held-out rows."""

from __future__ import annotations

from pathlib import Path

from frugal.checkpoints.run_folder import open_run
from frugal.config import SourceSection
from frugal.data import build
from frugal.errors import ConfigError
from frugal.inference.load import load_run
from frugal.models.attention import join_rows, use_attention
from frugal.objectives import LossModule, configured_objective
from frugal.training.evaluate import evaluate_rows


def evaluate(run: str | Path, *, data: str | Path | None = None) -> dict[str, float]:
    """Loss of a trained run on its evaluation rows, or on the rows of the file ``data``.

    Returns `loss` (of a token, or of a pair), what else the run's objective reports (`perplexity`; of pairs
    `rewards/accuracies`, ...), `tokens` (targets; not for pairs) and `rows`. Holds no logits.
    """
    config = open_run(run).config
    if config is None:
        raise ConfigError(f"{run} has no config.yaml, so it is not known how rows are rendered. Give a run's folder.")
    section = config.data
    if data is not None:
        section = section.model_copy(update={"train": [SourceSection(path=str(data))], "eval": [], "eval_split": 0.0})
    loaded = load_run(run)
    table = loaded.model.get_input_embeddings().weight.shape[0]
    prepared = build(
        section,
        loaded.tokenizer,
        seed=config.train.seed,
        vocab_size=table,
        clock=loaded.clock,
        objective=config.objective.name,
    )
    rows = prepared.train if data is not None else prepared.eval
    if rows is None or len(rows) == 0:
        raise ConfigError(f"{run} was trained without evaluation rows. Name a file: frugal eval {run} --data FILE.")
    attention = use_attention(loaded.model.get_base_model())
    joined = join_rows(loaded.model.get_base_model(), attention.value, packing=config.data.packing)
    objective = configured_objective(config.objective, pad_id=loaded.tokenizer.pad_token_id or 0, flat=joined.value)
    result = evaluate_rows(
        LossModule(loaded.model, objective, chunk_tokens=config.memory.loss_chunk_tokens),
        rows,
        objective,
        batch_size=config.train.per_device_eval_batch_size,
        device=loaded.device.torch_device,
    )
    counted = {"tokens": result.tokens} if objective.answers == 1 else {}
    return {**result.metrics, **counted, "rows": result.rows}
