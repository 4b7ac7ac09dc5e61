"""Conversations to text: through the tokenizer's chat template, a named one, or a Jinja file of the user's.

`ChatRenderer.prompt` is what inference uses and `ChatRenderer.render` what training uses; both go through the same
template, the same normalisation of messages and the same rule for templates that know no tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

from frugal.data.chat.sandbox import CompiledTemplate, TemplateLimit, TemplateRefused, cut_generation_marks
from frugal.data.rows import Message

FIRST_MARK = 0x10F100  # private-use characters of plane 16: message i is marked with chr(FIRST_MARK + i)
LAST_MARK = 0x10FFFD
PRIVATE = re.compile("[\U0010f000-\U0010fffd]")

TOOLS_AS_TEXT = """# Tools

You may call functions. Their signatures are within <tools></tools>, one JSON object a line:
<tools>
{signatures}
</tools>

To call a function, answer with a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": <function name>, "arguments": <JSON object>}}
</tool_call>"""

Turn = dict[str, Any]
"""A message as the template sees it."""

_PROBE_TOOL = {
    "type": "function",
    "function": {
        "name": "frugal_probe",
        "description": "A probe.",
        "parameters": {"type": "object", "properties": {"value": {"type": "string", "description": "Any."}}},
    },
}
_PROBE_CALL = {"type": "function", "id": "frugal000", "function": {"name": "frugal_call", "arguments": {"value": "x"}}}


class ChatRenderer:
    """A compiled template with the tokenizer's special tokens, and facts about it found by rendering probes."""

    def __init__(
        self,
        source: str,
        name: str,
        special_tokens_map: dict[str, Any],
        special_tokens: Sequence[str],
        clock: datetime | None = None,
    ) -> None:
        """``special_tokens``: texts of all special tokens, longest first is not required. ``clock``: the time that the
        template prints; None: now."""
        self.template = CompiledTemplate(source, name, clock)
        self.name = name
        self.special_tokens_map = dict(special_tokens_map)
        self.special_tokens = tuple(special_tokens)
        longest_first = sorted({token for token in special_tokens if token}, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")

    # -- rendering ------------------------------------------------------------------------------------------------

    def raw(self, turns: list[Turn], tools: list[Any] | None, *, prompt: bool) -> tuple[str, list[tuple[int, int]]]:
        """Rendered text and the spans of `{% generation %}`. Raises TemplateRefused."""
        variables = {**self.special_tokens_map, "messages": turns, "tools": tools, "documents": None}
        return cut_generation_marks(self.template.render(**variables, add_generation_prompt=prompt))

    def text(self, turns: list[Turn], tools: list[Any] | None, *, prompt: bool = False) -> str:
        """Rendered text. Raises TemplateRefused."""
        return self.raw(turns, tools, prompt=prompt)[0]

    def try_text(self, turns: list[Turn], tools: list[Any] | None, *, prompt: bool = False) -> str | None:
        """Rendered text, or None where the template refuses the conversation (a prefix may be none of its liking)."""
        try:
            return self.text(turns, tools, prompt=prompt)
        except TemplateLimit:
            raise
        except TemplateRefused:
            return None

    def prompt(self, messages: Sequence[Message], tools: list[dict[str, Any]] | None = None) -> str:
        """What inference gives to the model: the conversation and the header of the answer. Raises TemplateRefused."""
        turns, known_tools = self.turns(messages, tools)
        return self.text(turns, known_tools, prompt=True)

    # -- messages as templates see them ----------------------------------------------------------------------------

    def turns(
        self, messages: Sequence[Message], tools: list[dict[str, Any]] | None
    ) -> tuple[list[Turn], list[Any] | None]:
        """Messages as plain dicts without empty keys; tools written as text where the template knows none, and system
        text put before the first user's where it takes none."""
        turns = [self._turn(message) for message in messages]
        if tools and not self.knows_tools:
            lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
            text = TOOLS_AS_TEXT.format(signatures=lines)
            if turns and turns[0]["role"] == "system":
                turns[0] = {**turns[0], "content": f"{turns[0].get('content', '')}\n\n{text}".lstrip("\n")}
            else:
                turns.insert(0, {"role": "system", "content": text})
            tools = None
        if len(turns) > 1 and turns[0]["role"] == "system" and turns[1]["role"] == "user" and not self.knows_system:
            texts = [turn["content"] for turn in turns[:2] if turn.get("content")]
            turns[:2] = [{**turns[1], "content": "\n\n".join(texts)}]
        return turns, tools or None

    def _turn(self, message: Message) -> Turn:
        turn: Turn = {"role": message.role}
        content, reasoning = message.content, message.reasoning_content
        if reasoning is None and content is not None and message.role == "assistant":
            content, reasoning = self._split_closing_tag(content)
        if content is not None:
            turn["content"] = content
        if reasoning is not None:
            turn["reasoning_content"] = turn["thinking"] = reasoning
        if message.tool_calls:
            if self.knows_tool_calls:
                turn["tool_calls"] = message.tool_calls
                if message.content is None and not self.takes_missing_content:
                    turn["content"] = ""
            else:
                calls = [f"<tool_call>\n{_call_text(call)}\n</tool_call>" for call in message.tool_calls]
                turn["content"] = "\n".join(filter(None, [content, *calls]))
        if message.name is not None:
            turn["name"] = message.name
        if message.tool_call_id is not None:
            turn["tool_call_id"] = message.tool_call_id
        if message.role == "tool" and not self.knows_tool_role:
            turn = {"role": "user", "content": f"<tool_response>\n{content or ''}\n</tool_response>"}
        return turn

    def _split_closing_tag(self, content: str) -> tuple[str, str | None]:
        """An answer with the closing tag alone (`r</think>A`): templates that look for both tags would wrap it
        again."""
        if "</think>" in content and "<think>" not in content and "reasoning_content" in self.template.source:
            reasoning, answer = content.split("</think>", 1)
            return answer.lstrip("\n"), reasoning.strip("\n")
        return content, None

    # -- facts found by probes -------------------------------------------------------------------------------------

    @cached_property
    def generation_prompt(self) -> str:
        """The header of an answer as inference prints it, empty when the template has none."""
        turns = [{"role": "user", "content": "frugal probe"}]
        with_prompt, without = self.try_text(turns, None, prompt=True), self.try_text(turns, None)
        if with_prompt is None or without is None or not with_prompt.startswith(without):
            return ""
        return with_prompt[len(without) :]

    @cached_property
    def plain_tail(self) -> str | None:
        """What follows the text of an answer, up to and with the end-of-turn token; None when no token ends it."""
        mark = chr(FIRST_MARK)
        turns = [{"role": "user", "content": "frugal probe"}, {"role": "assistant", "content": f"probe{mark}"}]
        text = self.try_text(turns, None)
        if text is None or mark not in text:
            return None
        return self.tail_through_end(text[text.rindex(mark) + 1 :], called=False)

    @cached_property
    def end_token(self) -> str:
        """The token that ends a plain answer; empty when there is none."""
        found = self.special_pattern.findall(self.plain_tail or "")
        return found[-1] if found else ""

    def tail_through_end(self, tail: str, *, called: bool) -> str | None:
        """The part of ``tail`` (text after an answer that is the last of its conversation) that the model must produce.

        Ends with the first special token; after tool calls, which may have special tokens of their own, with the plain
        answers' end token, else with the last special token.
        """
        found = list(self.special_pattern.finditer(tail))
        if not found:
            return None
        chosen = found[0]
        if called:
            same = [hit for hit in found if hit.group() == self.end_token]
            chosen = same[0] if same else found[-1]
        return tail[: chosen.end()]

    @cached_property
    def knows_tools(self) -> bool:
        """True when tool descriptions reach the text."""
        text = self.try_text([{"role": "user", "content": "probe"}], [_PROBE_TOOL])
        return text is not None and "frugal_probe" in text

    @cached_property
    def knows_system(self) -> bool:
        """True when the text of a system turn in front of a user's reaches the text."""
        user: Turn = {"role": "user", "content": "frugal probe"}
        text = self.try_text([{"role": "system", "content": "frugal-system"}, user], None)
        # A template that refuses the user alone too says nothing about system turns.
        return "frugal-system" in text if text is not None else self.try_text([user], None) is None

    @cached_property
    def dated(self) -> list[str]:
        """Renderings of probes in which the template printed the time; empty when it prints none."""
        self.template.reads_clock = False
        user: Turn = {"role": "user", "content": "probe"}
        system: Turn = {"role": "system", "content": "probe"}
        probes = (([user], None), ([system, user], None), ([user], [_PROBE_TOOL]))
        try:
            texts = [self.try_text(turns, tools) or "" for turns, tools in probes]
        except TemplateLimit:
            return []  # the first row that is rendered meets it too, and says so
        return texts if self.template.reads_clock else []

    @cached_property
    def knows_tool_calls(self) -> bool:
        """True when the assistant's tool calls reach the text."""
        return any("frugal_call" in (text or "") for text in (self._call_probe(None), self._call_probe("")))

    @cached_property
    def takes_missing_content(self) -> bool:
        """True when a message with tool calls may come without content."""
        return "frugal_call" in (self._call_probe(None) or "")

    def _call_probe(self, content: str | None) -> str | None:
        turn: Turn = {"role": "assistant", "tool_calls": [_PROBE_CALL]}
        if content is not None:
            turn["content"] = content
        return self.try_text([{"role": "user", "content": "probe"}, turn], [_PROBE_TOOL])

    @cached_property
    def knows_tool_role(self) -> bool:
        """True when a message of role `tool` reaches the text."""
        called: Turn = {"role": "assistant", "content": ""}
        called.update({"tool_calls": [_PROBE_CALL]} if self.knows_tool_calls else {"content": "call"})
        answer = {"role": "tool", "content": "frugal-result", "name": "frugal_call", "tool_call_id": "frugal000"}
        text = self.try_text([{"role": "user", "content": "probe"}, called, answer], [_PROBE_TOOL])
        return text is not None and "frugal-result" in text

    @cached_property
    def control_tokens(self) -> frozenset[str]:
        """Special tokens that carry structure: the template's own and begin, end, padding and unknown.

        Their text inside a message is data and is tokenised as plain text. Other special tokens (added ones, reserved
        ones) stay special in messages: who writes them there means them.
        """
        known = {value for value in self.special_tokens_map.values() if isinstance(value, str)}
        source = self.template.source
        turns = [
            {"role": "system", "content": "probe"},
            {"role": "user", "content": "probe"},
            {"role": "assistant", "content": "probe"},
        ]
        texts = [source, *(self.try_text(part, None, prompt=True) or "" for part in (turns, turns[1:2], turns[1:]))]
        return frozenset(known | {token for text in texts for token in self.special_pattern.findall(text)})

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches a control token."""
        longest_first = sorted(filter(None, self.control_tokens), key=len, reverse=True)
        return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _call_text(call: dict[str, Any]) -> str:
    """A tool call as JSON text: name and arguments, in the file's order."""
    function = call.get("function", call)
    return json.dumps({"name": function["name"], "arguments": function.get("arguments", {})}, ensure_ascii=False)
