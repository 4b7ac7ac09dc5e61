"""What was decided about one thing of a run, and why: the only type for it, written to the run's manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class Decision(Generic[T]):
    """One outcome: of an `auto` in the configuration, or of the choice among implementations."""

    key: str
    """What was decided: a configuration key (`memory.checkpoint`), or the name of an operation (`op rms_norm`)."""
    value: T
    reason: str
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Each alternative that was passed over, and why."""

    def to_json(self) -> dict[str, Any]:
        """Plain values: `{"chosen": ..., "why": ..., "rejected": ...}`; empty parts left out."""
        plain = (
            self.value
            if isinstance(self.value, str | int | float | bool | None)
            else str(self.value).removeprefix("torch.")
        )
        found: dict[str, Any] = {"chosen": plain, "why": self.reason, "rejected": dict(self.rejected)}
        return {key: value for key, value in found.items() if key == "chosen" or value}
