"""D06: roles are mapped by a table, never by position; no turn is thrown away; unknown ones stop with line and role."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frugal.config import SourceSection
from frugal.data.sources.mixing import load_examples
from frugal.errors import DataError

STYLES = {"sharegpt": ("conversations", "from", "value"), "messages": ("messages", "role", "content")}

ORDERS = {
    "system only": ["system"],
    "two user turns": ["user", "user", "assistant"],
    "assistant first": ["assistant", "user", "assistant"],
    "two assistant turns": ["user", "assistant", "assistant"],
    "ends with a user turn": ["user", "assistant", "user"],
    "six turns": ["user", "assistant"] * 3,
    "system later": ["user", "system", "assistant"],
}


def write(path: Path, style: str, words: list[str | None], **more: Any) -> SourceSection:
    key, role_key, text_key = STYLES[style]
    turns = [
        {**({} if word is None else {role_key: word}), text_key: f"turn {number}", **more}
        for number, word in enumerate(words)
    ]
    path.write_text("\n" + json.dumps({key: turns}) + "\n", encoding="utf-8")
    return SourceSection(path=str(path))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("order", ORDERS)
def test_every_turn_comes_through_in_order(tmp_path: Path, style: str, order: str) -> None:
    source = write(tmp_path / "a.jsonl", style, list(ORDERS[order]), weight=1)
    examples, report = load_examples([source], on_bad_row="error", seed=0)
    assert [message.role for message in examples[0].messages] == ORDERS[order]
    assert [message.content for message in examples[0].messages] == [f"turn {n}" for n in range(len(ORDERS[order]))]
    assert report.sources[0].format == style


@pytest.mark.parametrize("style", STYLES)
def test_aliases_and_letter_case(tmp_path: Path, style: str) -> None:
    words = ["System", "human", "gpt", "USER", "Assistant", "function", "observation", "tool", "model"]
    source = write(tmp_path / "a.jsonl", style, list(words))
    examples, report = load_examples([source], on_bad_row="error", seed=0)
    roles = ["system", "user", "assistant", "user", "assistant", "tool", "tool", "tool", "assistant"]
    assert [message.role for message in examples[0].messages] == roles
    assert report.sources[0].roles == dict(zip(words, roles, strict=True))


@pytest.mark.parametrize("style", STYLES)
def test_unknown_role_stops_with_line_and_role(tmp_path: Path, style: str) -> None:
    source = write(tmp_path / "a.jsonl", style, ["user", "narrator", "assistant"])
    with pytest.raises(DataError) as caught:
        load_examples([source], on_bad_row="error", seed=0)
    said = str(caught.value)
    assert said.startswith(
        f"{source.path}:2: unknown role ('narrator' in turn 2 of `{STYLES[style][0]}`; known: system,"
    )


@pytest.mark.parametrize("style", STYLES)
def test_missing_role_stops_with_line_and_turn(tmp_path: Path, style: str) -> None:
    source = write(tmp_path / "a.jsonl", style, ["user", None])
    with pytest.raises(DataError, match=r":2: a turn has no role \(turn 2 of `\w+`; it has: (content|value)\)"):
        load_examples([source], on_bad_row="error", seed=0)


def test_unknown_roles_are_counted_under_drop(tmp_path: Path) -> None:
    rows = [{"messages": [{"role": role, "content": "x"}]} for role in ("user", "bot1", "bot2")]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    examples, report = load_examples([SourceSection(path=str(path))], on_bad_row="drop", seed=0)
    assert len(examples) == 1
    assert [(drop.reason, drop.rows, drop.first) for drop in report.drops] == [("unknown role", 2, f"{path}:2")]
    assert "'bot1'" in report.drops[0].detail


def test_tool_role_in_preference_data(tmp_path: Path) -> None:
    prompt = [{"from": "human", "value": "q"}, {"from": "function_call", "value": '{"name": "f"}'}]
    row = {
        "conversations": [*prompt, {"from": "observation", "value": "1"}],
        "chosen": {"from": "gpt", "value": "a"},
        "rejected": {"from": "gpt", "value": "b"},
    }
    path = tmp_path / "a.json"
    path.write_text(json.dumps([row]), encoding="utf-8")
    examples, _ = load_examples([SourceSection(path=str(path))], on_bad_row="error", seed=0)
    assert [message.role for message in examples[0].messages] == ["user", "assistant", "tool"]
