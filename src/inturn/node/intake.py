"""What a node takes in: everything, no new work when it is stopping, nothing when it is closed."""

from __future__ import annotations

from inturn.broker.broker import Broker
from inturn.model.commands import Acquire, Append, Claim, Command, CreateSubject, Fetch, Move, OpenProducer, Pull, Read
from inturn.model.errors import BrokerGroupClosed, Closed, ServerStopping
from inturn.model.settings import BrokerGroupState

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
