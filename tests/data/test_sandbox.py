"""Chat templates are code of strangers: sandboxed, with a limit on time and on size (X03)."""

from __future__ import annotations

import contextlib
import time

import pytest

from frugal.data import build
from frugal.data.chat import sandbox
from frugal.data.chat.sandbox import CompiledTemplate, TemplateLimit, TemplateRefused, cut_generation_marks
from frugal.errors import DataError
from tests.support.rows import byte_tokenizer, section, write_rows

LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = i * j %}{% endfor %}{% endfor %}"


def _render(source: str) -> str:
    return CompiledTemplate(source, "t").render(messages=[{"role": "user", "content": "hi"}])


@pytest.mark.parametrize(
    "source",
    [
        LOOP,
        "{% macro f(n) %}{% for i in range(99999) %}{{ f(n) if n > 1e9 }}{% endfor %}{% endmacro %}"
        "{% for i in range(99999) %}{% set x = f(1) %}{% endfor %}",
    ],
)
def test_endless_loops_are_stopped(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.3)
    started = time.monotonic()
    with pytest.raises(TemplateLimit, match="longer than"):
        _render(source)
    assert time.monotonic() - started < 5


def test_calls_look_at_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    source = "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n }}{% endmacro %}{{ f(60) }}"
    with pytest.raises(TemplateLimit, match="longer than"):
        _render(source)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{% set x = 'a' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}", "prints more than"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "without end"),
    ],
)
def test_a_huge_text_and_endless_macros_are_stopped(source: str, reason: str) -> None:
    with pytest.raises(TemplateLimit, match=reason):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ self._TemplateReference__context }}",
    ],
)
def test_attribute_tricks_give_nothing(source: str) -> None:
    with contextlib.suppress(TemplateRefused):
        assert _render(source) == ""  # an undefined value prints as nothing


def test_ordinary_templates_work_as_in_transformers() -> None:
    text = _render(
        "{% for i in range(3) %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}"
        "{{ {'b': '<é>', 'a': 1} | tojson }}{{ [1, 2] | join(', ') }}{{ 'x' ~ 1 ~ 'y' }}{{ '%s!' | format('a') }}"
        "{{ 'a\nb' | indent(2) }}{{ dict(a=1).items() | list }}{{ '{}-{}'.format(1, 2) }}"
    )
    assert text == "02" + '{"b": "<é>", "a": 1}' + "1, 2" + "x1y" + "a!" + "a\n  b" + "[('a', 1)]" + "1-2"


def test_generation_blocks_give_spans_and_no_text() -> None:
    text, spans = cut_generation_marks(
        _render("ab{% generation %}cd{% endgeneration %}ef{% generation %}{% endgeneration %}")
    )
    assert (text, spans) == ("abcdef", [(2, 4), (6, 6)])


def test_a_template_that_is_no_jinja_says_where() -> None:
    with pytest.raises(DataError, match="line 2"):
        CompiledTemplate("a\n{% if %}", "own.jinja")


def test_a_run_stops_with_the_row_and_the_template(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    template = tmp_path / "own.jinja"
    template.write_text(LOOP, encoding="utf-8")
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = write_rows(tmp_path / "rows.jsonl", [{"messages": turns}])
    with pytest.raises(DataError, match=r"own\.jinja\) was stopped"):
        build(section(rows, chat_template=str(template)), byte_tokenizer(), seed=0, vocab_size=300)
