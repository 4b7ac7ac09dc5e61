"""YAML reading on its own: lines, what is refused, and text that is hostile."""

import contextlib
import random

import pytest

from frugal.config.yaml import YamlError, parse, read_number


def test_lines_of_keys_and_entries() -> None:
    document = parse("# comment\na:\n  b: 1\n  c:\n    - x\n    - y: 2\n")
    assert document.tree == {"a": {"b": "1", "c": ["x", {"y": "2"}]}}
    assert document.lines[("a",)] == 2
    assert document.lines[("a", "b")] == 3
    assert document.lines[("a", "c", 1)] == 6
    assert document.lines[("a", "c", 1, "y")] == 6


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-3", -3),
        ("0", 0),
        ("0o10", 8),
        ("0x1F", 31),
        ("1e3", 1000.0),
        ("1.", 1.0),
        (".5e-2", 0.005),
        ("1_000", None),
        ("12:30", None),
        ("", None),
        ("e5", None),
        ("1e", None),
        ("0b11", None),
        ("٣", None),
    ],
)
def test_numbers(text: str, value: float | None) -> None:
    assert read_number(text) == value
    assert type(read_number(text)) is type(value)


@pytest.mark.parametrize("text", ["010", "-007", ".inf", "-.INF", ".nan", "1e999"])
def test_numbers_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"zero|finite"):
        read_number(text)


def test_only_unquoted_nulls_are_nothing() -> None:
    words = "[null, ~, 'null', '~', '', true, no, 1e-4, 010, text]"
    assert parse(words).tree == [None, None, "null", "~", "", "true", "no", "1e-4", "010", "text"]
    assert parse("a:\nb: ~\n").tree == {"a": None, "b": None}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\n---\nb: 2\n", "line 2: a second document starts here"),
        ("a: b: c\n", "line 1: a `:` in an unexpected place"),
        ("a:\n  b: 1\n c: 2\n", "line 3: indented differently"),
        ("a: 1\nb\n", "line 2|line 3"),
        ("a: 'open\n", "line 2"),
        ("a: [1, 2\n", "line 2"),
        ("a: &x [*x]\n", "line 1: an anchor that contains itself"),
        ("a: *nowhere\n", "line 1: .*nowhere"),
        ("a: \x07\n", "line 1: the character"),
        ("[" * 5000, "nested too deeply|line"),
    ],
)
def test_what_is_no_yaml(text: str, message: str) -> None:
    with pytest.raises(YamlError, match=message):
        parse(text)


def test_aliases_of_aliases_do_not_explode() -> None:
    bomb = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 9)
    )
    with pytest.raises(YamlError, match="more than"):
        parse(bomb)


def test_tags_are_not_executed() -> None:
    document = parse("a: !!python/object/apply:os.system ['echo']\nb: !!int '3'\n")
    assert [(fault.line, "is not read" in fault.message) for fault in document.faults] == [(1, True), (2, True)]


def test_duplicate_in_a_nested_place_names_both_lines() -> None:
    document = parse("a:\n  b: 1\n  c: 2\n  b: 3\n")
    assert document.tree == {"a": {"b": "1", "c": "2"}}
    assert document.faults[0].path == ("a", "b")
    assert "in line 2 and again in line 4" in document.faults[0].message


def test_random_text_raises_nothing_else() -> None:
    rng = random.Random(0)
    alphabet = "ab:  \n\n-[]{}&*!|>'\"#%@`,?~<=\t01.e\u00e9\U0001f600"
    for _ in range(3000):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40)))
        with contextlib.suppress(YamlError):
            parse(text)
