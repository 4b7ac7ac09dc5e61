"""What the template and the rows say about answers' ends, before training: a model that never learns its end never
stops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from frugal.data.chat.render import ChatRenderer
from frugal.data.encode import EncodedRow
from frugal.data.tokenizer import TextEncoder


@dataclass(slots=True)
class TemplateReport:
    """The pre-flight line and its warnings."""

    template: str = ""
    """Where the template comes from; empty when no row is a conversation."""
    end_token: str = ""
    """The token that most trained answers end with; empty when they end with none."""
    end_trained: bool = False
    """True when every trained answer's end token is a target."""
    answers: int = 0
    """Trained answers."""
    answers_ended: int = 0
    """Trained answers whose end token is a target."""
    stop_ids: list[int] = field(default_factory=list)
    """Ids that generation must stop at: to be saved with the adapter."""
    stop_tokens: list[str] = field(default_factory=list)
    """The same as text."""
    warnings: list[str] = field(default_factory=list)
    """What the user should read before training, with the remedy."""

    @property
    def line(self) -> str:
        """`answers end with <|im_end|>: trained yes`"""
        if not self.answers:
            return "answers: none is trained"
        end = self.end_token or "no token"
        some = f" ({self.answers_ended:,} of {self.answers:,})" if 0 < self.answers_ended < self.answers else ""
        return f"answers end with {end}: trained {'yes' if self.end_trained else 'no'}{some}"

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> TemplateReport:
        """The report that ``to_json`` wrote."""
        return cls(**value)


@dataclass(slots=True)
class EndCount:
    """Ends of the trained answers of many rows."""

    answers: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    untrained: Counter[str] = field(default_factory=Counter)

    def add(self, row: EncodedRow) -> None:
        """Count one row."""
        self.answers += row.answers
        self.ended.update(row.ended)
        self.untrained.update(row.untrained_ends)


def template_report(
    count: EndCount,
    encoder: TextEncoder,
    renderer: ChatRenderer | None,
    *,
    zero_rows: Collection[int] = (),
    first_with: dict[int, str] | None = None,
    train_on: str = "assistant",
) -> TemplateReport:
    """The report for counted rows.

    Args:
        zero_rows: ids whose embedding row is all zero: never trained, and frozen under LoRA.
        first_with: of those ids that occur in the rows, where first (`file:line`).
    """
    ends = count.ended + count.untrained
    named = Counter({token: number for token, number in ends.items() if token})
    end_token = named.most_common(1)[0][0] if named else (renderer.end_token if renderer is not None else "")
    ended = sum(number for token, number in count.ended.items() if token)
    report = TemplateReport(
        template=renderer.name if renderer is not None else "",
        end_token=end_token,
        end_trained=bool(count.answers) and ended == sum(ends.values()),
        answers=count.answers,
        answers_ended=ended,
    )
    _add_stops(report, encoder, [token for token, _ in named.most_common()] or [end_token])
    if renderer is not None and count.answers:
        _warn_of_template(report, encoder, renderer, count)
    elif count.ended.get(""):
        report.warnings.append("The tokenizer has no end token, so the model cannot learn where an answer ends.")
    for token_id in sorted(first_with or {}):
        if token_id in zero_rows:
            report.warnings.append(
                untrained_warning(encoder.token(token_id), token_id, (first_with or {})[token_id], report.stop_ids)
            )
    return report


def _add_stops(report: TemplateReport, encoder: TextEncoder, tokens: Sequence[str]) -> None:
    ids = [encoder.id_of(token) for token in tokens if token]
    ids.append(encoder.eos_id)
    report.stop_ids = list(dict.fromkeys(token_id for token_id in ids if token_id is not None))
    report.stop_tokens = [encoder.token(token_id) for token_id in report.stop_ids]


def _warn_of_template(report: TemplateReport, encoder: TextEncoder, renderer: ChatRenderer, count: EndCount) -> None:
    untrained, unended = sum(count.untrained.values()), count.ended.get("", 0)
    if untrained:
        report.warnings.append(
            f"THE END OF ANSWERS IS NOT TRAINED: {untrained:,} of {count.answers:,} answers end with "
            f"{report.end_token}, but "
            f"the template's {{% generation %}} block closes before it; the model would not learn to stop. Move "
            f"{{% endgeneration %}} behind the end token, or set data.chat_template to another template."
        )
    if unended:
        report.warnings.append(
            f"THE END OF ANSWERS IS NOT TRAINED: the template ({renderer.name}) prints no end token after {unended:,} "
            f"of {count.answers:,} answers; the model would not learn to stop. Set data.chat_template to a named "
            "template that fits the model, or to a file that prints an end token."
        )
    eos = encoder.token(encoder.eos_id) if encoder.eos_id is not None else "none"
    if report.end_token and report.end_token != eos:
        report.warnings.append(
            f"Answers end with {report.end_token}, the tokenizer's end token is {eos}: both are saved as stop tokens."
        )
    turns = [{"role": "user", "content": "probe"}, {"role": "assistant", "content": "probe"}]
    prompt, whole = renderer.try_text(turns[:1], None, prompt=True), renderer.try_text(turns, None)
    if prompt is not None and whole is not None and not whole.startswith(prompt):
        report.warnings.append(
            f"The template ({renderer.name}) begins an answer with {prompt[-40:]!r} at inference and prints it "
            "otherwise in a conversation; frugal trains what the template prints."
        )


def untrained_warning(token: str, token_id: int, first: str, stop_ids: Sequence[int]) -> str:
    """What to say about a token whose embedding row is all zero."""
    what = "ends answers" if token_id in stop_ids else "is in the data"
    return (
        f"The token {token} (id {token_id}, first in {first}) {what}, and its embedding was never trained (its row is "
        "all zero and stays frozen under LoRA), so the model can neither read nor write it. Add lora.modules_to_save: "
        "[embed_tokens, lm_head], or use a template whose tokens the model knows."
    )
