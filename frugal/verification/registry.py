"""The checks of this product, one row each: what a check needs and what runs it.

`frugal doctor` runs the rows that need nothing but a machine. A new check is one file with its function and one row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from frugal.verification import kernel_checks, model_checks, operations
from frugal.verification.judge import Check, Measurement, Need, Subject, judged


@dataclass(frozen=True)
class CheckRow:
    """One row: a check, and what it needs."""

    name: str
    measurements: Callable[[Subject], Iterable[Measurement]]
    needs: frozenset[Need] = frozenset()


CHECKS: dict[str, CheckRow] = {
    row.name: row
    for row in (
        CheckRow("attention", operations.attention_checks),
        CheckRow("rms_norm", operations.rms_norm_checks),
        CheckRow("rope", operations.rope_checks),
        CheckRow("gated_mlp", operations.gated_mlp_checks),
        CheckRow("lora_linear", operations.lora_linear_checks),
        CheckRow("linear_cross_entropy", operations.loss_checks),
        CheckRow("nf4", operations.nf4_checks),
        CheckRow("adam8bit", operations.adam8bit_checks),
        CheckRow("kernels", kernel_checks.kernel_checks),
        CheckRow("asked_as_trained", model_checks.asked_as_trained, frozenset({"rows"})),
        CheckRow("answers_end", model_checks.answers_end, frozenset({"rows"})),
        CheckRow("base_fingerprint", model_checks.base_is_the_runs, frozenset({"run"})),
        CheckRow("fused_is_stock", model_checks.fused_is_stock, frozenset({"model", "rows"})),
        CheckRow("packed_is_unpacked", model_checks.packed_is_unpacked, frozenset({"model", "rows"})),
        CheckRow("neighbours", model_checks.neighbours, frozenset({"model", "rows"})),
        CheckRow("split_window", model_checks.split_window, frozenset({"model", "rows"})),
        CheckRow("adapter_is_peft", model_checks.adapter_is_peft, frozenset({"model", "run"})),
        CheckRow("merged_is_adapter", model_checks.merged_is_adapter, frozenset({"model", "run"})),
    )
}


def run_checks(subject: Subject, names: Iterable[str] | None = None) -> Iterator[Check]:
    """Run the checks of ``names`` (None: all that ``subject`` has what they need for), in the table's order."""
    wanted = set(CHECKS if names is None else names)
    for name, row in CHECKS.items():
        if name in wanted and row.needs <= subject.has:
            for one in row.measurements(subject):
                found = judged(one.op, one.implementation, one.what, subject.where, subject.device, one.error)
                yield replace(found, tolerance=one.tolerance, advice=one.advice)
