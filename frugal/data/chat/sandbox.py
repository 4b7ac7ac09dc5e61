"""Compiles and runs chat templates from downloads: Jinja's sandbox, with a limit on time and on the printed size.

The environment has what chat templates expect from transformers (`tojson`, `raise_exception`, `strftime_now`,
`namespace`, loop controls, `{% generation %}`), so that text rendered here equals text rendered at inference. A
template is code of a stranger: attributes are checked by Jinja's sandbox, and every loop turn and every call looks at
the clock.
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
"""Longest text that a template may print."""

_TEMPLATE_FAULTS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


class TemplateRefused(Exception):
    """The template could not render this conversation. The text is the reason, for people."""


class TemplateLimit(TemplateRefused):
    """The template ran too long, printed too long a text, or tried what the sandbox forbids."""


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
    """Jinja's sandbox with a deadline that every loop turn and every call looks at."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.deadline = float("inf")
        self.filters["tojson"] = _tojson
        self.globals.update(
            raise_exception=_raise_exception,
            _tick=self.tick,
        )

    def tick(self) -> str:
        """Stop the rendering when its time is over; prints nothing."""
        if time.monotonic() > self.deadline:
            raise TemplateLimit(f"it ran longer than {MAX_SECONDS:g} s (an endless loop?)")
        return ""

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Jinja names these with two underscores so that a template may call with any keyword.
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        """The template with a look at the clock in every loop turn, macro and block."""
        tree = super()._parse(source, name, filename)
        loops: list[Any] = list(tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)))
        for loop in loops:
            call = nodes.Call(nodes.Name("_tick", "load"), [], [], None, None)
            loop.body.insert(0, nodes.Output([call]).set_lineno(loop.lineno))
        tree.set_environment(self)
        return tree


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """JSON as transformers' templates expect it: no HTML escapes, key order kept."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class CompiledTemplate:
    """One template, compiled once."""

    def __init__(self, source: str, name: str, clock: datetime | None = None) -> None:
        """``name`` is for messages. ``clock``: what `strftime_now` prints; None: the time of each rendering. Raises
        DataError when the text is no Jinja template."""
        self.source = source
        self.name = name
        self.clock = clock
        self.reads_clock = False
        """A rendering asked for the time."""
        self._environment = _Environment()
        self._environment.globals["strftime_now"] = self._strftime_now
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateSyntaxError as fault:
            raise DataError(
                f"The chat template {name} is not valid Jinja: line {fault.lineno}: {fault.message}. "
                "Correct the template, or set data.chat_template to a named one."
            ) from None
        self.marks_generation = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None

    def _strftime_now(self, pattern: str) -> str:
        self.reads_clock = True
        return (self.clock or datetime.now()).strftime(pattern)

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
        except MemoryError:
            raise TemplateLimit("it builds a text larger than the memory") from None
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
