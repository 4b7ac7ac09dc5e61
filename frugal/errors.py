"""What a user can cause. Each error carries one message that says what was got, what is allowed and how to fix it.

The command line prints the message alone and leaves with ``exit_code``; a traceback is kept for faults of our own.
"""

from __future__ import annotations

EXIT_USER_ERROR = 2  # configuration, data or paths: fix the input and run again
EXIT_PROCESS_LOST = 75  # another process of the run has ended (EX_TEMPFAIL of sysexits.h): `--resume` goes on
EXIT_INTERRUPTED = 130  # Ctrl-C (128 + SIGINT): a checkpoint was saved, `--resume` goes on
EXIT_TERMINATED = 143  # SIGTERM (128 + SIGTERM): the same, sent by a scheduler


class FrugalError(Exception):
    """Base of all errors that a user can cause."""

    exit_code: int = EXIT_USER_ERROR


class ConfigError(FrugalError):
    """The configuration is wrong: an unknown key, a value out of range, or settings that exclude each other."""


class DataError(FrugalError):
    """A data file or row cannot be used. Messages name ``file:line`` and never quote the row's text."""


class ModelError(FrugalError):
    """The base model or tokenizer is missing, incomplete or unusable as asked."""


class UnsupportedError(FrugalError):
    """What was asked for is not possible here (device, dtype, model family). The message names the way out."""


class CheckpointError(FrugalError):
    """A checkpoint or run folder is missing, incomplete, of another run, or cannot be written."""


class MemoryBudgetError(FrugalError):
    """The run cannot fit the memory it was given. The message says what would fit."""


class ProcessLost(FrugalError):
    """Another process of the run has ended, stopped with an error, or does not answer. The message names it."""

    exit_code = EXIT_PROCESS_LOST


class Interrupted(FrugalError):
    """The run was asked to stop and saved what it had. ``exit_code`` is 130 for Ctrl-C and 143 for SIGTERM."""

    def __init__(self, message: str, exit_code: int = EXIT_INTERRUPTED) -> None:
        super().__init__(message)
        self.exit_code = exit_code
