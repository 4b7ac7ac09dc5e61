"""Talk to a run: one answer, or a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from frugal.errors import FrugalError
from frugal.inference.generate import Messages, answer, as_messages
from frugal.inference.load import LoadedRun, load_run

HELP = "Type a message. /reset starts anew, /quit or Ctrl-D leaves, Ctrl-C stops an answer."


def chat(
    run: str | Path | LoadedRun,
    prompt: str | None = None,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    echo: bool = False,
    **options: Any,
) -> str | None:
    """Talk to a run. With ``prompt``: one answer, returned. Without: a conversation in the terminal, returns None.

    Args:
        run: what `load_run` takes, or a run that is loaded already.
        temperature: 0 answers greedily, the same each time.
        echo: print the answer to ``prompt`` while it is generated.
        options: as `load_run` takes them.
    """
    loaded = run if isinstance(run, LoadedRun) else load_run(run, **options)
    if prompt is not None:
        write = _print_piece if echo else None
        text = loaded.answer(prompt, max_new_tokens=max_new_tokens, temperature=temperature, write=write)
        if echo:
            print()
        return text
    chat_loop(loaded, max_new_tokens=max_new_tokens, temperature=temperature)
    return None


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def chat_loop(
    loaded: LoadedRun,
    *,
    max_new_tokens: int = 256,
    temperature: float = 0.0,
    source: TextIO | None = None,
    out: TextIO | None = None,
) -> None:
    """A conversation: streams each answer, keeps the turns. Ctrl-C stops an answer, end of input leaves."""
    source, out = source or sys.stdin, out or sys.stdout
    config = loaded.generation_config(max_new_tokens, temperature)

    def write(text: str) -> None:
        out.write(text)
        out.flush()

    start: Messages = as_messages("", loaded.system_prompt)[:-1]
    messages = list(start)
    write(f"{HELP}\n")
    while True:
        line = _ask(source, write)
        if line is None or line == "/quit":
            write("\n" if line is None else "")
            return
        if line == "/reset":
            messages = list(start)
            write("The conversation starts anew.\n")
            continue
        if not line:
            continue
        if line.startswith("/"):
            write(f"{HELP}\n")
            continue
        messages.append({"role": "user", "content": line})
        try:
            text, stopped = answer(loaded.model, loaded.tokenizer, messages, config, write, clock=loaded.clock)
        except FrugalError as error:
            messages.pop()
            write(f"{error}\n")
            continue
        write(" [stopped]\n" if stopped else "\n")
        messages.append({"role": "assistant", "content": text.strip()})


def _ask(source: TextIO, write: Callable[[str], None]) -> str | None:
    """The next line, stripped; None at the end of input. Ctrl-C while typing only clears the line."""
    while True:
        try:
            if source is sys.stdin and source.isatty():
                return input("> ").strip()  # line editing and history where the terminal has them
            write("> ")
            line = source.readline()
            return line.strip() if line else None
        except EOFError:
            return None
        except KeyboardInterrupt:
            write("\n(/quit or Ctrl-D leaves)\n")
