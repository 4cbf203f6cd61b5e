"""Asking several brokers at once, and going on when all of them have answered.

Where brokers are, and whether they are there, as meta last said.

Streams to brokers: one to each broker group, made when it is first needed.

The brokers as meta sees them: asked one by one, all of a subject, or as many as are there.
"""

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
from inturn.node.catalog import Known
from inturn.protocol.commands import Answer, BrokerGroupDescription, BrokerGroupList, Command, ListBrokerGroups, Node
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.transport.address import dialled
from inturn.transport.client import RemoteNode
from inturn.version import SOFTWARE

Answers = dict[str, Answer | InturnError]  # by broker group


def gather(commands: Mapping[str, tuple[Node, Command]], then: Callable[[Answers], None]) -> None:
    """Submit each command to its node. `then` is called once, from whatever thread the last answer comes in."""
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


class Whereabouts:
    def __init__(self, meta: RemoteNode) -> None:
        self._meta = meta
        self._known: dict[str, BrokerGroupDescription] = {}

    def locate(self, broker_group: str) -> str | None:
        """Its address; None if nobody knows. Asks meta, and waits."""
        try:
            listed = ask(self._meta, ListBrokerGroups(), BrokerGroupList, patience_s=0.0)
            self._known = {one.name: one for one in listed.groups}
        except InturnError:
            pass  # meta is away: its last word counts
        known = self._known.get(broker_group)
        return None if known is None else known.address

    def is_dead(self, broker_group: str) -> bool:
        """As meta told when a broker was last looked for."""
        known = self._known.get(broker_group)
        return known is not None and not known.is_heard


REFUSED_S = 1.0  # after which a broker that did not let us in is asked again


class BrokerLinks:
    """`locate` tells where the broker of a group is, as text, or None if nobody knows. It is asked before each dial, in
    the thread of that stream, so it may wait; a broker may come back at another address."""

    def __init__(self, locate: Callable[[str], str | None], clock: Clock, credentials: Credentials) -> None:
        self._locate = locate
        self._clock = clock
        self._credentials = credentials
        self._lock = threading.Lock()
        self._links: dict[str, RemoteNode] = {}
        self._tls: dict[str, tuple[ssl.SSLContext, str] | None] = {}
        self._again_at_s: dict[str, float] = {}
        self._is_closed = False

    def to(self, broker_group: str) -> RemoteNode:
        link = self._links.get(broker_group)
        if link is not None and not link.is_refused:
            return link
        with self._lock:
            link = self._links.get(broker_group)
            if link is None or (link.is_refused and self._clock.monotonic() >= self._again_at_s[broker_group]):
                # Once its broker has learnt of our token, or speaks our version, it lets us in.
                link = self._made(broker_group)
                if self._is_closed:
                    link.close()
                self._links[broker_group] = link
                self._again_at_s[broker_group] = self._clock.monotonic() + REFUSED_S
            return link

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for link in list(self._links.values()):
            link.close()

    def disown(self) -> None:
        """In a forked child: the threads are not here, and the sockets are the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        for link in self._links.values():
            link.disown()

    def _made(self, broker_group: str) -> RemoteNode:
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
            raise OSError("nobody knows where its broker is")
        try:
            address, self._tls[broker_group] = dialled(found, self._credentials)
        except InvalidInput as error:  # files that are being replaced, perhaps
            raise OSError(str(error)) from None
        return address.dial(timeout_s)


_Wanted = TypeVar("_Wanted")


class Brokers:
    """`lock` guards what is known and the registry. What waits here must not hold it."""

    def __init__(
        self, known: Known, registry: BrokerRegistry, lock: threading.RLock, clock: Clock, credentials: Credentials
    ) -> None:
        self._known = known
        self._registry = registry
        self.lock = lock
        self._links = BrokerLinks(self._locate, clock, credentials)

    def homes(self, subject: str) -> list[str]:
        """The broker groups of a subject. NotFound."""
        with self.lock:
            return homes_of(self._known.subject(subject))

    def home(self, subject: str, partition: int) -> str:
        """That of a partition; of one that is not there, any that can say so."""
        with self.lock:
            partitions = self._known.subject(subject).route.partitions
        return partitions[partition if 0 <= partition < len(partitions) else 0].broker_group

    def to(self, broker_group: str) -> RemoteNode:
        return self._links.to(broker_group)

    def ask(self, broker_group: str, command: Command, wanted: type[_Wanted]) -> _Wanted:
        """Raises what is in the way: BrokerGroupClosed if nobody hears of the broker."""
        return self.ask_all([broker_group], command, wanted)[broker_group]

    def ask_all(self, broker_groups: Iterable[str], command: Command, wanted: type[_Wanted]) -> dict[str, _Wanted]:
        """All at once; an error of one is raised."""
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
        """All brokers that are heard; the others catch up when they are back."""
        with self.lock:
            groups = [name for name in self._registry.names if self._registry.is_heard(name)]
        return self.ask_all(groups, command, wanted)

    def tell(self, broker_groups: Iterable[str], command: Command) -> Answers:
        """Those that are heard; what they answer, errors too."""
        return self._gathered([name for name in broker_groups if self._is_heard(name)], command)

    def gather(self, broker_groups: Iterable[str], command: Command, then: Callable[[Answers], None]) -> None:
        """As `tell`, without waiting."""
        groups = [name for name in broker_groups if self._is_heard(name)]
        gather({name: (self._links.to(name), command) for name in groups}, then)

    def close(self) -> None:
        self._links.close()

    def disown(self) -> None:
        self.lock = threading.RLock()
        self._links.disown()

    def _gathered(self, groups: list[str], command: Command) -> Answers:
        found: list[Answers] = []
        arrived = threading.Event()

        def then(answers: Answers) -> None:
            found.append(answers)
            arrived.set()

        gather({name: (self._links.to(name), command) for name in groups}, then)
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
    """The broker groups that its partitions are in, each once."""
    return list(dict.fromkeys(one.broker_group for one in subject.route.partitions))
