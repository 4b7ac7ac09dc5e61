"""Keys that change what a row means: the row's format uses them, or the row is refused. They are never skipped."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from frugal.data.rows import RowError, kind_of, shorten

VERDICTS = (
    *("label", "kto_tag", "kto_label", "desirable", "is_chosen"),
    *("chosen", "rejected", "chosen_messages", "rejected_messages", "rejected_response", "chosen_response"),
    *("score", "scores", "rating", "reward"),
)
"""What says how good an answer is, or holds a bad one."""
MEDIA = ("image", "images", "image_url", "audio", "audios", "video", "videos")
SWITCHES = ("train", "weight", "loss_weight", "loss", "sample_weight")
"""1/true: trained, 0/false: not."""
_WORDS = {"true": True, "1": True, "1.0": True, "false": False, "0": False, "0.0": False}
REASONING = ("reasoning_content", "thinking", "reasoning")
CONTEXT = ("tools", "functions", "system", "system_prompt", "history", *REASONING)
"""What the model sees or writes beside the question and the answer; a format that does not read one refuses it."""

IGNORE = "If it says nothing about the answer, name it: `ignore_columns: [{key}]` beside the source's path."
BLIND = "To train the text all the same: `ignore_columns: [{key}]` beside the source's path."


def is_empty(value: Any) -> bool:
    """Null, NaN, an empty text (also the JSON of an empty list), list or object."""
    if isinstance(value, float):
        return math.isnan(value)
    return value is None or (isinstance(value, (str, list, tuple, dict)) and value in ("", "[]", "{}", [], {}, ()))


def refuse_unused(values: dict[str, Any], used: Collection[str], where: str = "") -> None:
    """Raise RowError for a key of a row (or of a turn, named by ``where``) that changes its meaning and is not used."""
    for key, value in values.items():
        if key in used:
            continue
        if key in MEDIA and (isinstance(value, dict) or not is_empty(value)):
            what = "pictures, sound or video" if not where else f"pictures, sound or video, {where}"
            raise RowError(f"`{key}` holds {what}: only text is trained", BLIND.format(key=key))
        if is_empty(value):
            continue
        if key in VERDICTS:
            raise RowError(
                f"`{key}` says how good an answer is, or holds a bad one{where and f' ({where})'}", _way(key)
            )
        if key in CONTEXT:
            place = f"in {where}" if where else "in rows of this format"
            raise RowError(f"`{key}` is not read {place}", f"set `format`, rename it, or {IGNORE[3:].format(key=key)}")


def _way(key: str) -> str:
    return (
        "`frugal train` learns every answer as a good one (objective sft). Keep the good rows and take the key out; "
        "`chosen` and `rejected` answers are trained as pairs (`format: preference`, objective.name: dpo), true/false "
        "verdicts on single answers as `prompt`, `completion` and `label` with objective.name: kto"
        + (f" (`columns: {{label: {key}}}`)" if key in VERDICTS[1:5] else "")
        + ". "
        + IGNORE.format(key=key)
    )


def switch_of(values: dict[str, Any], what: str, where: str = "") -> bool | None:
    """Whether a row or turn is to be trained, by its own switches; None when it has none.

    Raises:
        RowError: a value between 0 and 1 or beyond, another type, or switches that contradict one another.
    """
    found: dict[str, bool] = {}
    for key in SWITCHES:
        value = values.get(key)
        if is_empty(value):
            continue
        if isinstance(value, str):  # CSV
            value = _WORDS.get(value.strip().lower(), value)
        if not isinstance(value, (bool, int, float)) or value not in (0, 1):
            got = f"got {value:g}" if isinstance(value, (int, float)) else f"got {kind_of(value)}"
            raise RowError(f"`{key}` of {what} is neither 0/1 nor true/false", f"{where}, {got}" if where else got)
        found[key] = bool(value)
    if len(set(found.values())) > 1:
        raise RowError(f"switches of {what} contradict one another", f"{where}: {', '.join(found)}".lstrip(": "))
    return next(iter(found.values()), None)


def verdict_of(value: Any, key: str) -> bool:
    """A row's verdict on its answer.

    Raises:
        RowError: neither true/false nor 0/1.
    """
    said = _WORDS.get(value.strip().lower(), value) if isinstance(value, str) else value  # CSV
    if not isinstance(said, (bool, int, float)) or said not in (0, 1):
        got = f"got {said:g}" if isinstance(said, (int, float)) else f"got {kind_of(said)}"
        raise RowError(
            f"`{key}` says how good an answer is, and is neither true/false nor 0/1", f"{got}. {IGNORE.format(key=key)}"
        )
    return bool(said)


def ignored_keys(values: dict[str, Any], used: Collection[str]) -> list[str]:
    """Keys with a value that nobody reads, as they may be shown."""
    return [shorten(key).strip("'\"") for key, value in values.items() if key not in used and not is_empty(value)]
