"""What a handler answers, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inturn.model.errors import InvalidInput

SUSPEND_MIN_S = 0.01
SUSPEND_MAX_S = 30.0
SUSPEND_DEFAULT_S = 1.0


class Result(enum.Enum):
    """`None` and SUCCESS mean the same where acknowledging is automatic.

    With `ack="manual"`: SUCCESS is handled but not committed yet, COMMIT commits all up to here,
    ROLLBACK repeats everything since the last COMMIT. `suspend(seconds)` repeats this message later.
    """

    SUCCESS = "success"
    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Suspend:
    """Repeat the message after this time; what must stay behind it waits."""

    for_s: float


def suspend(for_s: float = SUSPEND_DEFAULT_S) -> Suspend:
    """A result that repeats the message after `for_s` seconds (0.01 to 30)."""
    if not isinstance(for_s, int | float) or not SUSPEND_MIN_S <= for_s <= SUSPEND_MAX_S:
        raise InvalidInput(f"suspend({for_s!r}): the time must be {SUSPEND_MIN_S} to {SUSPEND_MAX_S:g} seconds")
    return Suspend(float(for_s))


class ResultKind(enum.StrEnum):
    """What hooks and statistics are told about one call of a handler."""

    SUCCESS = "success"
    FAILED = "failed"  # it asked for a repeat: suspend, rollback
    EXCEPTION = "exception"
    NOTHING = "nothing"  # manual acknowledgement, and none came
    INVALID = "invalid"  # it returned something that is no result
    TIMEOUT = "timeout"  # it succeeded, but took longer than `handler_timeout_s`
