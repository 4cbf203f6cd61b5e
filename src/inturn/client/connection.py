"""The connection: subjects, producers, readers, consumers and groups of one folder or server.

Longer than a usual file: most lines are the contracts of public methods.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar, Unpack

from inturn.client.deprecated import DeprecatedGroupMethods
from inturn.client.group import Group
from inturn.client.open import ConnectedNode, note_opened, reached
from inturn.client.options import (
    HandlerOptions,
    broker_group_names,
    check_consumer_options,
    check_handler_options,
    consumer_options,
    settings_with,
)
from inturn.client.reader import Reader
from inturn.client.run import Foreground
from inturn.consumer.consumer import Consumer
from inturn.consumer.statistics import ConsumerStatistics
from inturn.consumer.validation import check_handler
from inturn.consumer.worker import Handler
from inturn.model.errors import Closed, InvalidInput
from inturn.model.offsets import Position
from inturn.model.routing import check_partition_count
from inturn.model.settings import (
    BrokerGroupState,
    Flush,
    GroupMode,
    Keyless,
    LeaseSettings,
    Limits,
    LogSettings,
    Order,
    ProducerSettings,
    Routing,
    Strategy,
    checked,
    one_of,
)
from inturn.model.subject import Subject, check_name
from inturn.model.time import Clock, SystemClock
from inturn.outbox.outbox import Outbox
from inturn.producer.producer import Producer
from inturn.producer.send_hook import SendHook
from inturn.protocol.commands import (
    BrokerGroupDescription,
    BrokerGroupList,
    Command,
    CreateSubject,
    DescribeNode,
    DescribeSubject,
    FindSubject,
    GroupList,
    GroupName,
    GrowSubject,
    ListBrokerGroups,
    ListGroups,
    ListSubjects,
    NodeDescription,
    SetBrokerGroup,
    SubjectDescription,
    SubjectList,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import ask
from inturn.security.credentials import NONE, Credentials
from inturn.security.settings import TlsSettings

_Wanted = TypeVar("_Wanted")
_HandlerT = TypeVar("_HandlerT", bound=Handler)


class Connection(DeprecatedGroupMethods):
    """The result of `inturn.connect`. Safe to use from several threads. Close the connection, or use a `with` block."""

    def __init__(
        self,
        target: str | os.PathLike[str],
        *,
        log: LogSettings | None = None,
        lease: LeaseSettings | None = None,
        clock: Clock | None = None,
        observer: Observer | None = None,
        create: bool = True,
        wait_s: float = 0.0,
        node: ConnectedNode | None = None,
        credentials: Credentials = NONE,
    ) -> None:
        """`node`: a node that is connected already, instead of `target`."""
        self._clock = clock if clock is not None else SystemClock()
        self._target = str(target)
        checked(log, LogSettings, "log")
        checked(lease, LeaseSettings, "lease")
        if node is None:
            node = reached(target, log, lease, self._clock, observer, credentials, create=create, wait_s=wait_s)
        self._node = node
        self._lock = threading.Lock()
        self._producers: list[Producer] = []
        self._consumers: list[Consumer] = []
        self._handlers: list[Callable[[], Consumer]] = []
        self._watchers: list[Callable[[Consumer | Producer], None]] = []
        self._foreground = Foreground(self._clock)
        self._is_closed = False
        note_opened(self)

    @property
    def target(self) -> str:
        """The folder or the address given to `connect`."""
        return self._target

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def node(self) -> ConnectedNode:
        """Accepts commands; see `inturn.protocol.commands`."""
        return self._node

    # Subjects

    def create_subject(
        self,
        name: str,
        partitions: int = 4,
        *,
        routing: Routing | str = Routing.SLOTS,
        strategy: Strategy | str = Strategy.STRICT,
        limits: Limits | None = None,
        keyless: Keyless | str = Keyless.INDEPENDENT,
        broker_groups: Sequence[str] = (),
    ) -> Subject:
        """Create a subject. Creating the same subject again is no error; other settings raise AlreadyExists.

        `keyless` matters for order by key: messages without a key are "independent" of each other, or run one after the
        other in "one-lane" per partition. In a cluster the partitions alternate between two available broker groups (or
        are in the only one), or between the groups in `broker_groups` (NotFound for a missing group). The placement is
        fixed from then on.
        """
        check_name("subject", name)
        check_partition_count(name, partitions)
        return self._ask(
            CreateSubject(
                name=name,
                partitions=partitions,
                routing=one_of(Routing, "routing", routing),
                strategy=one_of(Strategy, "strategy", strategy),
                limits=limits if limits is not None else Limits(),
                keyless=one_of(Keyless, "keyless", keyless),
                broker_groups=broker_group_names(broker_groups),
            ),
            Subject,
        )

    def grow_subject(self, name: str, partitions: int) -> Subject:
        """Add partitions to a subject while producers and consumers run; the same number again is no error.

        Order holds: a group handles later messages of a key that moved to a new partition after the messages stored
        before are finished. Only subjects routed by slots can grow, and no subject can shrink (InvalidInput).
        """
        check_partition_count(name, partitions)
        return self._ask(GrowSubject(name, partitions), Subject)

    def subject(self, name: str) -> Subject:
        """The subject, with route and limits. NotFound if the subject does not exist."""
        return self._ask(FindSubject(name), Subject)

    def subjects(self) -> list[Subject]:
        return list(self._ask(ListSubjects(), SubjectList).subjects)

    def describe_subject(self, name: str) -> SubjectDescription:
        """Offsets, size and state of all partitions."""
        return self._ask(DescribeSubject(name), SubjectDescription)

    # Broker groups

    def broker_groups(self) -> list[BrokerGroupDescription]:
        """State of all broker groups, and whether the brokers are alive. Without a cluster: only "local"."""
        return list(self._ask(ListBrokerGroups(), BrokerGroupList).groups)

    def set_broker_group(self, name: str, state: BrokerGroupState | str) -> BrokerGroupDescription:
        """Make a broker group "read-only", "unavailable", or "available" again, durably.

        A read-only group accepts no messages; an unavailable group also delivers no messages. Leases stay, and holders
        still commit. Strict producers wait until the group is available, best-effort producers use other groups, and
        consumers continue without help. NotFound if the group does not exist.
        """
        chosen = one_of(BrokerGroupState, "state", state)
        return self._ask(SetBrokerGroup(name, chosen.value), BrokerGroupDescription)

    # Producing and reading

    def producer(
        self,
        name: str | None = None,
        settings: ProducerSettings | None = None,
        *,
        hooks: Sequence[SendHook] = (),
        outbox: Outbox | None = None,
    ) -> Producer:
        """A producer. A name is exclusive: a new producer of the name fences the earlier producer.

        With an outbox, messages that a best-effort subject could not take go to the outbox, durably, and the handle
        returns `Kept`. The producer sends such messages later, also messages left by an earlier run. Later messages of
        such a key go behind.
        """
        self._check_open()
        outbox = checked(outbox, Outbox, "outbox")
        fallback = None if outbox is None else outbox.fallback_store(self._node, self._clock)
        try:
            producer = Producer(self._node, self._clock, settings, name=name, hooks=hooks, fallback=fallback)
        except BaseException:
            if fallback is not None:
                fallback.close()
            raise
        with self._lock:
            self._producers = [one for one in self._producers if not one.is_closed] + [producer]
        self._tell_watchers(producer)
        return producer

    def reader(
        self, subject: str, start: str | int | datetime | Position = "first", *, tags: str | None = None
    ) -> Reader:
        """Read without a group; with `tags` ("paid || shipped") only messages that have one of the tags."""
        self._check_open()
        return Reader(self._node, subject, start, tags)

    # Consuming

    def consumer(self, subject: str, group: str, handler: Handler, **options: Unpack[HandlerOptions]) -> Consumer:
        """A member of the group, not started yet: use the consumer in a `with` block, or call `start` and `stop`.

        Options, all by keyword; TypeError for an unknown option:

        - `order`: messages that run strictly one after the other. "partition" (default), "key" (messages of one key;
          different keys run at the same time, in any partition), or "none".
        - `mode`: the mode of the group, fixed by the first member. "exclusive" (default; a partition belongs to one
          member; needed for order), "shared" (all members take messages of all partitions; no order; a message is
          delivered again unless acknowledged in time), or "broadcast" (every member gets every message).
        - `offsets`: the folder in which a broadcast member stores offsets, under the `name` of the member.
        - `start`: where a new group begins: "first" (default), "last", a time, an offset or a `Position`. An existing
          group continues where the group was.
        - `settings`: a `ConsumerSettings`.
        - `tags`: a filter such as "paid || shipped", short for `settings.tags`. Messages with none of these tags are
          filtered out: such messages count as finished.
        - `processes`: run the handler in so many processes, short for `settings.workers` and `settings.concurrency`.
        - `hooks`: a sequence of `Hook`.
        - `name`: the beginning of the consumer's name, default from host and process.
        - `loop`: the event loop for an `async def` handler; by default the consumer runs an event loop of its own.
        - `duty`: for programs that divide the work of a group on their own.
        """
        check_consumer_options("Connection.consumer", options)
        self._check_open()
        self.subject(subject)
        all_options = consumer_options(options, self._node.lease)
        consumer = Consumer(self._node, self._clock, subject, group, handler, **all_options)
        with self._lock:
            self._consumers = [one for one in self._consumers if not one.is_over] + [consumer]
        self._tell_watchers(consumer)
        return consumer

    def handler(self, subject: str, group: str, **options: Unpack[HandlerOptions]) -> Callable[[_HandlerT], _HandlerT]:
        """Decorate a function `(message, context)`: `run` makes a consumer with the function as handler.

        The options `order`, `mode`, `offsets`, `start`, `settings`, `tags`, `processes`, `hooks` and `name` are those
        of `consumer`. Bad names and values raise InvalidInput, unknown options TypeError, both here and not in `run`.
        """
        check_handler_options("Connection.handler", options)
        check_name("subject", subject, reserved=True)
        check_name("group", group)
        if (order := options.get("order")) is not None:
            one_of(Order, "order", order)
        one_of(GroupMode, "mode", options.get("mode", GroupMode.EXCLUSIVE))
        settings_with(options.get("settings"), options.get("tags"), options.get("processes"))

        def register(function: _HandlerT) -> _HandlerT:
            check_handler(function)
            self._handlers.append(lambda: self.consumer(subject, group, function, **options))
            return function

        return register

    def run(self, timeout_s: float | None = None) -> None:
        """Run all handlers until SIGINT, SIGTERM, `shutdown`, an error, or the timeout. Stops gracefully. Raises the
        error of a consumer that failed."""
        if not self._handlers:
            raise InvalidInput("run() has nothing to run; register a function with @connection.handler(...) first")
        self._foreground.run([make() for make in self._handlers], timeout_s)

    def shutdown(self) -> None:
        """Make `run` return, from another thread or from a handler."""
        self._foreground.stop()

    def statistics(self) -> list[ConsumerStatistics]:
        """Statistics of every running consumer of this connection, consumers of `run` included."""
        return [consumer.statistics() for consumer in self.consumers()]

    def consumers(self) -> list[Consumer]:
        """The running consumers of this connection."""
        with self._lock:
            return [consumer for consumer in self._consumers if consumer.is_running]

    def producers(self) -> list[Producer]:
        """The open producers of this connection."""
        with self._lock:
            return [producer for producer in self._producers if not producer.is_closed]

    def when_made(self, watcher: Callable[[Consumer | Producer], None]) -> None:
        """Call `watcher` with every consumer and producer made from now on, in the thread that makes it."""
        with self._lock:
            self._watchers.append(watcher)

    def _tell_watchers(self, made: Consumer | Producer) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(made)

    def describe_node(self) -> NodeDescription:
        """State of the node: readiness, clock, disk, and unstable leases."""
        return self._ask(DescribeNode(), NodeDescription)

    # Groups

    def groups(self) -> list[GroupName]:
        return list(self._ask(ListGroups(), GroupList).groups)

    def group(self, subject: str, name: str) -> Group:
        """The handle of one group on one subject: lag, position, keys in trouble, dead letters.

            billing = mq.group("orders", "billing")
            billing.describe().lag
            billing.resume("order-7", why="the scale is repaired")

        The call itself asks no node: NotFound and errors about names come from the methods of the handle.
        """
        return Group(subject, name, node=self._node, clock=self._clock, check_open=self._check_open)

    # Closing

    def close(self) -> None:
        """Stop the consumers, flush the producers, sync the logs, release the folder."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.ExitStack() as closing:  # in reverse order, and all of them in spite of errors
            closing.callback(self._node.close)
            for producer in self._producers:
                closing.callback(producer.close, timeout_s=30.0)
            for consumer in self._consumers:
                closing.callback(consumer.stop)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _ask(self, command: Command, wanted: type[_Wanted]) -> _Wanted:
        self._check_open()
        return ask(self._node, command, wanted)

    def disown(self) -> None:
        """In a forked child: folder, logs and threads belong to the parent. Every use raises Closed."""
        self._lock = threading.Lock()  # the old lock may be held by a thread of the parent
        self._is_closed = True
        self._node.disown()
        for producer in self._producers:
            producer.disown()
        for consumer in self._consumers:
            consumer.disown()

    def _check_open(self) -> None:
        if self._is_closed:
            raise Closed("connection")


def connect(
    target: str | os.PathLike[str],
    *,
    flush: Flush | str | None = None,
    log: LogSettings | None = None,
    lease: LeaseSettings | None = None,
    observer: Observer | None = None,
    wait_s: float = 0.0,
    token: str | None = None,
    tls: TlsSettings | None = None,
) -> Connection:
    """Open or create a folder, or connect to a server: `inturn://host:port`, with TLS `inturns://host:port`.

    A folder needs no server. The first process that opens the folder serves all other processes through a socket in the
    folder; when that process ends, another process takes over. `flush` (short for `log=LogSettings(flush=...)`:
    "always", the default, "interval" or "os"), `log`, `lease` and `observer` are those of the process that has the
    folder open; a server has its own.

    An unreachable server raises ConnectionLost, after `wait_s`. Later losses are repaired by reconnecting. A server
    with authentication needs a `token`, or a certificate in `tls`, else AuthenticationFailed is raised; `tls` also has
    the CA to trust, and switches TLS on for any address. The token is never shown. A forked child must not use the
    connection of the parent: every call raises Closed.
    """
    if flush is not None:
        if log is not None:
            raise InvalidInput("connect(): give flush= or log=, not both")
        log = LogSettings(flush=one_of(Flush, "flush", flush))
    credentials = Credentials(token, tls)
    return Connection(target, log=log, lease=lease, observer=observer, wait_s=wait_s, credentials=credentials)
