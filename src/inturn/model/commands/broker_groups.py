"""Broker groups: looking at them, and taking them out of use."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command


class BrokerGroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`state` is what an operator has set; whether its broker is heard is another thing."""

    name: str
    state: str  # one of BrokerGroupState
    address: str = ""  # where clients reach its broker; empty: it is this node
    is_heard: bool = True
    partition_count: int = 0
    silent_s: float = 0.0  # since its broker was last heard

    @property
    def condition(self) -> str:
        """In one word: the state, or "dead" if its broker is not heard."""
        return self.state if self.is_heard else "dead"


class ListBrokerGroups(Command, frozen=True, gc=False):
    pass


class BrokerGroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[BrokerGroupDescription, ...]


class SetBrokerGroup(Command, frozen=True, gc=False):
    """Make a broker group read-only, unavailable, or available again. Answered with its description, once durable."""

    name: str
    state: str  # one of BrokerGroupState
