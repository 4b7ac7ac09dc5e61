"""The preview: what it shows is what is trained, legible with and without colours, and as a page that stands alone."""

from __future__ import annotations

import io
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from frugal.data import PreviewData, build, preview_rows, render_preview
from frugal.data.preview import histogram
from frugal.web.preview import write_preview_html
from tests.support.rows import byte_tokenizer, section, write_rows

TURNS = [{"role": "user", "content": "a [b] <c>"}, {"role": "assistant", "content": "X é🙂 & \x1b[31m"}]


def _preview(tmp_path: Path, rows: list[Any] | None = None, **options: Any) -> PreviewData:
    path = write_rows(tmp_path / "rows.jsonl", rows or [{"messages": TURNS}, {"messages": TURNS * 2}])
    return preview_rows(section(path, **options), byte_tokenizer(), seed=0, vocab_size=300)


def _printed(preview: PreviewData, **options: Any) -> str:
    stream = io.StringIO()
    Console(file=stream, width=100, **options).print(render_preview(preview))
    return stream.getvalue()


def test_shown_tokens_are_the_prepared_ones(tmp_path: Path) -> None:
    preview = _preview(tmp_path)
    data = build(section(tmp_path / "rows.jsonl"), byte_tokenizer(), seed=0, vocab_size=300)
    for shown, row in zip(preview.rows, data.train, strict=True):
        assert [token.token_id for token in shown.tokens] == row.input_ids.tolist()
        assert [token.trained for token in shown.tokens] == row.trained.tolist()
        assert shown.trained == row.trained.sum()
    text = "".join(token.text for token in preview.rows[0].tokens)
    assert text == "<|im_start|>user\na [b] <c><|im_end|>\n<|im_start|>assistant\nX é🙂 & \x1b[31m<|im_end|>\n"


def test_without_colours_trained_text_stands_in_brackets(tmp_path: Path) -> None:
    printed = _printed(_preview(tmp_path))
    assert "⟦X é🙂 & \\x1b[31m<|im_end|>⟧" in printed
    assert "\x1b" not in printed
    assert "a [b] <c>" in printed
    assert "answers end with <|im_end|>: trained yes" in printed
    assert "rows.jsonl:1" in printed
    assert re.search(r"Lengths: median \d+, longest \d+ of 2,048 tokens", printed)


def test_with_colours_there_are_no_brackets(tmp_path: Path) -> None:
    printed = _printed(_preview(tmp_path), force_terminal=True, color_system="standard")
    assert "⟦" not in printed
    assert "\x1b[1;32mX é🙂 & \\x1b[31m<|im_end|>\x1b[0m" in printed
    assert "\x1b[31m" not in printed  # the row's own escape codes do not reach the terminal


def test_rows_that_are_cut_say_so(tmp_path: Path) -> None:
    preview = _preview(tmp_path, max_length=60)
    assert preview.rows[1].cut_at == 60
    assert "more tokens are beyond data.max_length" in _printed(preview)


def test_preference_rows_are_shown_in_pairs(tmp_path: Path) -> None:
    preview = _preview(tmp_path, [{"prompt": "a", "chosen": "good", "rejected": "bad"}])
    printed = _printed(preview)
    assert [row.title.rsplit(" ", 1)[1] for row in preview.rows] == ["chosen", "rejected"]
    assert "⟦good<|im_end|>⟧" in printed
    assert "⟦bad<|im_end|>⟧" in printed
    assert "objective.name is sft, which does not train preference rows" in printed


def test_warnings_are_shown(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": TURNS}])
    tokenizer = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    preview = preview_rows(section(path), tokenizer, seed=0)
    assert "NOT TRAINED" in _printed(preview)
    write_preview_html(preview, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "NOT TRAINED" in page
    assert 'class="line no"' in page


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tokens: list[tuple[str, str, str]] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self._inside: tuple[str, str] | None = None

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        found = dict(attributes)
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self.loads += [value or "" for key, value in attributes if key in ("src", "href")]
        if tag == "span" and (found.get("title") or "").startswith("id "):
            self._inside = (found["title"] or "", found.get("class") or "")

    def handle_data(self, data: str) -> None:
        if self._inside is not None:
            self.tokens.append((*self._inside, data))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        self._inside = None


def test_the_page_stands_alone_and_shows_every_token_with_its_id(tmp_path: Path) -> None:
    preview = _preview(tmp_path)
    write_preview_html(preview, tmp_path / "page.html")
    source = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = _Page()
    page.feed(source)
    assert page.open == []
    assert page.loads == []
    assert "<script" not in source
    assert "prefers-color-scheme: dark" in source
    tokens = [token for row in preview.rows for token in row.tokens if token.text]
    assert [title for title, _, _ in page.tokens] == [
        f"id {token.token_id}, {'trained' if token.trained else 'not trained'}" for token in tokens
    ]
    assert [kind == "t" for _, kind, _ in page.tokens] == [token.trained for token in tokens]
    assert "".join(text for _, _, text in page.tokens).replace("⏎", "") == "".join(token.text for token in tokens)


@pytest.mark.parametrize("lengths", [[5], [1, 2, 3], list(range(1, 1000)), [7] * 40])
def test_the_histogram_counts_every_row(lengths: list[int]) -> None:
    import numpy as np

    classes = histogram(np.array(lengths))
    assert sum(rows for _, _, rows in classes) == len(lengths)
    assert len(classes) <= 10
    assert classes[0][0] == min(lengths)
