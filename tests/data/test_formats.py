"""Raw rows into examples: detection, every format's forms, tool calls, and what is refused with which reason."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from frugal.config import SourceSection
from frugal.data.formats import FORMATS, apply_columns, check_columns, convert, detect_format, wrong_format_advice
from frugal.data.formats.turns import ROLE_ALIASES
from frugal.data.rows import Example, Message, RawRow, RowError
from frugal.errors import DataError

USER = {"role": "user", "content": "q"}
ANSWER = {"role": "assistant", "content": "a"}
WEATHER = {"name": "weather", "description": "", "parameters": {"type": "object", "properties": {}}}


def example(row: dict[str, Any], name: str) -> Example:
    return convert(RawRow(row, "f", 1), name, {})


def reason(row: dict[str, Any], name: str) -> str:
    with pytest.raises(RowError) as caught:
        example(row, name)
    return str(caught.value)


def turns(messages: list[Message]) -> list[tuple[str, str | None]]:
    return [(message.role, message.content) for message in messages]


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ({"instruction": "", "output": ""}, "alpaca"),
        ({"instruction": "i", "input": "", "output": "o", "text": "rendered"}, "alpaca"),
        ({"conversations": [], "tools": "[]"}, "sharegpt"),
        ({"messages": [], "text": "rendered", "prompt": "first turn"}, "messages"),
        ({"prompt": "", "completion": ""}, "prompt_completion"),
        ({"text": ""}, "text"),
        ({"chosen": [], "rejected": []}, "preference"),
        ({"conversations": [], "chosen": {}, "rejected": {}}, "preference"),
        ({"prompt": "", "chosen": "", "rejected": ""}, "preference"),
    ],
)
def test_detects(row: dict[str, Any], name: str) -> None:
    assert detect_format([row], "f") == name


def test_one_bad_row_does_not_decide() -> None:
    assert (
        detect_format([{"text": "x"}, {"instruction": "i"}, *[{"instruction": "i", "output": "o"}] * 2], "f")
        == "alpaca"
    )


def test_undecidable_lists_what_was_seen_and_what_is_needed() -> None:
    with pytest.raises(DataError) as caught:
        detect_format([{"question": "x", "answer": "y"}, {"id": 1}], "f.csv")
    said = str(caught.value)
    assert "f.csv: the format cannot be told from the keys of the first rows: question, answer, id." in said
    assert "alpaca: instruction, output (may have input, system, history, tools" in said
    assert "prompt_completion: prompt, completion" in said
    assert "columns: {prompt: question, completion: answer}" in said


def test_ambiguous_asks() -> None:
    row = {"prompt": "p", "messages": [], "chosen": [], "rejected": []}
    with pytest.raises(DataError, match="fit several formats: messages, preference") as caught:
        detect_format([row], "f")
    assert "format: messages" in str(caught.value)


def test_wrong_format_names_the_right_one() -> None:
    advice = wrong_format_advice([{"text": "x"}], "messages")
    assert advice is not None
    assert "needs messages; the rows have: text. They fit format text: set `format: text`." in advice
    assert wrong_format_advice([{"text": "x"}, {"messages": []}], "messages") is None


def test_columns() -> None:
    row = {"question": "q", "prompt": "old", "answer": "a", "id": 1}
    columns = {"prompt": "question", "completion": "answer"}
    assert apply_columns(row, columns) == {"id": 1, "prompt": "q", "completion": "a"}
    assert detect_format([apply_columns(row, columns)], "f") == "prompt_completion"
    with pytest.raises(DataError, match=r"no row has 'answr'\. The rows have: question, prompt, answer, id"):
        check_columns({"completion": "answr"}, [row], "auto", "f")
    with pytest.raises(DataError, match=r"'question' is no name of format alpaca\. Names: instruction, output, input"):
        check_columns({"question": "prompt"}, [row], "alpaca", "f")


def test_alpaca() -> None:
    row = {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["q1", "a1"]]}
    expected = [("system", "s"), ("user", "q1"), ("assistant", "a1"), ("user", "i\nx"), ("assistant", "o")]
    assert turns(example(row, "alpaca").messages) == expected
    plain = {"instruction": "i", "input": "", "output": "", "system": None, "history": []}
    assert turns(example(plain, "alpaca").messages) == [("user", "i"), ("assistant", "")]
    assert reason({"instruction": "i"}, "alpaca") == "`output` is missing (the row has: instruction)"
    assert reason({"instruction": "i", "output": None}, "alpaca").startswith("`output` is null")
    assert reason({"instruction": "i", "output": "", "history": [["q"]]}, "alpaca").startswith("`history` has an entry")


def test_sharegpt_with_tools() -> None:
    call = '{"name": "weather", "arguments": {"z": [1], "a": null}}'
    two = f"[{call}, {json.dumps({'name': 'now', 'arguments': ''})}]"
    row = {
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": call},
            {"from": "observation", "value": "{}"},
            {"from": "function_call", "value": two},
            {"from": "function_response", "value": "x"},
            {"from": "gpt", "value": "a"},
        ],
        "system": "s",
        "tools": json.dumps([WEATHER]),
    }
    got = example(row, "sharegpt")
    roles = ["system", "user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert [message.role for message in got.messages] == roles
    assert got.messages[2].content is None
    assert got.messages[2].tool_calls == [
        {"type": "function", "function": {"name": "weather", "arguments": {"z": [1], "a": None}}}
    ]
    assert json.dumps(got.messages[2].tool_calls[0]["function"]["arguments"]) == '{"z": [1], "a": null}'
    assert [c["function"] for c in got.messages[4].tool_calls or []][1] == {"name": "now", "arguments": {}}
    assert got.tools == [{"type": "function", "function": WEATHER}]


def test_messages_with_tools() -> None:
    full = {"type": "function", "function": WEATHER}
    for arguments in ('{"city": "Bern"}', {"city": "Bern"}):
        call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
        row = {
            "messages": [
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "9", "tool_call_id": "c1", "name": "weather"},
                {**ANSWER, "reasoning_content": "r", "weight": 0, "extra": {"x": 1}},
            ],
            "tools": [full],
        }
        got = example(row, "messages")
        assert got.tools == [full]
        function = {"name": "weather", "arguments": {"city": "Bern"}}
        assert got.messages[1] == Message(
            "assistant", None, tool_calls=[{"id": "c1", "type": "function", "function": function}]
        )
        assert got.messages[2] == Message("tool", "9", tool_call_id="c1", name="weather")
        assert got.messages[3] == Message("assistant", "a", reasoning_content="r", train=False)


def test_the_first_openai_form_of_calls() -> None:
    turn = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"a": 1}'}}
    got = example({"messages": [USER, turn, {"role": "function", "name": "f", "content": "1"}]}, "messages")
    assert got.messages[1].tool_calls == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert got.messages[2].role == "tool"


def test_turns_as_json_text() -> None:
    as_list = example({"messages": json.dumps([USER, ANSWER])}, "messages")
    as_items = example({"messages": [json.dumps(USER), json.dumps(ANSWER)]}, "messages")
    assert turns(as_list.messages) == turns(as_items.messages) == [("user", "q"), ("assistant", "a")]


@pytest.mark.parametrize(("value", "train"), [(1, True), (0, False), (1.0, True), (True, True), (None, None)])
def test_switches_of_a_turn(value: Any, train: bool | None) -> None:
    for key in ("weight", "train"):
        assert example({"messages": [USER, {**ANSWER, key: value}]}, "messages").messages[1].train is train
    assert "neither 0/1 nor" in reason({"messages": [{**ANSWER, "weight": 0.5}]}, "messages")


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"tools": "[{]"}, "`tools`: not valid JSON (column 3:"),
        ({"tools": {"name": "f"}}, "`tools` is an object, not a list"),
        ({"tools": [{"description": "x"}]}, "a tool description has no name (tool 1)"),
        ({"messages": [{**ANSWER, "tool_calls": [{"function": {"arguments": {}}}]}]}, "a tool call has no name"),
        (
            {"messages": [{**ANSWER, "tool_calls": [{"name": "f", "arguments": "[1]"}]}]},
            "arguments of a tool call are a list, not an object",
        ),
        ({"messages": [{**USER, "tool_calls": [{"name": "f"}]}]}, "tool calls in a turn that is not the assistant's"),
        ({"messages": [{"role": "function_call", "content": "sunny"}]}, "a tool call: not valid JSON (column 1"),
        ({"messages": [{"role": "function_call", "content": "[]"}]}, "a tool call is an empty list"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}, "of type 'image_url'"),
        ({"messages": []}, "`messages` has no turns"),
        ({"messages": "hello"}, "`messages`: not valid JSON"),
        ({"messages": {"role": "user"}}, "`messages` is an object, not a list of turns"),
        ({"messages": [["user", "q"]]}, "a turn is a list, not an object (turn 1 of `messages`)"),
        ({"messages": [{"role": "system", "content": "s"}], "system": "s"}, "a system text and a system turn"),
        ({"messages": [{**USER, "name": 7}]}, "`name` of a turn is a number, not a text"),
    ],
)
def test_refused(row: dict[str, Any], said: str) -> None:
    assert said in reason({"messages": [USER, ANSWER], **row}, "messages")


def test_prompt_completion() -> None:
    got = example({"prompt": " p ", "completion": ""}, "prompt_completion")
    assert (got.kind, got.prompt, got.completion) == ("prompt_completion", " p ", "")
    assert [(turn.role, turn.content) for turn in got.messages] == [("user", " p "), ("assistant", "")]
    got = example({"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}, "prompt_completion")
    assert got.kind == "messages"
    assert [message.train for message in got.messages] == [False, False, False, None]
    assert "not both texts" in reason({"prompt": "p", "completion": [ANSWER]}, "prompt_completion")
    assert reason({"prompt": "p", "completion": 7}, "prompt_completion") == "`completion` is a number, not a text"


def test_text() -> None:
    got = example({"text": "\n x"}, "text")
    assert (got.kind, got.text) == ("text", "\n x")
    assert reason({"text": ["x"]}, "text") == "`text` is a list, not a text"


OTHER = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": [USER], "chosen": [ANSWER], "rejected": [OTHER]},
        {"prompt": "q", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"chosen": [USER, ANSWER], "rejected": [USER, OTHER]},
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        {
            "conversations": [{"from": "human", "value": "q"}],
            "chosen": {"from": "gpt", "value": "a"},
            "rejected": {"from": "gpt", "value": "b"},
        },
    ],
)
def test_preference_forms_give_the_same_example(row: dict[str, Any]) -> None:
    got = example(row, "preference")
    assert got.kind == "preference"
    assert turns(got.messages) == [("user", "q")]
    assert turns(got.chosen) == [("assistant", "a")]
    assert turns(got.rejected) == [("assistant", "b")]


def test_preference_refused() -> None:
    assert "no prompt" in reason({"chosen": "a", "rejected": "b"}, "preference")
    assert reason({"prompt": "q", "chosen": [ANSWER, USER], "rejected": "b"}, "preference") == (
        "`chosen` does not end with an assistant turn"
    )
    row = {"prompt": "another", "chosen": [USER, ANSWER], "rejected": [USER, OTHER]}
    assert "not the prompt's" in reason(row, "preference")


def test_every_word_names_one_role() -> None:
    words = [word for words in ROLE_ALIASES.values() for word in words]
    assert len(set(words)) == len(words)


def test_the_configuration_names_the_formats_of_the_registry() -> None:
    names = get_args(SourceSection.model_fields["format"].annotation)
    assert names == ("auto", *FORMATS)
