"""From what a handler did to what happens next. Pure.

Messages that go to a retry or dead-letter subject, and what goes with them.
"""

from __future__ import annotations

import enum
import traceback
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from inturn.consumer.context import Context
from inturn.model.batch import Batch, encode
from inturn.model.errors import HandlerError
from inturn.model.message import Message, Outgoing
from inturn.model.result import Result, ResultKind, Suspend
from inturn.model.routing import slot_of
from inturn.model.settings import ConsumerSettings, Strategy

TRACEBACK_LINES_MAX = 20


class Next(enum.Enum):
    DONE = enum.auto()  # done, go on
    PASS = enum.auto()  # go on; with the next commit if something before it waits for one, else done
    KEEP = enum.auto()  # handled, but to be repeated if a rollback comes: go on
    REPEAT = enum.auto()  # the same again, later
    ROLLBACK = enum.auto()  # everything since the last commit again, later
    MOVE = enum.auto()  # to the retry subject, then go on


@dataclass(frozen=True, slots=True)
class Outcome:
    next: Next
    kind: ResultKind
    wait_s: float = 0.0  # 0: as the number of failures says
    error: BaseException | None = None


DONE = Outcome(Next.DONE, ResultKind.SUCCESS)
KEEP = Outcome(Next.KEEP, ResultKind.SUCCESS)
_ALLOWED = ("None", "Result.SUCCESS", "suspend(seconds)", "and with ack='manual' Result.COMMIT, Result.ROLLBACK")


def of_return(returned: object, context: Context, settings: ConsumerSettings, handler_name: str) -> Outcome:
    if isinstance(returned, Suspend):
        return Outcome(Next.REPEAT, ResultKind.FAILED, returned.for_s)
    if settings.ack == "auto":
        if returned is None or returned is Result.SUCCESS:
            return DONE
    else:
        match returned:
            case Result.COMMIT:
                return DONE
            case Result.SUCCESS:
                return DONE if context.is_acknowledged else KEEP
            case Result.ROLLBACK:
                return Outcome(Next.ROLLBACK, ResultKind.FAILED, settings.suspend_s)
            case None if context.is_acknowledged:
                return DONE
            case None if settings.strategy is Strategy.BEST_EFFORT:
                return Outcome(Next.PASS, ResultKind.NOTHING)
            case None:
                return Outcome(Next.REPEAT, ResultKind.NOTHING, settings.suspend_s)
    return _failed(ResultKind.INVALID, HandlerError(handler_name, returned, _ALLOWED), settings)


def of_exception(error: BaseException, settings: ConsumerSettings) -> Outcome:
    return _failed(ResultKind.EXCEPTION, error, settings)


def _failed(kind: ResultKind, error: BaseException, settings: ConsumerSettings) -> Outcome:
    if settings.strategy is Strategy.BEST_EFFORT:
        return Outcome(Next.MOVE, kind, 0.0, error)
    return Outcome(Next.REPEAT, kind, 0.0, error)


def is_printable(error: BaseException | None) -> bool:
    """Whether somebody's exception says anything when asked, instead of raising another one."""
    try:
        str(error), repr(error)
    except Exception:
        return False
    return True


def text_of(error: BaseException) -> str:
    """What to tell of an error, in characters that can be stored everywhere."""
    name = type(error).__name__
    text = f"{name}: {error}" if is_printable(error) else name
    return text.encode(errors="backslashreplace").decode()


def traceback_of(error: BaseException | None) -> str:
    """The last lines of where it was raised."""
    if error is None:
        return ""
    text = "".join(traceback.format_exception(error, limit=-TRACEBACK_LINES_MAX))
    return text.encode(errors="backslashreplace").decode()


# Properties of such a message. Producers refuse names that begin with `%`, so these are ours alone.
ATTEMPTS = "%attempts"  # how often it failed so far
SUBJECT = "%subject"  # where it stood first
PARTITION = "%partition"
OFFSET = "%offset"


def past_attempts(message: Message) -> int:
    text = message.properties.get(ATTEMPTS, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def moved_batch(messages: Sequence[Message], attempts: Sequence[int]) -> Batch:
    """The messages as they are stored in the retry or dead-letter subject, each with how often it failed."""
    slots = array("H", [0 if message.key is None else slot_of(message.key) for message in messages])
    return encode([_moved(message, count) for message, count in zip(messages, attempts, strict=True)], slots)


def _moved(message: Message, attempts: int) -> Outgoing:
    origin = {SUBJECT: message.subject, PARTITION: str(message.partition), OFFSET: str(message.offset)}
    properties = origin | message.properties | {ATTEMPTS: str(attempts)}
    return Outgoing(message.body, message.key, message.born_at_ms, message.tags, properties, message.message_id)
