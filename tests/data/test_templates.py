"""Named templates: what they print, what they train, and that transformers renders the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from frugal.data import TEMPLATES, build, choose_template
from frugal.data.chat.render import ChatRenderer
from frugal.data.chat.spans import render_chat
from frugal.data.chat.templates import portable
from frugal.data.rows import Message
from frugal.errors import ConfigError
from tests.support.rows import byte_tokenizer, chat, prepare, section, trained_texts, write_rows

NEEDED = sorted({token for named in TEMPLATES.values() for token in named.needs} | {"<s>", "</s>"})
TEXTS = {
    "alpaca": "<s>S\n\n### Instruction:\na\n\n### Response:\nX</s>\n\n### Instruction:\nb\n\n### Response:\nY</s>\n\n",
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nX<|im_end|>\n"
    "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\nY<|im_end|>\n",
    "gemma": "<s><start_of_turn>user\nS\n\na<end_of_turn>\n<start_of_turn>model\nX<end_of_turn>\n"
    "<start_of_turn>user\nb<end_of_turn>\n<start_of_turn>model\nY<end_of_turn>\n",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
    "a<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nX<|eot_id|><|start_header_id|>user<|end_header_id|>"
    "\n\nb<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nY<|eot_id|>",
    "mistral": "<s>[INST] S\n\na [/INST] X</s>[INST] b [/INST] Y</s>",
    "plain": "SaX</s>bY</s>",
    "phi3": "<|system|>\nS<|end|>\n<|user|>\na<|end|>\n<|assistant|>\nX<|end|>\n<|user|>\nb<|end|>\n"
    "<|assistant|>\nY<|end|>\n",
    "zephyr": "<|system|>\nS</s>\n<|user|>\na</s>\n<|assistant|>\nX</s>\n<|user|>\nb</s>\n<|assistant|>\nY</s>\n",
}
ENDS = {"chatml": "<|im_end|>", "gemma": "<end_of_turn>", "llama3": "<|eot_id|>", "phi3": "<|end|>"}


def _tokenizer(template: str | None = None):
    return byte_tokenizer(template, specials=NEEDED, bos="<s>", eos="</s>")


@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_mask(name: str) -> None:
    tokenizer = _tokenizer()
    example = chat("s: S", "u: a", "a: X", "u: b", "a: Y")
    (row,) = prepare(tokenizer, example, template=name)
    end = ENDS.get(name, "</s>")
    lead = " " if name == "mistral" else ""
    assert row.text == TEXTS[name]
    assert trained_texts(tokenizer, row) == [f"{lead}X{end}", f"{lead}Y{end}"]
    # Saved without the generation tags it prints the same, in transformers too, and the masks are found all the same.
    plain = portable(TEMPLATES[name].source)
    assert "generation %}" not in plain
    tokenizer.chat_template = plain
    (again,) = prepare(tokenizer, example)
    assert again.text == row.text
    assert again.trained.tolist() == row.trained.tolist()
    turns = [{"role": message.role, "content": message.content} for message in example.messages]
    for source in (plain, TEMPLATES[name].source):
        assert tokenizer.apply_chat_template(turns, chat_template=source, tokenize=False) == row.text


def test_without_a_template_alpaca_rows_get_the_alpaca_one_and_conversations_are_refused(tmp_path: Path) -> None:
    tokenizer = _tokenizer()
    alpaca = write_rows(tmp_path / "a.jsonl", [{"instruction": "I", "input": "J", "output": "O"}])
    data = build(section(alpaca), tokenizer, seed=0, vocab_size=400)
    text = tokenizer.decode(data.train[0].input_ids.tolist())
    assert text.startswith("<s>Below is an instruction")
    assert "### Instruction:\nI\nJ\n\n### Response:\nO</s>" in text.replace("I\n\nJ", "I\nJ")
    assert data.template_report.line == "answers end with </s>: trained yes"
    assert data.chat_template == portable(TEMPLATES["alpaca"].source)
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    chats = write_rows(tmp_path / "c.jsonl", [{"messages": turns}, {"messages": turns * 2}])
    with pytest.raises(ConfigError, match="no chat template"):
        build(section(chats), tokenizer, seed=0, vocab_size=400)


def test_a_name_that_is_none_and_tokens_that_are_missing() -> None:
    with pytest.raises(ConfigError, match="Did you mean chatml"):
        choose_template("chatm", _tokenizer())
    with pytest.raises(ConfigError, match=r"add_tokens: \['<start_of_turn>', '<end_of_turn>'\]"):
        choose_template("gemma", byte_tokenizer())


def test_a_template_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }} </s>{% endfor %}", encoding="utf-8")
    tokenizer = _tokenizer("unused")
    (row,) = prepare(tokenizer, chat("u: a", "a: é→X"), template=str(file))
    assert row.text == "[user] a </s>[assistant] é→X </s>"
    assert trained_texts(tokenizer, row) == ["é→X </s>"]


# -- templates of real models, where TRL is installed: our spans against `{% generation %}` marks written by hand

CALL = {"type": "function", "id": "abcdefghi", "function": {"name": "f", "arguments": {"a": 1, "b": "x"}}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "d",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "q"}}},
    },
}
CHATS = {
    "single": [Message("user", "Hi"), Message("assistant", "Hello there")],
    "multi": [Message("user", "u1"), Message("assistant", "A"), Message("user", "u2"), Message("assistant", "B")],
    "system": [Message("system", "S"), Message("user", "u1"), Message("assistant", "A")],
    "reasoning": [
        Message("user", "u1"),
        Message("assistant", "A", reasoning_content="r1"),
        Message("user", "u2"),
        Message("assistant", "B", reasoning_content="r2"),
    ],
    "call": [
        Message("user", "u1"),
        Message("assistant", None, tool_calls=[CALL]),
        Message("tool", "res", name="f", tool_call_id="abcdefghi"),
        Message("assistant", "B"),
    ],
}
MODELS = ["cohere", "gemma", "gemma3", "gptoss", "llama3", "qwen2_5", "qwen3", "qwen3_8", "qwen3_instruct_2507"]
LACKS_CALLS = ("cohere", "gemma", "gemma3", "deepseekv3")
MODELS += ["deepseekv3", "lfm2", "nemotron_3_nano", "qwen3_6"]


def _trl_folder() -> Path:
    found = importlib.util.find_spec("trl")
    if found is None or found.origin is None:
        pytest.skip("TRL is not installed")
    return Path(found.origin).parent / "chat_templates"


@pytest.mark.parametrize("model", MODELS)
def test_spans_agree_with_marks_written_by_hand(model: str) -> None:
    folder = _trl_folder()
    files = [folder / f"{model}.jinja", folder / f"{model}_training.jinja"]
    if not all(file.is_file() for file in files):
        pytest.skip("this version of TRL has no such template")
    sources = [file.read_text(encoding="utf-8") for file in files]
    special = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"]
    special += ["<start_of_turn>", "<end_of_turn>", "<|end|>", "<|user|>", "<|assistant|>", "<|return|>", "<|call|>"]
    special += ["<|start|>", "<|message|>", "<|channel|>", "<｜Assistant｜>", "<｜User｜>", "<｜end▁of▁sentence｜>"]
    special += ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|USER_TOKEN|>"]
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    own = ChatRenderer(sources[0], model, names, special)
    compared = 0
    for name, messages in CHATS.items():
        if (name == "system" and model == "gemma") or (name == "call" and model in LACKS_CALLS):
            continue  # the template refuses a system message or two turns of one role, or marks what a tool says
        tools = [TOOL] if any(message.tool_calls for message in messages) else None
        turns, known_tools = own.turns(messages, tools)
        (stock,), _ = render_jinja_template([turns], tools=known_tools, chat_template=sources[0], **names)
        ours = render_chat(own, turns, known_tools)
        assert ours.text == stock
        (marked,), (spans,) = render_jinja_template(
            [turns], tools=known_tools, chat_template=sources[1], return_assistant_tokens_mask=True, **names
        )
        if marked != stock:
            continue  # TRL changed what this template prints for such a conversation
        # What the marks enclose besides the answer is the end of its header or a line break behind the end token.
        spans = [(begin, end) for begin, end in spans if begin < end]
        assert len(spans) == len(ours.answers)
        for (begin, end), answer in zip(spans, ours.answers, strict=True):
            assert begin <= answer.start <= answer.end <= end
            assert marked[answer.end : end].strip() == ""
            extra = marked[begin : answer.start]
            assert extra in own.generation_prompt or not extra.strip()
        compared += 1
    assert compared
