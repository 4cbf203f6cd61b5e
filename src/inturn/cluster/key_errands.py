"""Keys and messages of a cluster: each is with the broker of its partition."""

from __future__ import annotations

from inturn.cluster.brokers import Brokers
from inturn.cluster.errands import ErrandTable, Here
from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.commands import (
    Answer,
    DescribeKey,
    Done,
    FindMessage,
    FindRequest,
    KeyDetails,
    KeyList,
    KeyRequest,
    ListKeys,
    Reply,
    SteerKey,
    Trial,
    TryMessage,
)
from inturn.model.errors import BrokerGroupClosed, InturnError, NotFound
from inturn.model.settings import Routing
from inturn.model.slot import slot_of
from inturn.node.known import Known
from inturn.node.steering import SteeringCommands
from inturn.node.waking import Waking
from inturn.state.node_role import REQUEST_IDS


class KeyErrands:
    def __init__(
        self,
        known: Known,
        steering: SteeringCommands,
        registry: BrokerRegistry,
        brokers: Brokers,
        here: Here,
        wake: Waking,
    ) -> None:
        self._known = known
        self._steering = steering
        self._registry = registry
        self._brokers = brokers
        self._here = here
        self._wake = wake

    @property
    def errands(self) -> ErrandTable:
        return {SteerKey: self._steer, ListKeys: self.all, DescribeKey: self._describe, TryMessage: self._try}

    def _steer(self, command: SteerKey) -> Answer:
        with self._brokers.lock:
            subject, group = self._known.subject(command.subject), self._known.group(command.subject, command.group)
            self._steering.check(group, command)
        partition = command.partition
        if partition is None:
            partition = subject.route.by_slot[slot_of(command.key)]
        request = self._brokers.ask(self._brokers.home(command.subject, partition), command, KeyRequest)
        with self._brokers.lock:
            self._wake.announce(group)
        return request

    def find_request(self, command: FindRequest, reply: Reply) -> None:
        """Ask the broker whose number the id begins with. No errand: it may be held back there for long."""
        with self._brokers.lock:
            home = self._registry.name_of(command.id // REQUEST_IDS)
        if home is None:
            reply(NotFound("request", str(command.id), "it was taken back, or never made"))
        else:
            self._brokers.to(home).submit(command, reply)

    def all(self, command: ListKeys) -> KeyList:
        """Those of all brokers; what lasts longest comes first."""
        with self._brokers.lock:
            self._known.group(command.subject, command.group)
        told = self._brokers.ask_all(self._brokers.homes(command.subject), command, KeyList)
        keys = [one for each in told.values() for one in each.keys]
        keys.sort(key=lambda one: (one.since_ms, one.partition, one.key or b"", one.offset or 0))
        return KeyList(tuple(keys))

    def _describe(self, command: DescribeKey) -> Answer:
        with self._brokers.lock:
            subject = self._known.subject(command.subject)
            self._known.group(command.subject, command.group)
        if subject.routing is Routing.SLOTS:
            home = self._brokers.home(command.subject, subject.route.by_slot[slot_of(command.key)])
            return self._brokers.ask(home, command, KeyDetails)
        homes = self._brokers.homes(command.subject)
        told = self._brokers.tell(homes, command)
        found = [one for one in told.values() if isinstance(one, KeyDetails)]
        if found:
            return min(found, key=lambda one: one.description.since_ms)
        silent = next((home for home in homes if home not in told), None)
        if silent is not None:
            raise BrokerGroupClosed(silent, "dead")  # it may be there
        raise next(one for one in told.values() if isinstance(one, InturnError))

    def _try(self, command: TryMessage) -> Answer:
        with self._brokers.lock:
            self._known.group(command.subject, command.group)
        message = FindMessage(command.subject, command.partition, command.offset)
        self._brokers.ask(self._brokers.home(command.subject, command.partition), message, Done)
        return self._here.ask(command, Trial)
