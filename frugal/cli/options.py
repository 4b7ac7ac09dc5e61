"""What all commands share: options, one message for what a user can cause, files that options name."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, TypeVar

import typer

from frugal.errors import EXIT_INTERRUPTED, ConfigError, FrugalError, ProcessLost

P = ParamSpec("P")
R = TypeVar("R")

HELP: dict[str, Any] = {"help_option_names": ["-h", "--help"]}
# a word that is no option reaches load_config, whose message shows how an override is written
OVERRIDES: dict[str, Any] = {**HELP, "ignore_unknown_options": True}


def group(about: str) -> typer.Typer:
    """Help without boxes (readable in logs and in every locale), no shell completion, Python's own tracebacks."""
    return typer.Typer(
        help=about,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        no_args_is_help=True,
        add_completion=False,
        context_settings=HELP,
    )


ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG", help="YAML file; `frugal configs list` shows ready ones.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.SUB=VALUE", help="Override keys of the file.", show_default=False),
]
Base = Annotated[str | None, typer.Option(help="The base model, when it lies elsewhere than the run noted.")]
AllowOtherBase = Annotated[bool, typer.Option("--allow-other-base", help="Use a base whose weights are not the run's.")]
TrustRemoteCode = Annotated[bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the base.")]
BaseWeights = Annotated[
    Literal["dequantized", "original"] | None,
    typer.Option(
        help="Add the adapter to the weights it was trained over (the default when they were quantised), "
        "or to the original ones.",
        show_default=False,
    ),
]
RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished run, or one of its checkpoints.")]


def handled(command: Callable[P, R]) -> Callable[P, R]:
    """A command whose user errors are one message on stderr and an exit code, without a traceback."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except FrugalError as error:
            print(f"error: {error}", file=sys.stderr)
            if isinstance(error, ProcessLost):
                _leave_at_once(error.exit_code)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:  # `frugal preview ... | head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None

    return run


def _leave_at_once(exit_code: int) -> None:
    """End this process without the interpreter's end where it has used a GPU: that waits for the device, and the device
    for the process that is lost."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)


def format_options(to: str, kind: str | None, weights: str | None, *, proof: bool) -> dict[str, Any]:
    """Options of an export format from those of the command line; raises ConfigError for one that it does not have."""
    dtypes = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
    if to == "merged":
        if kind is not None and kind.lower() not in dtypes:
            raise ConfigError(f"--type {kind}: a merged model is {', '.join(dtypes)}. Other types need --to gguf.")
        return {"weights": weights, "dtype": None if kind is None else dtypes[kind.lower()]}
    if weights is not None and to != "gguf":
        raise ConfigError(f"--base-weights is for --to merged and gguf; --to {to} writes no base weights.")
    if to == "adapter":
        if kind is not None:
            raise ConfigError("--type: an adapter is written as it was trained; leave it out.")
        return {}
    options: dict[str, Any] = {"proof": proof, **({} if kind is None else {"type": kind})}
    return {**options, "weights": weights} if to == "gguf" else options


def takes_file(path: Path, option: str) -> None:
    """Raise ConfigError unless a file can be written at ``path``, which ``option`` names."""
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir():
        raise ConfigError(f"{option} {path}: no folder to write to, or a folder itself. Name a file.")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: {folder} may not be written to. Name a file in another folder.")


@contextlib.contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """A file that an option names: a place that takes none is said before the work, a failed write after it."""
    takes_file(path, option)
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: cannot be written ({error.strerror})") from None


def imported(module: str, name: str) -> Any:
    """A name of a module that is heavy to import."""
    return getattr(importlib.import_module(module), name)
