"""D03, rendering part: tool schemas and calls are printed as their own row has them, also after cache and packing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from frugal.data import build
from tests.support.rows import CHATML, byte_tokenizer, section, write_rows

# Prints tools and calls as JSON, as Qwen's template does.
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content %}{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _row(name: str, parameters: dict[str, str], arguments: dict[str, Any]) -> dict[str, Any]:
    properties = {key: {"type": kind} for key, kind in parameters.items()}
    tool = {"name": name, "description": name, "parameters": {"type": "object", "properties": properties}}
    return {
        "messages": [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
            },
            {"role": "tool", "content": "done"},
            {"role": "assistant", "content": "ok"},
        ],
        "tools": [{"type": "function", "function": tool}],
    }


ROWS = [
    _row("f", {"a": "integer"}, {"a": 1}),
    _row("g", {"b": "string"}, {"b": "x"}),
    _row("h", {"a": "integer"}, {"a": None}),
    _row("k", {}, {}),
    _row("z", {"y": "string", "x": "string"}, {"y": "1", "x": "2"}),
]
CALLS = [
    '{"name": "f", "arguments": {"a": 1}}',
    '{"name": "g", "arguments": {"b": "x"}}',
    '{"name": "h", "arguments": {"a": null}}',
    '{"name": "k", "arguments": {}}',
    '{"name": "z", "arguments": {"y": "1", "x": "2"}}',
]


def _texts(path: Path, template: str, **settings: Any) -> dict[int, tuple[str, str]]:
    """Row number -> (all text, trained text)."""
    tokenizer = byte_tokenizer(template)
    data = build(
        section(path, max_length=4096, **settings), tokenizer, seed=0, vocab_size=300, cache_dir=path.parent / "cache"
    )
    found = {}
    for row in data.train:
        for number, (begin, end) in enumerate(zip(row.doc_starts[:-1], row.doc_starts[1:], strict=True)):
            ids, trained = row.input_ids[begin:end], row.trained[begin:end]
            found[int(row.origin[number])] = (tokenizer.decode(ids.tolist()), tokenizer.decode(ids[trained].tolist()))
    return found


@pytest.mark.parametrize("template", [TOOLS, CHATML], ids=["knows tools", "knows none"])
@pytest.mark.parametrize("settings", [{}, {"packing": True}, {"num_proc": 2}], ids=str)
def test_calls_and_schemas_are_those_of_their_row(tmp_path: Path, template: str, settings: dict[str, Any]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    texts = _texts(path, template, **settings)
    for number, call in enumerate(CALLS):
        text, trained = texts[number]
        wanted = f"<tool_call>{call}</tool_call><|im_end|>ok<|im_end|>"
        assert trained.replace("<tool_call>\n", "<tool_call>").replace("\n</tool_call>", "</tool_call>") == wanted
        assert json.dumps(ROWS[number]["tools"][0]) in text
        assert "null" not in text or number == 2
    assert '"b"' not in texts[0][0]
    assert '"a"' not in texts[1][0]


def test_the_same_after_the_cache(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    fresh = _texts(path, TOOLS, cache=True)
    assert _texts(path, TOOLS, cache=True) == fresh == _texts(path, TOOLS)


def test_the_text_is_what_transformers_renders(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ROWS)
    tokenizer = byte_tokenizer(TOOLS)
    texts = _texts(path, TOOLS)
    for number, row in enumerate(ROWS):
        stock = tokenizer.apply_chat_template(row["messages"], tools=row["tools"], tokenize=False)
        assert texts[number][0] == stock
