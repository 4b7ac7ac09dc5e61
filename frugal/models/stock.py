"""Stock transformers' own loading of a model, without its progress bars: what frugal shows is one line a phase."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM
from transformers.utils import logging


@contextlib.contextmanager
def no_progress_bars() -> Iterator[None]:
    """Turn transformers' progress bars off, and on again where they were on."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def load_stock(source: str | Path, **options: Any) -> Any:
    """`AutoModelForCausalLM.from_pretrained`: the model, or with `output_loading_info` the model and what it says."""
    with no_progress_bars():
        return AutoModelForCausalLM.from_pretrained(source, **options)
