"""The beds of the contract suite. A bed opens a connection, and opens the connection again."""

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
# The renewal interval is the same, but the lease survives a machine that stands still for some seconds. For tests in
# which a lease must not be lost.
STEADY_LEASE = LeaseSettings(life_s=12.0, renew_s=0.15, margin_s=0.05)
WAIT_S = 20.0
PATIENCE_S = 2 * WAIT_S  # a long timeout costs no time while the test succeeds


class Bed:
    """Every engine or client has a subclass. Tests use only the connection."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._opened: list[Connection] = []

    def target(self) -> str:
        """The target for `connect` in a separate program."""
        return str(self.path)

    def open(self, **options: Any) -> Connection:
        self._opened.append(inturn.connect(self.path, **options))
        return self._opened[-1]

    def reopen(self, **options: Any) -> Connection:
        self.close()
        return self.open(**options)

    def close(self) -> None:
        while self._opened:
            with contextlib.suppress(ProducerError):  # of a send that fails on purpose
                self._opened.pop().close()


class SharedBed(Bed):
    """A second connection has the folder open, and serves the connection of the test through the folder's socket."""

    def open(self, **options: Any) -> Connection:
        if not self._opened:
            self._opened.append(inturn.connect(self.path, **options))
        return super().open(**options)


class ServedBed(Bed):
    """A server on loopback has the folder open, with the options of the test.

    The connection of the test is a client.
    """

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
    """A cluster on loopback: a meta server and two brokers. The connection of the test is a client of the cluster."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.meta: Server | None = None
        self.brokers: dict[str, Server] = {}
        self.security = SecuritySettings()
        self.credentials = NONE  # for meta and brokers among each other
        self.client: dict[str, Any] = {}  # credentials of clients
        self.silent_s = 10.0  # a broker is dead after this silence: long enough for a machine that stands still
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
    """Settings for tests: frequent commits and heartbeats, short delays."""
    chosen = {"commit_interval_s": 0.01, "heartbeat_s": 0.15, "suspend_s": 0.01, "concurrency": 4, **settings}
    return ConsumerSettings(**chosen)


class Seen:
    """A handler that records all messages and wakes waiting threads."""

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
    """Whether the group exists. The group of the retry subject may exist earlier."""
    return GroupName(subject, group) in mq.groups()


def eventually(
    condition: Callable[[], object], what: str, timeout_s: float = PATIENCE_S, every_s: float = 0.005
) -> None:
    """Wait for a condition without an event.

    The subject of the condition may not exist yet: a group exists after the first member has joined.
    """
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
    """The send waits and tells the reason. The reason is known after the first answer."""

    def is_told() -> bool:
        try:
            handle.result(0.1)
        except SendTimeout as error:
            return words in str(error)
        raise AssertionError("it is stored")

    eventually(is_told, f"it waits, because {words}")


def is_renewed(mq: Connection, subject: str = "line", group: str = "g", partition: int = 0) -> None:
    """The lease of a partition is held and renewed: the lease ends later, with the same epoch."""

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
    """Records sends, leases, commits and handlers, and runs the order checker."""

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
    """The sum over all partitions; 0 before the first member has joined."""
    try:
        return sum(one.committed for one in mq.group(subject, group).describe().partitions)
    except NotFound:
        return 0


def send(mq: Connection, subject: str, *messages: str, witness: Witness | None = None) -> None:
    """Send messages, given as "key:body", or as "body" without a key. Stored in this order."""
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
    """The bodies of a key's messages, in the order of arrival."""
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
    """Flip a byte of the body in the file below the folder."""
    for path in sorted(one for one in folder.rglob("*") if one.is_file()):
        data = bytearray(path.read_bytes())
        at = data.find(body)
        if at >= 0:
            data[at + len(body) // 2] ^= 1
            path.write_bytes(data)
            return
    raise AssertionError(f"no file holds {body!r}")
