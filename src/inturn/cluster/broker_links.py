"""Streams to brokers: broker addresses, one stream per broker group, and commands to several brokers at once."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.errors import BrokerGroupClosed, InturnError, InvalidInput, NotFound
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.node.catalog import Catalog
from inturn.protocol.commands import Answer, BrokerGroupDescription, BrokerGroupList, Command, ListBrokerGroups, Node
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.transport.address import dialled
from inturn.transport.client import RemoteNode
from inturn.version import SOFTWARE

Answers = dict[str, Answer | InturnError]  # by broker group


def gather(commands: Mapping[str, tuple[Node, Command]], then: Callable[[Answers], None]) -> None:
    """Submit each command to its node. `then` is called once, in the thread of the last answer."""
    lock = threading.Lock()
    answers: Answers = {}
    if not commands:
        then(answers)
        return

    def arrived(name: str, answer: Answer | InturnError) -> None:
        with lock:
            answers[name] = answer
            is_last = len(answers) == len(commands)
        if is_last:
            then(answers)

    for name, (node, command) in commands.items():
        node.submit(command, lambda answer, name=name: arrived(name, answer))  # type: ignore[misc]


class BrokerAddresses:
    """The addresses and states of brokers, as meta last reported."""

    def __init__(self, meta: RemoteNode) -> None:
        self._meta = meta
        self._groups: dict[str, BrokerGroupDescription] = {}

    def locate(self, broker_group: str) -> str | None:
        """The broker's address; None if unknown. Blocks until meta has answered."""
        try:
            listed = ask(self._meta, ListBrokerGroups(), BrokerGroupList, patience_s=0.0)
            self._groups = {one.name: one for one in listed.groups}
        except InturnError:
            pass  # meta is away: use its last report
        found = self._groups.get(broker_group)
        return None if found is None else found.address

    def is_dead(self, broker_group: str) -> bool:
        """As meta reported at the last `locate` of any broker."""
        found = self._groups.get(broker_group)
        return found is not None and not found.is_heard


REFUSED_S = 1.0  # after this time a broker that refused the stream is dialled again


class BrokerStreams:
    """A stream to each broker group, opened at first use.

    `locate` returns the address of the group's broker as text, or None if unknown. `locate` is called before each dial
    in the thread of the stream, so `locate` may block; a broker may come back at a different address.
    """

    def __init__(self, locate: Callable[[str], str | None], clock: Clock, credentials: Credentials) -> None:
        self._locate = locate
        self._clock = clock
        self._credentials = credentials
        self._lock = threading.Lock()
        self._streams: dict[str, RemoteNode] = {}
        self._tls: dict[str, tuple[ssl.SSLContext, str] | None] = {}
        self._again_at_s: dict[str, float] = {}
        self._is_closed = False

    def to(self, broker_group: str) -> RemoteNode:
        stream = self._streams.get(broker_group)
        if stream is not None and not stream.is_refused:
            return stream
        with self._lock:
            stream = self._streams.get(broker_group)
            if stream is None or (stream.is_refused and self._clock.monotonic() >= self._again_at_s[broker_group]):
                # The broker accepts the stream once it knows the token, or speaks this version.
                stream = self._new_stream(broker_group)
                if self._is_closed:
                    stream.close()
                self._streams[broker_group] = stream
                self._again_at_s[broker_group] = self._clock.monotonic() + REFUSED_S
            return stream

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for stream in list(self._streams.values()):
            stream.close()

    def disown(self) -> None:
        """In a forked child: the threads do not run here, and the sockets are the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        for stream in self._streams.values():
            stream.disown()

    def _new_stream(self, broker_group: str) -> RemoteNode:
        return RemoteNode(
            lambda timeout_s: self._dial(broker_group, timeout_s),
            f"broker group {broker_group}",
            SOFTWARE,
            self._clock,
            token=self._credentials.token or "",
            tls=lambda: self._tls.get(broker_group),
        )

    def _dial(self, broker_group: str, timeout_s: float) -> socket.socket:
        found = None if self._is_closed else self._locate(broker_group)
        if not found:
            raise OSError("the address of its broker is not known")
        try:
            address, self._tls[broker_group] = dialled(found, self._credentials)
        except InvalidInput as error:  # the TLS files may be changing just now
            raise OSError(str(error)) from None
        return address.dial(timeout_s)


_Wanted = TypeVar("_Wanted")


class Brokers:
    """The brokers of the cluster, for meta. `lock` guards catalog and registry, and must not be held while blocking."""

    def __init__(
        self, catalog: Catalog, registry: BrokerRegistry, lock: threading.RLock, clock: Clock, credentials: Credentials
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self.lock = lock
        self._streams = BrokerStreams(self._locate, clock, credentials)

    def homes(self, subject: str) -> list[str]:
        """The broker groups of a subject. Raise NotFound."""
        with self.lock:
            return homes_of(self._catalog.subject(subject))

    def home(self, subject: str, partition: int) -> str:
        """The broker group of a partition; for an unknown partition, any group of the subject."""
        with self.lock:
            partitions = self._catalog.subject(subject).route.partitions
        return partitions[partition if 0 <= partition < len(partitions) else 0].broker_group

    def to(self, broker_group: str) -> RemoteNode:
        return self._streams.to(broker_group)

    def ask(self, broker_group: str, command: Command, wanted: type[_Wanted]) -> _Wanted:
        """Raise the error of the answer; BrokerGroupClosed if the broker is not heard."""
        return self.ask_all([broker_group], command, wanted)[broker_group]

    def ask_all(self, broker_groups: Iterable[str], command: Command, wanted: type[_Wanted]) -> dict[str, _Wanted]:
        """Send to all brokers at once and wait for all answers. Raise the error of any answer."""
        groups = list(broker_groups)
        for name in groups:
            if not self._is_heard(name):
                raise BrokerGroupClosed(name, "dead")
        found: dict[str, _Wanted] = {}
        for name, answer in self._gathered(groups, command).items():
            if isinstance(answer, InturnError):
                raise answer
            if not isinstance(answer, wanted):
                raise InturnError(f"broker group {name!r} answered {type(command).__name__} with {answer!r}")
            found[name] = answer
        return found

    def ask_heard(self, command: Command, wanted: type[_Wanted]) -> dict[str, _Wanted]:
        """Ask all brokers that are heard; silent brokers catch up later."""
        with self.lock:
            groups = [name for name in self._registry.names if self._registry.is_heard(name)]
        return self.ask_all(groups, command, wanted)

    def tell(self, broker_groups: Iterable[str], command: Command) -> Answers:
        """Send to those brokers that are heard and wait for their answers; errors are returned as answers."""
        return self._gathered([name for name in broker_groups if self._is_heard(name)], command)

    def gather(self, broker_groups: Iterable[str], command: Command, then: Callable[[Answers], None]) -> None:
        """As `tell`, without blocking."""
        groups = [name for name in broker_groups if self._is_heard(name)]
        gather({name: (self._streams.to(name), command) for name in groups}, then)

    def close(self) -> None:
        self._streams.close()

    def disown(self) -> None:
        self.lock = threading.RLock()
        self._streams.disown()

    def _gathered(self, groups: list[str], command: Command) -> Answers:
        found: list[Answers] = []
        arrived = threading.Event()

        def then(answers: Answers) -> None:
            found.append(answers)
            arrived.set()

        gather({name: (self._streams.to(name), command) for name in groups}, then)
        arrived.wait()
        return found[0]

    def _is_heard(self, name: str) -> bool:
        with self.lock:
            return self._registry.is_heard(name)

    def _locate(self, name: str) -> str | None:
        with self.lock:
            try:
                return self._registry.get(name).address
            except NotFound:
                return None


def homes_of(subject: Subject) -> list[str]:
    """The broker groups of the subject's partitions, each broker group once."""
    return list(dict.fromkeys(one.broker_group for one in subject.route.partitions))
