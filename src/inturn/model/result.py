"""The results that a handler may return, and the kinds of results that hooks and statistics report."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from inturn.model.errors import InvalidInput

SUSPEND_MIN_S = 0.01
SUSPEND_MAX_S = 30.0
SUSPEND_DEFAULT_S = 1.0


class Result(enum.Enum):
    """The result of a handler. With automatic acknowledgement, `None` and SUCCESS mean the same.

    With `ack="manual"`: SUCCESS means handled and uncommitted, COMMIT commits all messages up to this message,
    ROLLBACK repeats all messages since the last COMMIT. `suspend(seconds)` repeats this message later.
    """

    SUCCESS = "success"
    COMMIT = "commit"
    ROLLBACK = "rollback"


@dataclass(frozen=True, slots=True)
class Suspend:
    """Repeat the message after this time; later messages of its lane wait."""

    for_s: float


def suspend(for_s: float = SUSPEND_DEFAULT_S) -> Suspend:
    """A result that repeats the message after `for_s` seconds (0.01 to 30)."""
    if not isinstance(for_s, int | float) or not SUSPEND_MIN_S <= for_s <= SUSPEND_MAX_S:
        raise InvalidInput(f"suspend({for_s!r}): the time must be {SUSPEND_MIN_S} to {SUSPEND_MAX_S:g} seconds")
    return Suspend(float(for_s))


class ResultKind(enum.StrEnum):
    """The outcome of one handler call, as hooks and statistics report the outcome."""

    SUCCESS = "success"
    FAILED = "failed"  # the handler requested a repeat: suspend, rollback
    EXCEPTION = "exception"
    NOTHING = "nothing"  # manual acknowledgement, and the handler acknowledged no message
    INVALID = "invalid"  # the handler returned a value that is no result
    TIMEOUT = "timeout"  # the handler succeeded, but took longer than `handler_timeout_s`
