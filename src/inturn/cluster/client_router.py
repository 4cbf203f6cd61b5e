"""The client router: a cluster as a node. A command about a partition goes to its broker, any other to meta.

A command about partitions of several brokers is divided; the answers are joined. Meta knows the broker addresses and
the broker group of each partition, and a partition never changes its broker group. So producers and consumers go on
while meta is away, for as long as their authorisation lasts.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from inturn.cluster.broker_links import Answers, BrokerAddresses, BrokerStreams, gather
from inturn.model.errors import BrokerGroupClosed, ConnectionLost, InturnError, InvalidInput
from inturn.model.settings import LeaseSettings, Role
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import (
    Acknowledge,
    Acknowledged,
    Acquire,
    Answer,
    Append,
    Assignment,
    Claim,
    Command,
    Commit,
    Committed,
    CreateSubject,
    Fetch,
    FindSubject,
    GrowSubject,
    Heartbeat,
    Move,
    OpenDeadLetters,
    OpenRetry,
    Pull,
    Read,
    ReadLot,
    Release,
    Renew,
    Renewed,
    Reply,
)
from inturn.protocol.request import WrappedReply
from inturn.security.credentials import Credentials
from inturn.transport.client import RemoteNode

Divided = Renew | Commit | Acknowledge
_Wanted = TypeVar("_Wanted")


def partitions_of(command: Divided) -> tuple[int, ...]:
    match command:
        case Renew():
            return tuple(index for index, _ in command.held)
        case Commit():
            return tuple(one.partition for one in command.progress)
    return tuple(one.partition for one in command.receipts)


def divided(command: Divided, home: Callable[[int], str]) -> dict[str, Divided]:
    """The parts by broker group. `home` returns the broker group of a partition."""
    homes = list(dict.fromkeys(home(index) for index in partitions_of(command)))
    if len(homes) == 1:
        return {homes[0]: command}
    parts: dict[str, Divided] = {}
    for name in homes:
        match command:
            case Renew():
                held = tuple(one for one in command.held if home(one[0]) == name)
                parts[name] = msgspec.structs.replace(command, held=held)
            case Commit():
                progress = tuple(one for one in command.progress if home(one.partition) == name)
                parts[name] = msgspec.structs.replace(command, progress=progress)
            case Acknowledge():
                receipts = tuple(one for one in command.receipts if home(one.partition) == name)
                parts[name] = msgspec.structs.replace(command, receipts=receipts)
    return parts


def joined(parts: dict[str, Divided], answers: Answers) -> Answer | InturnError:
    """One answer. Partitions of unreachable brokers are `unreached`, so the other partitions go on. Permanent errors,
    and an error of all brokers, are returned as the answer."""
    errors = {name: answer for name, answer in answers.items() if isinstance(answer, InturnError)}
    first = next(iter(parts.values()))
    lasting = next((error for error in errors.values() if not error.retriable), None)
    if lasting is not None:
        return lasting
    if errors and (len(errors) == len(answers) or isinstance(first, Acknowledge)):
        return next(iter(errors.values()))  # an Acknowledge holds for all partitions or none; the client repeats it
    unreached = tuple(index for name in errors for index in partitions_of(parts[name]))
    match first:
        case Renew():
            renewed = _of(answers, Renewed)
            taken = tuple(sorted(index for one in renewed for index in one.partitions))
            wanted = tuple(sorted(index for one in renewed for index in one.wanted_back))
            return Renewed(taken, wanted, unreached)
        case Commit():
            done = tuple(sorted(index for one in _of(answers, Committed) for index in one.partitions))
            return Committed(done, unreached)
    return Acknowledged(tuple(place for one in _of(answers, Acknowledged) for place in one.refused))


def _of(answers: Answers, kind: type[_Wanted]) -> Sequence[_Wanted]:
    return [answer for answer in answers.values() if isinstance(answer, kind)]


_OF_PARTITION = frozenset((Append, Acquire, Claim, Pull, Release, Fetch, ReadLot, Move, Read))
_DIVIDED = frozenset((Renew, Commit, Acknowledge))
_ANSWERED_WITH_ROUTES = frozenset((FindSubject, CreateSubject, GrowSubject, OpenRetry, OpenDeadLetters, Heartbeat))


def router_for(node: RemoteNode, address: str, clock: Clock, credentials: Credentials) -> RemoteNode | ClientRouter:
    """The node for a connection to this server: the stream itself, or a router for the cluster of a meta server."""
    if node.role is Role.BROKER:
        raise InvalidInput(f"{address} is a broker, which has only some of the partitions; connect to its meta server")
    return ClientRouter(node, clock, credentials) if node.role is Role.META else node


class ClientRouter:
    """See `inturn.protocol.commands.Node`. Owns the streams to meta and to the brokers."""

    def __init__(self, meta: RemoteNode, clock: Clock, credentials: Credentials) -> None:
        self._meta = meta
        self._addresses = BrokerAddresses(meta)
        self._streams = BrokerStreams(self._addresses.locate, clock, credentials)
        self._lock = threading.Lock()
        self._homes: dict[str, tuple[str, ...]] = {}  # by subject: the broker group of each partition

    @property
    def lease(self) -> LeaseSettings | None:
        return self._meta.lease

    @property
    def role(self) -> Role:
        return self._meta.role

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        kind = type(command)
        if kind in _OF_PARTITION:
            self._submit_to_partition(command, reply)
        elif kind in _DIVIDED:
            self._submit_divided(command, reply)  # type: ignore[arg-type]
        elif kind in _ANSWERED_WITH_ROUTES:
            self._meta.submit(command, lambda answer: reply(self._noted(answer)))
        else:
            self._meta.submit(command, reply)

    def close(self) -> None:
        self._meta.close()  # first: a thread that dials may wait for an answer of meta
        self._streams.close()

    def disown(self) -> None:
        """In a forked child: all streams are the parent's."""
        self._meta.disown()
        self._streams.disown()

    # Routes

    def _submit_to_partition(self, command: Any, reply: Reply) -> None:
        homes = self._homes.get(command.subject, ())
        if not 0 <= command.partition < len(homes):
            self._when_known(command.subject, reply, lambda homes: self._submit_somewhere(homes, command, reply))
            return
        self._submit_home(homes[command.partition], command, reply)

    def _submit_somewhere(self, homes: tuple[str, ...], command: Any, reply: Reply) -> None:
        """For an unknown partition, any broker of the subject returns the error."""
        index = command.partition if 0 <= command.partition < len(homes) else 0
        self._submit_home(homes[index], command, reply)

    def _submit_home(self, home: str, command: Command, reply: Reply) -> None:
        if type(command) is Append:
            reply = _AppendReply(self._addresses, home, reply)
        self._streams.to(home).submit(command, reply)

    def _submit_divided(self, command: Divided, reply: Reply) -> None:
        homes = self._homes.get(command.subject, ())
        if any(not 0 <= index < len(homes) for index in partitions_of(command)) or not homes:
            self._when_known(command.subject, reply, lambda homes: self._divide(homes, command, reply))
            return
        self._divide(homes, command, reply)

    def _divide(self, homes: tuple[str, ...], command: Divided, reply: Reply) -> None:
        def home(index: int) -> str:
            return homes[index] if 0 <= index < len(homes) else homes[0]

        parts = divided(command, home) or {homes[0]: command}
        if len(parts) == 1:
            ((name, part),) = parts.items()
            self._streams.to(name).submit(part, reply)
            return
        gather(
            {name: (self._streams.to(name), part) for name, part in parts.items()},
            lambda answers: reply(joined(parts, answers)),
        )

    def _when_known(self, subject: str, reply: Reply, then: Callable[[tuple[str, ...]], None]) -> None:
        """Ask meta for the route; an error of meta is the answer."""

        def found(answer: Answer | InturnError) -> None:
            if isinstance(answer, Subject):
                self._noted(answer)
                then(self._homes[answer.name])
            else:
                reply(answer)

        self._meta.submit(FindSubject(subject), found)

    def _noted(self, answer: Answer | InturnError) -> Answer | InturnError:
        subject = answer.subject if isinstance(answer, Assignment) else answer
        if isinstance(subject, Subject):
            with self._lock:
                if len(self._homes.get(subject.name, ())) < subject.partition_count:
                    self._homes[subject.name] = tuple(one.broker_group for one in subject.route.partitions)
        return answer


class _AppendReply(WrappedReply):
    """The reply to an append: BrokerGroupClosed instead of ConnectionLost if meta has reported the broker as dead."""

    __slots__ = ("_addresses", "_home")

    def __init__(self, addresses: BrokerAddresses, home: str, reply: Reply) -> None:
        super().__init__(reply)
        self._addresses = addresses
        self._home = home

    def __call__(self, answer: Answer | InturnError) -> None:
        if isinstance(answer, ConnectionLost) and self._addresses.is_dead(self._home):
            answer = BrokerGroupClosed(self._home, "dead")
        self._reply(answer)
