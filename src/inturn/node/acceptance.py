"""How a node finds the function for a command, and which commands the node accepts now.

A service is a part of a node with tables of functions by the type of the command. `Dispatcher` joins the tables of all
services. `Admission` refuses commands while the node stops, after the node is closed, and by the state of the node's
broker group.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

from inturn.broker.broker import Broker
from inturn.model.errors import BrokerGroupClosed, Closed, InturnError, InvalidInput, ServerStopping
from inturn.model.settings import BrokerGroupState
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Append,
    Claim,
    Command,
    CreateSubject,
    Fetch,
    Move,
    OpenProducer,
    Pull,
    Read,
    Reply,
)


class Try(enum.Enum):
    """The first try comes from the client and renews leases. Later tries are the node's own and must not renew."""

    FIRST = enum.auto()
    AGAIN = enum.auto()
    LAST = enum.auto()


# Functions by the type of the command.
# Called under the node's lock. None: no answer yet; not allowed for the last try.
AnswerTable: TypeAlias = dict[type[Command], Callable[[Any, Try], Answer | None]]
# Called without the lock. The function calls the reply itself, or raises an InturnError before.
SubmitTable: TypeAlias = dict[type[Command], Callable[[Any, Reply], None]]
# When the passing of time may bring an answer to a command that is held back; None: never.
DueTable: TypeAlias = dict[type[Command], Callable[[Any], float | None]]
# Called without the lock before a command of a client in another process. May raise an InturnError.
RemoteTable: TypeAlias = dict[type[Command], Callable[[Any], None]]
# Wraps the reply: work on the answer outside of the lock.
WrapperTable: TypeAlias = dict[type[Command], Callable[[Any, Reply], Reply]]


def may_wait(wait_s: float, attempt: Try) -> bool:
    """Whether a command with this `wait_s` may be held back at this try."""
    return attempt is not Try.LAST and wait_s > 0


class CommandService:
    """A part of a node that answers some commands. A command without an entry is not answered by the service."""

    @property
    def answers(self) -> AnswerTable:
        return {}

    @property
    def submits(self) -> SubmitTable:
        return {}

    @property
    def due_times(self) -> DueTable:
        return {}

    @property
    def remote_checks(self) -> RemoteTable:
        return {}

    @property
    def wrappers(self) -> WrapperTable:
        return {}


NEW_WORK = Append | OpenProducer | CreateSubject | Acquire | Claim | Pull | Read | Fetch
# The commands of clients that a broker group refuses, by its state.
_REFUSED: dict[BrokerGroupState, tuple[type[Command], ...]] = {
    BrokerGroupState.READ_ONLY: (Append,),
    BrokerGroupState.UNAVAILABLE: (Append, Move, Acquire, Claim, Pull, Read, Fetch),
}


class Admission:
    """Which commands the node accepts: all; no new work while the node stops; none when the node is closed.

    `broker` None: the node has no logs, so no state of a broker group applies.
    """

    def __init__(self, broker: Broker | None) -> None:
        self._broker = broker
        self.is_stopping = False
        self.is_closed = False

    def check(self, command: Command) -> None:
        """Raise Closed, ServerStopping or BrokerGroupClosed for a command that is not accepted now."""
        if self.is_closed:
            raise Closed("node")
        if self.is_stopping and isinstance(command, NEW_WORK):
            raise ServerStopping
        if self._broker is None:
            return
        state = self._broker.state
        if state is not BrokerGroupState.AVAILABLE and isinstance(command, _REFUSED[state]):
            raise BrokerGroupClosed(self._broker.broker_group, state.value)

    @property
    def refusal(self) -> str:
        """Why the node accepts no work; empty if the node accepts work."""
        return "it is closed" if self.is_closed else "it is stopping" if self.is_stopping else ""


def not_for_this_server(command: Command) -> InturnError:
    """The error for a command that no service of the node answers."""
    return InvalidInput(f"{type(command).__name__} is not for this server: it is another part of a cluster, or none")


class Dispatcher:
    """The tables of all services of a node as one. `refusal` makes the error for a command without a service."""

    def __init__(self, admission: Admission, refusal: Callable[[Command], InturnError] = not_for_this_server) -> None:
        self._admission = admission
        self._refusal = refusal
        self._answers: AnswerTable = {}
        self._due_times: DueTable = {}
        self.submits: SubmitTable = {}
        self.remote_checks: RemoteTable = {}
        self.wrappers: WrapperTable = {}

    def add(self, *services: CommandService) -> None:
        for service in services:
            self._answers |= service.answers
            self._due_times |= service.due_times
            self.submits |= service.submits
            self.remote_checks |= service.remote_checks
            self.wrappers |= service.wrappers

    def answer(self, command: Command, attempt: Try) -> Answer | None:
        """None: no answer yet. The last try always returns an answer or raises. Call under the node's lock."""
        self._admission.check(command)
        answer = self._answers.get(type(command))
        if answer is None:
            raise self._refusal(command)
        return answer(command, attempt)

    def due_s(self, command: Command) -> float | None:
        due_s = self._due_times.get(type(command))
        return None if due_s is None else due_s(command)
