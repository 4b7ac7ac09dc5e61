"""Where each answer begins and ends in the rendered conversation: the text that the model itself must produce.

An answer begins where the header that inference prints ends, and ends with its end-of-turn token. Both ends are proven,
never searched in the user's text:

* begin: the conversation up to the answer, rendered as inference does (with the generation prompt), is the beginning
  of the whole text; or, where the template rewrites earlier turns so that it is not, the template's own header stands
  between the turn before and the mark at the answer's text;
* end: what the template prints after an answer that is its conversation's last follows the mark at the answer's end.

Templates with `{% generation %}` say themselves what is trained; what they say is cut to the answer found here, so
that a header that they enclose is not trained.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from frugal.data.chat.render import PRIVATE, ChatRenderer, Turn
from frugal.data.chat.sandbox import TemplateRefused
from frugal.data.chat.sentinels import MAX_MESSAGES, place_sentinels, tail_after


@dataclass(slots=True)
class Answer:
    """One assistant turn in the text."""

    index: int
    """Position in the list of turns."""
    start: int
    end: int
    """Characters [start, end) of the text: the answer and its end-of-turn token."""
    end_token: str
    """The special token that it ends with; empty when the template prints none."""
    spans: list[tuple[int, int]] = field(default_factory=list)
    """What is trained of it: all of it, or what `{% generation %}` encloses."""

    @property
    def end_trained(self) -> bool:
        """True when the end-of-turn token is a target."""
        return bool(self.end_token) and any(end == self.end for _, end in self.spans)


@dataclass(slots=True)
class RenderedChat:
    """A conversation as text."""

    text: str
    answers: list[Answer]
    contents: dict[int, tuple[int, int]]
    """Message index -> characters of its text, for the other turns that were asked for."""


def render_chat(
    renderer: ChatRenderer, turns: list[Turn], tools: list[Any] | None, others: frozenset[int] = frozenset()
) -> RenderedChat:
    """Render ``turns`` and find every answer, and the texts of the turns in ``others``.

    Raises TemplateRefused when the template refuses the conversation or an answer's limits cannot be proven.
    """
    if len(turns) > MAX_MESSAGES:
        raise TemplateRefused(f"it has {len(turns)} turns (at most {MAX_MESSAGES})")
    text, generation = renderer.raw(turns, tools, prompt=False)
    if PRIVATE.search(text):
        raise TemplateRefused("it has private-use characters between U+10F000 and U+10FFFD, which mark texts here")
    wanted = [index for index, turn in enumerate(turns) if turn["role"] == "assistant"]
    places = place_sentinels(renderer, turns, tools, text, {*wanted, *others}) if wanted or others else {}
    for index, turn in enumerate(turns):
        _check_printed(renderer, turns, tools, text, index, turn, places)
    if renderer.template.marks_generation and len(generation) == len(wanted):
        fallback: list[tuple[int, int]] | None = generation
    else:
        fallback = None
    answers: list[Answer] = []
    for number, index in enumerate(wanted):
        lower = answers[-1].end if answers else 0
        try:
            answer = _find(renderer, turns, tools, text, index, places.get(index), lower)
        except TemplateRefused:
            if fallback is None:
                raise
            answer = _from_generation(renderer, text, index, *fallback[number])
        answer.spans = [(answer.start, answer.end)]
        if renderer.template.marks_generation:
            cut = [(max(begin, answer.start), min(end, answer.end)) for begin, end in generation]
            answer.spans = [(begin, end) for begin, end in cut if begin < end]
        answers.append(answer)
    contents = {index: places[index] for index in others if index in places}
    return RenderedChat(text, answers, contents)


def _check_printed(
    renderer: ChatRenderer,
    turns: list[Turn],
    tools: list[Any] | None,
    text: str,
    index: int,
    turn: Turn,
    places: dict[int, tuple[int, int]],
) -> None:
    """Refuse a template that leaves out what a turn says (templates of models for images want lists, for example)."""
    core = (turn.get("content") or "").rsplit("</think>", 1)[-1].strip()
    if not core or core in text or index in places or place_sentinels(renderer, turns, tools, text, [index]):
        return
    raise TemplateRefused(f"it does not print the text of turn {index + 1} ({turn['role']})")


def _from_generation(renderer: ChatRenderer, text: str, index: int, begin: int, end: int) -> Answer:
    found = list(renderer.special_pattern.finditer(text, begin, end))
    token = found[-1].group() if found and not text[found[-1].end() : end].strip() else ""
    return Answer(index, begin, found[-1].end() if token else end, token)


def _find(
    renderer: ChatRenderer,
    turns: list[Turn],
    tools: list[Any] | None,
    text: str,
    index: int,
    place: tuple[int, int] | None,
    lower: int,
) -> Answer:
    turn = turns[index]
    content = turn.get("content") or ""
    plain = not turn.get("tool_calls") and "reasoning_content" not in turn and "</think>" not in content
    start = _fast_start(renderer, text, content, place) if plain and place else None
    if start is None:
        start = _proven_start(renderer, turns, tools, text, index, place, lower)
    if start is None:
        raise TemplateRefused(f"the beginning of answer {_ordinal(turns, index)} cannot be told from its header")
    end, token = _find_end(renderer, turns, tools, text, index, place, start, plain)
    upper = place[1] if place else start
    if not lower <= start <= upper <= end <= len(text):
        raise TemplateRefused(f"the text of answer {_ordinal(turns, index)} is not where its turn is printed")
    own = content.count("</think>") if isinstance(content, str) else 0
    if text.count("</think>", start, end) > max(own, 1):
        raise TemplateRefused(f"it puts a second thinking block around answer {_ordinal(turns, index)}")
    return Answer(index, start, end, token)


def _fast_start(renderer: ChatRenderer, text: str, content: str, place: tuple[int, int]) -> int | None:
    """The header that inference prints stands directly before the text: nothing more to prove."""
    header = renderer.generation_prompt
    if not header.strip():
        return None
    first = place[0]
    lead = len(content) - len(content.lstrip()) if content.strip() else len(content)
    for start in (first, first - lead):
        if text.endswith(header, 0, start) and not text[start:first].strip():
            return start
    return None


def _proven_start(
    renderer: ChatRenderer,
    turns: list[Turn],
    tools: list[Any] | None,
    text: str,
    index: int,
    place: tuple[int, int] | None,
    lower: int,
) -> int | None:
    before = turns[:index]
    prompt = renderer.try_text(before, tools, prompt=True) if before else None
    limit = place[0] if place else len(text)
    if prompt is not None and text.startswith(prompt) and lower <= len(prompt) <= limit:
        if prompt != renderer.try_text(before, tools):
            return len(prompt)
        # The template prints no header of its own accord: what it prints before the text is the header, but white space
        # that follows the prompt directly is the model's to write.
        if place is not None:
            return len(prompt) if not text[len(prompt) : limit].strip() else limit
        return None
    if place is None:
        return None
    header = renderer.generation_prompt
    for candidate in (header, header.split("<think>")[0], header.rstrip()):
        at = text.rfind(candidate, lower, limit) if candidate.strip() else -1
        if at >= 0:
            return at + len(candidate)
    if not header.strip():
        return limit
    return limit if before == [] and not text[lower:limit].strip() else None


def _find_end(
    renderer: ChatRenderer,
    turns: list[Turn],
    tools: list[Any] | None,
    text: str,
    index: int,
    place: tuple[int, int] | None,
    start: int,
    plain: bool,
) -> tuple[int, str]:
    """(end, end-of-turn token or empty)."""
    called = bool(turns[index].get("tool_calls"))
    after = place[1] if place else start
    content = turns[index].get("content") or ""
    trail = content[len(content.rstrip()) :] if plain else ""
    afters = [after + len(trail), after] if trail and text.startswith(trail, after) else [after]
    tail: str | None
    printed: str | None
    """What the template prints after the text when this answer is the conversation's last."""
    if place is None:
        whole = renderer.try_text(turns[: index + 1], tools)
        if whole is None or not text.startswith(whole[:start]):
            raise TemplateRefused(f"the end of answer {_ordinal(turns, index)} cannot be told")
        printed = whole[start:]
    elif index == len(turns) - 1:
        printed, afters = text[after:], [after]
    elif plain and renderer.plain_tail is not None and any(text.startswith(renderer.plain_tail, at) for at in afters):
        printed = renderer.plain_tail
    else:
        printed = tail_after(renderer, turns[: index + 1], tools)
    tail = renderer.tail_through_end(printed, called=called) if printed is not None else None
    if tail is None:
        # No token ends the answer. The rest of a tool call is still the model's to write.
        rest = (printed or "").rstrip() if called else ""
        if not text.startswith(rest, afters[0]) or (called and printed is None):
            raise TemplateRefused(f"the end of answer {_ordinal(turns, index)} cannot be told")
        return afters[0] + len(rest), ""
    for at in afters:
        if text.startswith(tail, at):
            return at + len(tail), renderer.special_pattern.findall(tail)[-1]
    # Some templates end the last answer with one token and earlier ones with another: it follows directly.
    for at in afters:
        rest = text[at:]
        hit = renderer.special_pattern.match(rest, len(rest) - len(rest.lstrip()))
        if hit:
            return at + hit.end(), hit.group()
    return afters[0], ""


def _ordinal(turns: list[Turn], index: int) -> str:
    number = sum(turn["role"] == "assistant" for turn in turns[: index + 1])
    return f"{number} (turn {index + 1} of {len(turns)})"
