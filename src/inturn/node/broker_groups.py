"""Broker groups: which there are, and what each may do."""

from __future__ import annotations

from inturn.broker.broker import Broker
from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.commands import Answer, BrokerGroupList, ListBrokerGroups, SetBrokerGroup
from inturn.model.settings import BrokerGroupState, one_of
from inturn.node.answering import AnswerTable, Try
from inturn.node.known import Known
from inturn.node.waking import Waking


class BrokerGroupCommands:
    def __init__(self, known: Known, registry: BrokerRegistry, broker: Broker, wake: Waking) -> None:
        self._known = known
        self._registry = registry
        self._broker = broker
        self._wake = wake

    @property
    def answers(self) -> AnswerTable:
        return {
            ListBrokerGroups: lambda _, __: BrokerGroupList(self._registry.describe(self._known.subjects.values())),
            SetBrokerGroup: self._set,
        }

    def _set(self, command: SetBrokerGroup, _: Try) -> Answer:
        self.set(command.name, one_of(BrokerGroupState, "state", command.state))
        groups = self._registry.describe(self._known.subjects.values())
        return next(one for one in groups if one.name == command.name)

    def set(self, name: str, state: BrokerGroupState) -> None:
        """Durably. If it is the one that is here, what is held back hears of it at once."""
        self._registry.set_state(name, state)
        if name == self._broker.broker_group:
            self._broker.state = state
            self._wake.new_work()
