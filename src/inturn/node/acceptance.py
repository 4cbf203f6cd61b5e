"""How commands are answered: at once, or not yet.

What a node takes in: everything, no new work when it is stopping, nothing when it is closed.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, TypeAlias

from inturn.broker.broker import Broker
from inturn.model.errors import BrokerGroupClosed, Closed, ServerStopping
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
)


class Try(enum.Enum):
    """The first try is the client speaking, and renews; later ones are ours, and must not."""

    FIRST = enum.auto()
    AGAIN = enum.auto()
    LAST = enum.auto()


# By the type of the command. None: nothing to say yet, which the last try must not be. Called under the node's lock.
AnswerTable: TypeAlias = dict[type[Command], Callable[[Any, Try], Answer | None]]


def may_wait(wait_s: float, attempt: Try) -> bool:
    """Whether a command with this `wait_s` may be held back at this try."""
    return attempt is not Try.LAST and wait_s > 0


NEW_WORK = Append | OpenProducer | CreateSubject | Acquire | Claim | Pull | Read | Fetch
# What a broker group does not do for its clients, by its state.
_REFUSED: dict[BrokerGroupState, tuple[type[Command], ...]] = {
    BrokerGroupState.READ_ONLY: (Append,),
    BrokerGroupState.UNAVAILABLE: (Append, Move, Acquire, Claim, Pull, Read, Fetch),
}


class Intake:
    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.is_stopping = False
        self.is_closed = False

    def check(self, command: Command) -> None:
        """Raises Closed, ServerStopping or BrokerGroupClosed for what is not taken now."""
        if self.is_closed:
            raise Closed("node")
        if self.is_stopping and isinstance(command, NEW_WORK):
            raise ServerStopping
        state = self._broker.state
        if state is not BrokerGroupState.AVAILABLE and isinstance(command, _REFUSED[state]):
            raise BrokerGroupClosed(self._broker.broker_group, state.value)

    def check_stores(self) -> None:
        """BrokerGroupClosed unless messages may be stored here, whatever command brings them."""
        if self._broker.state is not BrokerGroupState.AVAILABLE:
            raise BrokerGroupClosed(self._broker.broker_group, self._broker.state.value)

    @property
    def refusal(self) -> str:
        """Why it takes no work; empty if it does."""
        return "it is closed" if self.is_closed else "it is stopping" if self.is_stopping else ""
