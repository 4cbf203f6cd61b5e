"""The brokers as meta sees them: asked one by one, all of a subject, or as many as are there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

from inturn.cluster.gathering import Answers, gather
from inturn.cluster.links import BrokerLinks
from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.clock import Clock
from inturn.model.commands import Command
from inturn.model.errors import BrokerGroupClosed, InturnError, NotFound
from inturn.model.subject import Subject
from inturn.node.known import Known
from inturn.security.credentials import Credentials
from inturn.wire.client import RemoteNode

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
