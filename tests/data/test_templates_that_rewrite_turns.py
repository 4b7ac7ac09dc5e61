"""T05: templates that rewrite earlier turns: the mask is right or the row refused; training text is inference text."""

from __future__ import annotations

import pytest

from frugal.data import Example, Message, encode_prompt
from tests.support.rows import byte_tokenizer, chat, prepare, trained_texts

# Prints reasoning only where no user turn follows.
DROPS = (
    "{% for m in messages %}{% set i = loop.index0 %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and m.reasoning_content is defined"
    " and messages[i + 1:] | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
    "{{ m.reasoning_content }} {% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3: the last answer has a thinking block, an empty one when there is no reasoning; earlier ones have none.
BLOCKS = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 "
    "%}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set "
    "content = m.content %}{% set r = m.reasoning_content if m.reasoning_content is defined else '' %}{% if not r and "
    "'</think>' in content %}{% set r = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}{% set "
    "content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{% if loop.index0 > ns.last %}<think>\n{{ r "
    "}}\n</think>\n\n{% endif %}{{ content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if "
    "add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Looks for both tags in the text: an answer with the closing tag alone would get a second block.
BOTH_TAGS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% if m.reasoning_content is "
    "defined %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{{ m.content }}{% elif '<think>' in m.content and "
    "'</think>' in m.content %}{{ m.content }}{% else %}<think>\n\n</think>\n\n{{ m.content }}{% endif %}{% else %}{{ "
    "m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _reasoned() -> Example:
    example = chat("u: one", "a: A", "u: two", "a: B")
    example.messages[1].reasoning_content = "r1"
    example.messages[3].reasoning_content = "r2"
    return example


def test_reasoning_of_earlier_turns_is_dropped_and_the_masks_are_right() -> None:
    tokenizer = byte_tokenizer(DROPS)
    (row,) = prepare(tokenizer, _reasoned())
    assert trained_texts(tokenizer, row) == ["A<|im_end|>", "r2 B<|im_end|>"]
    assert "r1" not in row.text


def test_thinking_blocks() -> None:
    tokenizer = byte_tokenizer(BLOCKS)
    reasoned, plain, tagged = prepare(
        tokenizer,
        _reasoned(),
        chat("u: one", "a: A", "u: two", "a: B"),
        chat("u: one", "a: <think>\nr1\n</think>\n\nA", "u: two", "a: <think>\nr2\n</think>\n\nB"),
    )
    wanted = ["A<|im_end|>", "<think>\nr2\n</think>\n\nB<|im_end|>"]
    assert trained_texts(tokenizer, reasoned) == wanted
    assert trained_texts(tokenizer, tagged) == wanted
    assert trained_texts(tokenizer, plain) == ["A<|im_end|>", "<think>\n\n</think>\n\nB<|im_end|>"]


@pytest.mark.parametrize("template", [DROPS, BLOCKS])
def test_training_text_begins_with_what_inference_renders(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    example = _reasoned()
    (row,) = prepare(tokenizer, example)
    prompt = encode_prompt(tokenizer, example.messages[:3])
    assert row.ids.tolist()[: len(prompt)] == prompt
    assert not row.trained[: len(prompt)][-len("<|im_start|>assistant\n") + 11 :].any()
    stock = tokenizer.apply_chat_template(
        [{"role": "user", "content": "one"}, {"role": "assistant", "content": "A", "reasoning_content": "r1"}],
        tokenize=False,
    )
    (single,) = prepare(tokenizer, Example("messages", "r", 1, messages=example.messages[:2]))
    assert single.text == stock


@pytest.mark.parametrize("template", [BLOCKS, BOTH_TAGS])
def test_a_closing_tag_alone_is_not_wrapped_in_a_second_block(template: str) -> None:
    tokenizer = byte_tokenizer(template)
    (row,) = prepare(tokenizer, chat("u: one", "a: r</think>A"))
    assert trained_texts(tokenizer, row) == ["<think>\nr\n</think>\n\nA<|im_end|>"]


def test_a_second_block_that_cannot_be_avoided_is_refused_with_the_templates_name() -> None:
    blind = BOTH_TAGS.replace("{% if m.reasoning_content is defined %}", "{% if false %}").replace(
        "{{ m.reasoning_content }}", ""
    )
    tokenizer = byte_tokenizer(blind)
    (row,) = prepare(tokenizer, chat("u: one", "a: r</think>A"))
    assert "the tokenizer's own" in row.fault
    assert "second thinking block" in row.fault


def test_a_history_that_is_rewritten_behind_a_tool_call() -> None:
    """The conversation up to the last answer is no beginning of the whole text, and still the mask is right."""
    tokenizer = byte_tokenizer(BLOCKS)
    example = chat("u: one", "a: call", "t: 42", "a: A", "u: two", "a: B")
    example.messages[1].reasoning_content = "r1"
    (row,) = prepare(tokenizer, example)
    assert trained_texts(tokenizer, row) == [
        "call<|im_end|>",
        "A<|im_end|>",
        "<think>\n\n</think>\n\nB<|im_end|>",
    ]


def test_a_template_that_hides_an_answer_is_refused() -> None:
    tokenizer = byte_tokenizer(
        "{% for m in messages %}{% if m.role == 'user' or loop.last %}[{{ m.role }}]{{ m.content }}<|im_end|>{% endif "
        "%}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    (row,) = prepare(tokenizer, chat("u: one", "a: Answer", "u: two", "a: Bnswer"))
    assert "does not print the text of turn 2 (assistant)" in row.fault


def test_a_template_that_merges_answers_is_refused_or_right() -> None:
    merging = (
        "{% for m in messages %}{% if loop.index0 == 0 or messages[loop.index0 - 1].role != m.role %}<|im_start|>{{ "
        "m.role }}\n{% endif %}{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != m.role "
        "%}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    tokenizer = byte_tokenizer(merging)
    (row,) = prepare(tokenizer, chat("u: one", "a: A", "a: B"))
    if row.fault:
        assert "cannot be told" in row.fault
    else:
        assert trained_texts(tokenizer, row) == ["AB<|im_end|>"]
    (rowed,) = prepare(tokenizer, chat("u: one", "u: two", "a: A"))
    assert trained_texts(tokenizer, rowed) == ["A<|im_end|>"]


def test_reasoning_reaches_inference_the_same_way() -> None:
    tokenizer = byte_tokenizer(BLOCKS)
    messages = [Message("user", "one"), Message("assistant", "r</think>A"), Message("user", "two")]
    (row,) = prepare(tokenizer, Example("messages", "r", 1, messages=[*messages, Message("assistant", "B")]))
    prompt = encode_prompt(tokenizer, messages)
    assert row.ids.tolist()[: len(prompt)] == prompt
