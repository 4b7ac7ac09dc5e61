"""Compiles and runs chat templates from downloads: sandboxed Jinja, with a limit on time and on size.

The environment has what chat templates expect from transformers (`tojson`, `raise_exception`, `strftime_now`,
`namespace`, loop controls, `{% generation %}`), so that text rendered here equals text rendered at inference. A
template is code of a stranger: attributes are checked by Jinja's sandbox, every loop turn and every macro call looks
at the clock, and every operation that can make a long text looks at its size first.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from frugal.errors import DataError

MAX_SECONDS = 10.0
"""Longest rendering of one conversation. Real templates take well under a millisecond a turn."""
MAX_CHARACTERS = 64_000_000
"""Longest text that a template may build, rendered or in between."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)
_WIDE_FORMAT = re.compile(r"\d{7,}")
_PADDING = {"ljust", "rjust", "center", "zfill", "expandtabs", "indent"}


class TemplateRefused(Exception):
    """The template could not render this conversation. The text is the reason, for people."""


class TemplateLimit(TemplateRefused):
    """The template ran too long or built too long a text."""


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}`: wraps what it encloses in two marks that the caller cuts out."""

    tags = {"generation"}  # noqa: RUF012 - Jinja declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_wrap"), [], [], body).set_lineno(line)

    def _wrap(self, caller: Any) -> str:
        return f"{GENERATION_OPEN}{caller()}{GENERATION_CLOSE}"


# Private-use characters of plane 16: no tokenizer's vocabulary and no sensible data hold them; `clean` removes them.
GENERATION_OPEN = "\U0010f000"
GENERATION_CLOSE = "\U0010f001"


class _Environment(ImmutableSandboxedEnvironment):
    """Sandbox whose operations are bounded."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.deadline = float("inf")
        self.filters["tojson"] = _tojson
        for name in ("center", "indent", "replace", "join", "format"):
            self.filters[name] = _bounded_filter(name, self.filters[name])
        self.globals.update(
            raise_exception=_raise_exception,
            strftime_now=_strftime_now,
            dict=_dict,
            namespace=_Namespace,
            _tick=self.tick,
            _join=self.join_texts,
        )

    def tick(self) -> str:
        """Called by every loop turn and macro call."""
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it ran longer than {MAX_SECONDS:g} s (an endless loop?)")
        return ""

    def join_texts(self, *parts: Any) -> str:
        """The `~` operator."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, (str, list, tuple)) and isinstance(other, int):
                    _check_size(len(one) * other)
            if isinstance(left, int) and isinstance(right, int):
                _check_bits(left.bit_length() + right.bit_length())
        elif operator == "+" and isinstance(left, (str, list)) and isinstance(right, (str, list)):
            _check_size(len(left) + len(right))
        elif operator == "%" and isinstance(left, str) and _WIDE_FORMAT.search(left):
            raise TemplateLimit("it formats a text wider than a million characters")
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() * abs(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja names these with two underscores so that a template may call with any keyword.
        __self.tick()
        # Jinja wraps `str.format`; the text that it formats is behind `__wrapped__`.
        owner = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        name = getattr(__obj, "__name__", "")
        if isinstance(owner, str) or name in ("format", "format_map"):
            _check_call(owner, name, args)
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for loop in loops:
            call = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
            loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
        _replace_concat(tree)
        tree.set_environment(self)
        return tree


def _replace_concat(node: nodes.Node) -> None:
    """Turn every `a ~ b` into a call that looks at the size first."""
    for field, value in node.iter_fields():
        items = value if isinstance(value, list) else [value]
        for place, item in enumerate(items):
            if not isinstance(item, nodes.Node):
                continue
            _replace_concat(item)
            if isinstance(item, nodes.Concat):
                call = nodes.Call(nodes.Name("_join", "load"), item.nodes, [], None, None).set_lineno(item.lineno)
                if isinstance(value, list):
                    value[place] = call
                else:
                    setattr(node, field, call)


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateLimit(f"it builds a text of {size:,} characters (at most {MAX_CHARACTERS:,})")


def _check_bits(bits: int) -> None:
    if bits > 100_000:
        raise TemplateLimit("it makes a number of more than 100,000 bits")


def _check_call(owner: Any, name: str, args: tuple[Any, ...]) -> None:
    if name in _PADDING:
        for value in args:
            if isinstance(value, int):
                _check_size(value)
    elif name in ("format", "format_map"):
        if isinstance(owner, str) and _WIDE_FORMAT.search(owner):
            raise TemplateLimit("it formats a text wider than a million characters")
        for value in args:
            if isinstance(value, int) and abs(value) > 10**7:
                raise TemplateLimit("it formats with a width above ten million")
    elif name == "replace" and len(args) > 1 and all(isinstance(value, str) for value in args[:2]):
        _check_size((owner.count(args[0])) * len(args[1]))
    elif name == "join" and args and isinstance(args[0], (list, tuple)):
        _check_size(len(owner) * len(args[0]) + sum(len(part) for part in args[0] if isinstance(part, str)))


def _bounded_filter(name: str, original: Any) -> Any:
    """The filter, refusing sizes before it makes them. Keeps Jinja's marks of what the filter wants passed."""

    def bounded(*args: Any, **kwargs: Any) -> Any:
        values = [value for value in (*args, *kwargs.values()) if not isinstance(value, (Context, nodes.EvalContext))]
        values = [value for value in values if not isinstance(value, jinja2.Environment)]
        if name == "join" and values and isinstance(values[0], (list, tuple)):
            glue = values[1] if len(values) > 1 and isinstance(values[1], str) else ""
            _check_size(len(glue) * len(values[0]))
        elif name == "replace" and len(values) > 2 and all(isinstance(value, str) for value in values[:3]):
            _check_size(values[0].count(values[1]) * len(values[2]))
        elif name == "format" and values and isinstance(values[0], str) and _WIDE_FORMAT.search(values[0]):
            raise TemplateLimit("it formats a text wider than a million characters")
        elif name in ("center", "indent"):
            for value in values[1:]:
                if isinstance(value, int) and not isinstance(value, bool):
                    _check_size(value)
        return original(*args, **kwargs)

    for mark in ("jinja_pass_arg",):
        if hasattr(original, mark):
            setattr(bounded, mark, getattr(original, mark))
    return bounded


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers' templates expect it: no HTML escapes, key order kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace(...)` without names that begin with an underscore."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _check_name(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore, got {name!r}")


class CompiledTemplate:
    """One template, compiled once."""

    def __init__(self, source: str, name: str) -> None:
        """``name`` is for messages. Raises DataError when the text is no Jinja template."""
        self.source = source
        self.name = name
        self._environment = _Environment()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as fault:
            raise DataError(
                f"The chat template {name} is not valid Jinja: line {fault.lineno}: {fault.message}. "
                "Correct the template, or set data.chat_template to a named one."
            ) from None
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    def render(self, **variables: Any) -> str:
        """The rendered text, generation marks still in it. Raises TemplateRefused with the template's own reason."""
        self._environment.deadline = time.monotonic() + MAX_SECONDS
        size, parts = 0, []
        try:
            for part in self._template.generate(**variables):
                size += len(part)
                if size > MAX_CHARACTERS:
                    raise TemplateLimit(f"it prints more than {MAX_CHARACTERS:,} characters")
                parts.append(part)
        except TemplateRefused:
            raise
        except SecurityError as fault:
            raise TemplateLimit(f"it tries something that templates may not do: {fault}") from None
        except RecursionError:
            raise TemplateLimit("its macros call each other without end") from None
        except _TEMPLATE_FAULTS as fault:
            raise TemplateRefused(str(fault) or type(fault).__name__) from fault
        return "".join(parts)


def cut_generation_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """Text without the marks of `{% generation %}`, and the character spans that they enclosed."""
    spans: list[tuple[int, int]] = []
    parts: list[str] = []
    length, begin = 0, 0
    for piece in re.split(f"([{GENERATION_OPEN}{GENERATION_CLOSE}])", text):
        if piece == GENERATION_OPEN:
            begin = length
        elif piece == GENERATION_CLOSE:
            spans.append((begin, length))
        else:
            parts.append(piece)
            length += len(piece)
    return "".join(parts), spans
