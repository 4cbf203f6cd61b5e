"""What the contract suite is run on: something that opens a connection, and opens it again."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import inturn
from inturn import Connection, Consumer, ConsumerSettings, Context, LeaseSettings, LogSettings, Message, SendHandle
from inturn.cluster.settings import ClusterSettings
from inturn.model.errors import NotFound, ProducerError, SendTimeout
from inturn.model.settings import Role
from inturn.model.time import SystemClock
from inturn.protocol.commands import GroupName, GroupPartition
from inturn.security.credentials import NONE
from inturn.security.settings import SecuritySettings
from inturn.server.server import Server
from inturn.testing.checker import Verdict, check
from inturn.testing.recorder import Recorder
from inturn.transport.address import Address

SHORT_LEASE = LeaseSettings(life_s=0.6, renew_s=0.15, margin_s=0.05)
# Renewed as often, but not lost when the machine stands still for some seconds: where a lease must not be lost.
STEADY_LEASE = LeaseSettings(life_s=12.0, renew_s=0.15, margin_s=0.05)
WAIT_S = 20.0
PATIENCE_S = 2 * WAIT_S  # waiting costs nothing when all is well


class Bed:
    """Another engine or client is another subclass; tests use only the connection that it opens."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[Connection] = []

    def target(self) -> str:
        """What a program of its own connects to."""
        return str(self.path)

    def open(self, **options: Any) -> Connection:
        self._opened.append(inturn.connect(self.path, **options))
        return self._opened[-1]

    def reopen(self, **options: Any) -> Connection:
        self.close()
        return self.open(**options)

    def close(self) -> None:
        while self._opened:
            with contextlib.suppress(ProducerError):  # of a send that the test let fail
                self._opened.pop().close()


class SharedBed(Bed):
    """Another connection has the folder open and serves ours through the socket in the folder."""

    def open(self, **options: Any) -> Connection:
        if not self._opened:
            self._opened.append(inturn.connect(self.path, **options))
        return super().open(**options)


class ServedBed(Bed):
    """A server on loopback has the folder open, with the options that a test asks for; ours is its client."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._service: Server | None = None

    def open(self, **options: Any) -> Connection:
        if self._service is None:
            flush = options.pop("flush", None)
            log = options.pop("log", None) or LogSettings(**({} if flush is None else {"flush": flush}))
            lease, observer = options.pop("lease", None), options.pop("observer", None)
            self._service = Server(self.path, log=log, lease=lease, observer=observer, address=Address("127.0.0.1"))
        self._opened.append(inturn.connect(str(self._service.address)))
        return self._opened[-1]

    def close(self) -> None:
        super().close()
        if self._service is not None:
            self._service.close(grace_s=0.0)
            self._service = None


class GroupedBed(Bed):
    """A cluster on loopback: one meta server and two brokers; ours is a client of all of them."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.meta: Server | None = None
        self.brokers: dict[str, Server] = {}
        self.security = SecuritySettings()
        self.credentials = NONE  # that meta and brokers show to each other
        self.client: dict[str, Any] = {}  # what clients show
        self.silent_s = 10.0  # when a broker counts as dead: none does because the machine stands still
        self._options: dict[str, Any] = {}

    def open(self, **options: Any) -> Connection:
        if self.meta is None:
            flush = options.pop("flush", None)
            log = options.pop("log", None) or LogSettings(**({} if flush is None else {"flush": flush}))
            self._options = {"log": log, "lease": options.pop("lease", None), "observer": options.pop("observer", None)}
            self.start_meta()
            for name in ("east", "west"):
                self.start_broker(name)
        assert self.meta is not None
        self._opened.append(inturn.connect(str(self.meta.address), **self.client))
        eventually(
            lambda: sum(one.is_heard for one in self._opened[-1].broker_groups()) >= len(self.brokers), "brokers"
        )
        return self._opened[-1]

    def target(self) -> str:
        return self.open().target

    def start_meta(self, port: int = 0) -> None:
        cluster = ClusterSettings(Role.META, silent_s=self.silent_s, credentials=self.credentials)
        self.meta = self._started("meta", port, cluster)

    def start_broker(self, name: str, port: int = 0) -> None:
        assert self.meta is not None
        meta = str(self.meta.address)
        cluster = ClusterSettings(Role.BROKER, name, meta, report_s=0.1, credentials=self.credentials)
        self.brokers[name] = self._started(name, port, cluster)

    def _started(self, name: str, port: int, cluster: ClusterSettings) -> Server:
        address = Address("127.0.0.1", port)
        return Server(self.path / name, address=address, cluster=cluster, security=self.security, **self._options)

    def close(self) -> None:
        super().close()
        for service in (*self.brokers.values(), *([] if self.meta is None else [self.meta])):
            service.close(grace_s=0.0)
        self.meta, self.brokers = None, {}


BEDS: dict[str, Callable[[Path], Bed]] = {
    "embedded": Bed,
    "shared": SharedBed,
    "served": ServedBed,
    "grouped": GroupedBed,
}


def quick(**settings: Any) -> ConsumerSettings:
    """Settings for tests: commits and heartbeats come often, repeats soon."""
    chosen = {"commit_interval_s": 0.01, "heartbeat_s": 0.15, "suspend_s": 0.01, "concurrency": 4, **settings}
    return ConsumerSettings(**chosen)


class Seen:
    """A handler that notes what it gets and wakes whoever waits for it."""

    def __init__(self, answer: Callable[[Message, Context], object] | None = None) -> None:
        self._answer = answer
        self._changed = threading.Condition()
        self.messages: list[Message] = []
        self.attempts: list[int] = []
        self.epochs: list[int] = []

    def __call__(self, message: Message, context: Context) -> object:
        with self._changed:
            self.messages.append(message)
            self.attempts.append(context.attempt)
            self.epochs.append(context.epoch)
            self._changed.notify_all()
        return None if self._answer is None else self._answer(message, context)

    @property
    def bodies(self) -> list[bytes]:
        return [message.body for message in self.messages]

    def wait_for(self, count: int, timeout_s: float = PATIENCE_S) -> None:
        with self._changed:
            arrived = self._changed.wait_for(lambda: len(self.messages) >= count, timeout_s)
        assert arrived, f"{len(self.messages)} of {count} came within {timeout_s:g} s: {self.bodies[:20]}"


def has_joined(mq: Connection, subject: str = "line", group: str = "g") -> bool:
    """Whether there is the group; that of its retry subject may be there before."""
    return GroupName(subject, group) in mq.groups()


def eventually(
    condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """For what has no event to wait for. What is asked about may not be there yet: a group is there when its first
    member has joined, which a consumer does in its own time."""
    until_s = time.monotonic() + timeout_s
    while True:
        missing = ""
        try:
            if condition():
                return
        except NotFound as error:
            missing = f" ({error})"
        assert time.monotonic() < until_s, f"not within {timeout_s:g} s: {what}{missing}"
        time.sleep(every_s)


def in_one_of(times: int, attempt: Callable[[], None]) -> None:
    """For bounds on real time: a busy machine breaks such a bound once, a fault breaks the bound every time.

    Only for tests whose point is such a bound. Every use states the bound in a comment. All other tests wait for a
    condition with `eventually`.
    """
    for left in reversed(range(times)):
        try:
            return attempt()
        except AssertionError:
            if not left:
                raise


def waits_because(handle: SendHandle, words: str) -> None:
    """The send is not done, and says why; what it was answered last is known when there was an answer."""

    def is_told() -> bool:
        try:
            handle.result(0.1)
        except SendTimeout as error:
            return words in str(error)
        raise AssertionError("it is stored")

    eventually(is_told, f"it waits, because {words}")


def is_renewed(mq: Connection, subject: str = "line", group: str = "g", partition: int = 0) -> None:
    """The lease of a partition is held, and lives on: it ends later than it would have, with the same epoch."""

    def found() -> GroupPartition:
        return mq.group(subject, group).describe().partitions[partition]

    before = found()
    assert before.remaining_s is not None, "nobody holds the lease"
    would_end_s = time.monotonic() + before.remaining_s  # at the latest

    def ends_later() -> bool:
        now_s, now = time.monotonic(), found()
        return now.remaining_s is not None and now_s + now.remaining_s > would_end_s

    eventually(ends_later, "the lease is renewed")
    after = found()
    assert (after.owner, after.epoch) == (before.owner, before.epoch), "it was lost meanwhile"


class Witness:
    """Records sends, leases, commits and handlers, and has the order checker judge them."""

    def __init__(self) -> None:
        self.recorder = Recorder(SystemClock())

    def sent(self, stored: inturn.Stored, key: bytes | None) -> None:
        self.recorder.sent(stored.subject, stored.partition, stored.offset, key)

    def watch(self, handler: Callable[[Message, Context], object]) -> Callable[[Message, Context], object]:
        def watched(message: Message, context: Context) -> object:
            with self._recorded(message, context) as result:
                answer = handler(message, context)
                result[0] = "success" if answer is None else "failed"
                return answer

        return watched

    def watch_async(
        self, handler: Callable[[Message, Context], Awaitable[object]]
    ) -> Callable[[Message, Context], Awaitable[object]]:
        async def watched(message: Message, context: Context) -> object:
            with self._recorded(message, context) as result:
                answer = await handler(message, context)
                result[0] = "success" if answer is None else "failed"
                return answer

        return watched

    @contextlib.contextmanager
    def _recorded(self, message: Message, context: Context) -> Iterator[list[str]]:
        what = (context.subject, context.group, message.partition, message.offset, message.key)
        who = (context.consumer, context.epoch)
        self.recorder.started(*what, *who, attempt=context.attempt)
        result = ["exception"]
        try:
            yield result
        finally:
            self.recorder.ended(*what, *who, result=result[0])

    def kill(self, consumer: Consumer) -> None:
        consumer.kill()
        self.recorder.crashed(consumer.name)

    def judge(
        self, *, order: Literal["partition", "key", "none"] = "partition", complete: bool = True, **only: str
    ) -> Verdict:
        verdict = check(self.recorder.snapshot(), order=order, complete=complete, **only)  # type: ignore[arg-type]
        verdict.raise_if_bad()
        return verdict


def committed(mq: Connection, group: str = "g", subject: str = "line") -> int:
    """Of all partitions together; 0 while nobody has joined."""
    try:
        return sum(one.committed for one in mq.group(subject, group).describe().partitions)
    except NotFound:
        return 0


def send(mq: Connection, subject: str, *messages: str, witness: Witness | None = None) -> None:
    """Each is given as "key:body"; without a key as "body". Stored in this order."""
    with mq.producer() as producer:
        handles = []
        for text in messages:
            key, colon, body = text.rpartition(":")
            handles.append((producer.send(subject, body.encode(), key=key if colon else None), key))
        for handle, key in handles:
            stored = handle.result(WAIT_S)
            if witness is not None:
                witness.sent(stored, key.encode() or None)


def of_key(messages: Iterable[Message], key: str) -> list[str]:
    """The bodies of one key's messages, as they came."""
    return [message.body.decode() for message in messages if message.key == key.encode()]


def send_all(mq: Connection, subject: str, count: int, keys: int = 8, witness: Witness | None = None) -> None:
    with mq.producer() as producer:
        handles = []
        for number in range(count):
            key = b"key-%d" % (number % keys)
            handles.append((producer.send(subject, b"%d" % number, key=key), key))
        for handle, key in handles:
            stored = handle.result(WAIT_S)
            if witness is not None:
                witness.sent(stored, key)


def flip_byte_of(folder: Path, body: bytes) -> None:
    """In the one file below the folder where it is stored."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        data = bytearray(path.read_bytes())
        at = data.find(body)
        if at >= 0:
            data[at + len(body) // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"no file holds {body!r}")
