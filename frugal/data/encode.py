"""One example to token ids and a mask of trained tokens.

What is trained, by kind of row:

* conversations: the answers with their end-of-turn tokens (`train_on: assistant`), only the last answer (`last`), or
  every token (`all`); a turn's own switch wins. Role headers, users, system text and tools are never trained otherwise;
* prompt and completion: turns of a user and the assistant where there is a chat template, because chat asks so; without
  one, or where the prompt spells the template's tokens itself, the two texts joined as they are and the end token; the
  completion and the end token;
* text: every token and the end token;
* pairs: each of the two answers behind its prompt, as the kinds above; never a turn of the prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

import numpy as np

from frugal.data.chat.render import ChatRenderer
from frugal.data.chat.sandbox import TemplateLimit, TemplateRefused
from frugal.data.chat.sentinels import escaped_spans
from frugal.data.chat.spans import Answer, RenderedChat, render_chat
from frugal.data.chat.templates import choose_template
from frugal.data.rows import Example, Message
from frugal.data.tokenizer import Encoded, TextEncoder, adds_bos, one_bos, special_tokens_of, trained_tokens
from frugal.errors import DataError

TrainOn = Literal["assistant", "last", "all"]


@dataclass(slots=True)
class EncodedRow:
    """One example as tokens, or the reason why not."""

    ids: np.ndarray
    """int32 [tokens]"""
    trained: np.ndarray
    """bool [tokens]"""
    fault: str = ""
    """Why the row cannot be used; empty for a good one."""
    answers: int = 0
    """Answers that are trained."""
    ended: Counter[str] = field(default_factory=Counter)
    """End token -> trained answers that end with it as a target; key `` for answers without."""
    untrained_ends: Counter[str] = field(default_factory=Counter)
    """End token -> trained answers that end with it, but it is no target."""
    literals: int = 0
    """Control tokens' texts inside messages, tokenised as plain text."""
    text: str = ""
    starts: np.ndarray | None = None
    ends: np.ndarray | None = None


@dataclass(slots=True)
class _Job:
    """A text with its spans, ready to be encoded."""

    text: str
    spans: list[tuple[int, int]]
    cuts: list[int]
    literals: list[tuple[int, int]]
    row: EncodedRow
    add_end: bool = False
    train_end: bool = True


def _empty_row(fault: str = "") -> EncodedRow:
    return EncodedRow(np.zeros(0, np.int32), np.zeros(0, bool), fault)


class RowEncoder:
    """Renders, tokenises and masks examples with one tokenizer and one template."""

    def __init__(
        self,
        encoder: TextEncoder,
        renderer: ChatRenderer | None,
        *,
        train_on: TrainOn = "assistant",
        system_prompt: str | None = None,
        keep_text: bool = False,
    ) -> None:
        """``renderer`` may be None when no row is a conversation. ``keep_text``: rows carry text and offsets."""
        self.encoder = encoder
        self.renderer = renderer
        self.train_on = train_on
        self.system_prompt = system_prompt
        self.keep_text = keep_text

    def encode(self, examples: Sequence[Example]) -> list[EncodedRow]:
        """Rows in the order of the examples. Raises DataError when a template breaks the sandbox's limits."""
        return self._encode([self._job(example) for example in examples])

    def preferences(self, examples: Sequence[Example]) -> list[tuple[EncodedRow, EncodedRow]]:
        """The chosen and the rejected document of preference rows, only the answer trained: earlier answers are part
        of the prompt."""
        jobs: list[_Job] = []
        for example in examples:
            prompt = [replace(message, train=False) for message in example.messages]
            for answer in (example.chosen, example.rejected):
                if self.as_turns(example):
                    jobs.append(self._guarded(example, [*prompt, *answer]))
                else:
                    jobs.append(self._text_job(example.prompt, answer[-1].content or ""))
        rows = self._encode(jobs)
        return list(zip(rows[0::2], rows[1::2], strict=True))

    def _encode(self, jobs: list[_Job]) -> list[EncodedRow]:
        good = [job for job in jobs if not job.row.fault]
        coded = self.encoder.encode(
            [job.text for job in good], [job.cuts for job in good], [job.literals for job in good]
        )
        for job, encoded in zip(good, coded, strict=True):
            self._finish(job, encoded)
        return [job.row for job in jobs]

    def _finish(self, job: _Job, encoded: Encoded) -> None:
        row = job.row
        row.ids, row.trained = encoded.ids, trained_tokens(encoded, job.spans)
        starts, ends = encoded.starts, encoded.ends
        end_id = self.encoder.eos_id
        if job.add_end:
            if end_id is None:
                row.ended[""] += 1
            else:
                name = self.encoder.token(end_id)
                if not len(row.ids) or row.ids[-1] != end_id:
                    size = np.full(1, len(job.text), np.int32)
                    row.ids = np.append(row.ids, np.int32(end_id))
                    row.trained = np.append(row.trained, job.train_end)
                    starts, ends = np.append(starts, size), np.append(ends, size)
                row.ended[name] += 1
        if self.keep_text:
            row.text, row.starts, row.ends = job.text, starts, ends
        if len(row.trained):
            row.trained[0] = False  # nothing stands before it to predict it from

    def _job(self, example: Example) -> _Job:
        if example.kind == "messages" or self.as_turns(example):
            return self._guarded(example, example.messages)
        if example.kind == "prompt_completion":
            if example.tools or len(example.messages) > 2 or any(m.reasoning_content for m in example.messages):
                return _Job("", [], [], [], _empty_row("system text, tools or reasoning need a chat template"))
            return self._text_job(example.prompt, example.completion)
        if example.kind == "text":
            row = _empty_row()
            row.answers = 1
            return _Job(example.text, [(0, len(example.text))], [], [], row, add_end=True)
        raise AssertionError(f"{example.source}:{example.line}: {example.kind} rows are not encoded one by one")

    def _text_job(self, prompt: str, completion: str) -> _Job:
        """Two texts, joined as they are, and the end token."""
        text, begin = prompt + completion, len(prompt)
        spans = [(0, len(text))] if self.train_on == "all" else [(begin, len(text))]
        row = _empty_row()
        row.answers = 1
        return _Job(text, spans, [begin] if begin else [], [], row, add_end=True)

    def as_turns(self, example: Example) -> bool:
        """Whether a row of prompt and completion, or a pair, becomes turns of the chat template: yes where there is
        one, unless its prompt is rendered already. A pair that has turns always does."""
        if example.kind == "preference" and not example.prompt:
            return True
        if example.kind not in ("prompt_completion", "preference") or self.renderer is None:
            return False
        return self.renderer.control_pattern.search(example.prompt) is None

    def _guarded(self, example: Example, messages: Sequence[Message]) -> _Job:
        """The job of a conversation; what the template refuses becomes the row's fault."""
        if self.renderer is None:
            raise DataError(f"{example.source}:{example.line}: a conversation needs a chat template")
        try:
            return self._chat_job(self.renderer, messages, example.tools)
        except TemplateLimit as fault:
            raise DataError(
                f"{example.source}:{example.line}: the chat template ({self.renderer.name}) was stopped: {fault}"
            ) from None
        except TemplateRefused as fault:
            return _Job(
                "", [], [], [], _empty_row(f"the chat template ({self.renderer.name}) cannot render it: {fault}")
            )

    def _chat_job(
        self, renderer: ChatRenderer, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> _Job:
        messages = with_system(messages, self.system_prompt)
        turns, known_tools = renderer.turns(messages, tools)
        shift = len(turns) - len(messages)  # tools written as text may add a system turn
        switches = {index + shift: message.train for index, message in enumerate(messages) if message.train is not None}
        if switches.pop(-1, False):  # system text that became a part of the user's turn
            raise TemplateRefused("the row trains its system turn, and the template has none")
        others = frozenset(
            index
            for index, on in switches.items()
            if turns[index]["role"] != "assistant" and on == (self.train_on != "all")
        )
        chat = render_chat(renderer, turns, known_tools, others)
        row = _empty_row()
        spans = self._chosen(chat, switches, others, row)
        literals = escaped_spans(renderer, turns, known_tools, chat.text)
        row.literals = len(literals)
        return _Job(chat.text, spans, [answer.start for answer in chat.answers], literals, row)

    def _chosen(
        self, chat: RenderedChat, switches: dict[int, bool], others: frozenset[int], row: EncodedRow
    ) -> list[tuple[int, int]]:
        """Character spans to train, and the row's count of answers and their ends."""
        spans: list[tuple[int, int]] = []
        removed: list[tuple[int, int]] = []
        last = chat.answers[-1].index if chat.answers else -1
        for answer in chat.answers:
            wanted = switches.get(answer.index, self.train_on != "last" or answer.index == last)
            if not wanted:
                removed.append((answer.start, answer.end))
                continue
            row.answers += 1
            spans += answer.spans
            _count_end(answer, row, whole=self.train_on == "all")
        for index in others:
            if index not in chat.contents:
                raise TemplateRefused(f"the text of turn {index + 1} cannot be told, and the row switches its training")
            (removed if self.train_on == "all" else spans).append(chat.contents[index])
        if self.train_on == "all":
            spans = _without(len(chat.text), removed)
        return sorted(spans)


def with_system(messages: Sequence[Message], system_prompt: str | None) -> list[Message]:
    """The conversation with `data.system_prompt` before it when it has no system message of its own."""
    if system_prompt is None or (messages and messages[0].role == "system"):
        return list(messages)
    return [Message("system", system_prompt), *messages]


def _count_end(answer: Answer, row: EncodedRow, *, whole: bool) -> None:
    if answer.end_trained or (whole and answer.end_token):
        row.ended[answer.end_token] += 1
    elif answer.end_token:
        row.untrained_ends[answer.end_token] += 1
    elif answer.spans or whole:
        row.ended[""] += 1


def _without(length: int, removed: list[tuple[int, int]]) -> list[tuple[int, int]]:
    spans: list[tuple[int, int]] = []
    at = 0
    for begin, end in sorted(removed):
        if begin > at:
            spans.append((at, begin))
        at = max(at, end)
    return [*spans, (at, length)]


def chat_renderer(
    tokenizer: Any, chat_template: str | None, *, all_alpaca: bool = False, clock: datetime | None = None
) -> ChatRenderer:
    """The renderer for a tokenizer and `data.chat_template`; ``clock`` is the time that it prints, None: now."""
    chosen = choose_template(chat_template, tokenizer, all_alpaca=all_alpaca)
    return ChatRenderer(chosen.source, chosen.name, *special_tokens_of(tokenizer), clock=clock)


def encode_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: list[dict[str, Any]] | None = None,
    *,
    chat_template: str | None = None,
    system_prompt: str | None = None,
    clock: datetime | None = None,
) -> list[int]:
    """Ids of a conversation that waits for an answer: a prefix of the ids that training makes of it with its answer.

    Raises:
        DataError: the template refuses the conversation, or it has lone surrogates (undecodable bytes of a terminal).
        ConfigError: there is no template.
    """
    renderer = chat_renderer(tokenizer, chat_template, clock=clock)
    try:
        turns, known_tools = renderer.turns(with_system(messages, system_prompt), tools)
        text = renderer.text(turns, known_tools, prompt=True)
        literals = escaped_spans(renderer, turns, known_tools, text, prompt=True)
    except TemplateRefused as fault:
        raise DataError(f"The chat template ({renderer.name}) cannot render the conversation: {fault}") from None
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise DataError("The conversation holds bytes that are not UTF-8. Write it in UTF-8.")
    if literals:
        encoder = TextEncoder.from_tokenizer(tokenizer)
        return [int(token_id) for token_id in encoder.encode([text], literals=[literals])[0].ids]
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    return one_bos(ids, tokenizer.bos_token_id, adds_bos=adds_bos(tokenizer))
