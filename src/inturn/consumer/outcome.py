"""The outcome of a handler call: from the returned value or the exception to the next step. Also the batches of
messages that go to a retry or dead-letter subject. Pure functions."""

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
    DONE = enum.auto()  # finished; go on
    PASS = enum.auto()  # go on; uncommitted if messages before are uncommitted, else finished
    KEEP = enum.auto()  # handled and uncommitted, repeated after a rollback; go on
    REPEAT = enum.auto()  # the same messages again, later
    ROLLBACK = enum.auto()  # all messages since the last commit again, later
    MOVE = enum.auto()  # move to the retry subject, then go on


@dataclass(frozen=True, slots=True)
class Outcome:
    next: Next
    kind: ResultKind
    wait_s: float = 0.0  # 0: the backoff by the number of failures
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
    """Whether `str` and `repr` of the exception work; a user's exception class may raise in them."""
    try:
        str(error), repr(error)
    except Exception:
        return False
    return True


def text_of(error: BaseException) -> str:
    """The text of an error, in characters that can be stored everywhere."""
    name = type(error).__name__
    text = f"{name}: {error}" if is_printable(error) else name
    return text.encode(errors="backslashreplace").decode()


def traceback_of(error: BaseException | None) -> str:
    """The last lines of the traceback."""
    if error is None:
        return ""
    text = "".join(traceback.format_exception(error, limit=-TRACEBACK_LINES_MAX))
    return text.encode(errors="backslashreplace").decode()


# Properties of a moved message. Producers refuse names that begin with `%`, so these names are reserved.
ATTEMPTS = "%attempts"  # the number of failures so far
SUBJECT = "%subject"  # the original subject
PARTITION = "%partition"
OFFSET = "%offset"


def past_attempts(message: Message) -> int:
    text = message.properties.get(ATTEMPTS, "0")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


def moved_batch(messages: Sequence[Message], attempts: Sequence[int]) -> Batch:
    """The messages as stored in the retry or dead-letter subject, with the number of failures as a property."""
    slots = array("H", [0 if message.key is None else slot_of(message.key) for message in messages])
    return encode([_moved(message, count) for message, count in zip(messages, attempts, strict=True)], slots)


def _moved(message: Message, attempts: int) -> Outgoing:
    origin = {SUBJECT: message.subject, PARTITION: str(message.partition), OFFSET: str(message.offset)}
    properties = origin | message.properties | {ATTEMPTS: str(attempts)}
    return Outgoing(message.body, message.key, message.born_at_ms, message.tags, properties, message.message_id)
