"""The connection: a folder opened like a database, and everything one can do with it.

Longer than a usual file: it is the one list of what there is, and most of it is what the methods promise.
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
from inturn.client.keys import broker_group_names, settings_with
from inturn.client.open import ConnectedNode, note_opened, reached
from inturn.client.options import HandlerOptions, check_consumer_options, check_handler_options, consumer_options
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
    """What `inturn.connect` returns. Safe to use from several threads; close it, or use it in a `with` block."""

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
        """`node` is for a connection that somebody has made already."""
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
        """The folder or the address that it was opened with."""
        return self._target

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    @property
    def node(self) -> ConnectedNode:
        """Where commands go; see `inturn.protocol.commands`."""
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
        """Create a subject; the same again is no error, other settings are (AlreadyExists).

        `keyless` matters under order by key: messages without a key are "independent" of each other, or wait for
        one another in "one-lane" per partition. In a cluster the partitions are in two available broker groups, in
        turns, or in one if there is one; or in those that `broker_groups` names (NotFound if one is not there). That
        is fixed from then on.
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
        """Give a subject more partitions while producers and consumers run; the same number again is no error.

        Order holds: what comes later of a key that moved to a new partition is handled by a group when what was stored
        before is finished. Only subjects routed by slots can grow, and none can shrink (InvalidInput).
        """
        check_partition_count(name, partitions)
        return self._ask(GrowSubject(name, partitions), Subject)

    def subject(self, name: str) -> Subject:
        """The subject, with its route and limits. NotFound if there is none."""
        return self._ask(FindSubject(name), Subject)

    def subjects(self) -> list[Subject]:
        return list(self._ask(ListSubjects(), SubjectList).subjects)

    def describe_subject(self, name: str) -> SubjectDescription:
        """Offsets, size and state of each partition."""
        return self._ask(DescribeSubject(name), SubjectDescription)

    # Broker groups

    def broker_groups(self) -> list[BrokerGroupDescription]:
        """What each of them may do, and whether its broker is heard. Without a cluster there is one, "local"."""
        return list(self._ask(ListBrokerGroups(), BrokerGroupList).groups)

    def set_broker_group(self, name: str, state: BrokerGroupState | str) -> BrokerGroupDescription:
        """Make a broker group "read-only", "unavailable", or "available" again, durably.

        A read-only one takes no messages, an unavailable one gives none either; leases stay, and who holds one still
        commits. Strict producers wait until it is back, best-effort ones go round it, and consumers go on by
        themselves. NotFound if there is none of that name.
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
        """A producer. With a name it is the only one of that name: it fences the one before.

        With an outbox, what a best-effort subject could not take goes there, durably, and the handle says so (`Kept`);
        the producer sends it later, also what an earlier run has left. Later messages of such a key go behind it.
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
        """Read without a group; with `tags` only messages that have one of them: "paid || shipped"."""
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
        """Run all handlers until SIGINT, SIGTERM, `shutdown`, an error, or so many seconds. Stops gracefully."""
        if not self._handlers:
            raise InvalidInput("run() has nothing to run; register a function with @connection.handler(...) first")
        self._foreground.run([make() for make in self._handlers], timeout_s)

    def shutdown(self) -> None:
        """Make `run` return, from another thread or from a handler."""
        self._foreground.stop()

    def statistics(self) -> list[ConsumerStatistics]:
        """Of every consumer of this connection that runs, those of `run` among them."""
        return [consumer.statistics() for consumer in self.consumers()]

    def consumers(self) -> list[Consumer]:
        """Those of this connection that run."""
        with self._lock:
            return [consumer for consumer in self._consumers if consumer.is_running]

    def producers(self) -> list[Producer]:
        """Those of this connection that are open."""
        with self._lock:
            return [producer for producer in self._producers if not producer.is_closed]

    def when_made(self, watcher: Callable[[Consumer | Producer], None]) -> None:
        """Call this with every consumer and producer that is made from now on, in the thread that makes it."""
        with self._lock:
            self._watchers.append(watcher)

    def _tell_watchers(self, made: Consumer | Producer) -> None:
        with self._lock:
            watchers = list(self._watchers)
        for watcher in watchers:
            watcher(made)

    def describe_node(self) -> NodeDescription:
        """How the node itself is: ready or not, its clock, its disk, and leases that do not come to rest."""
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
        """Stop the consumers, flush the producers, sync the logs, give the folder free."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with contextlib.ExitStack() as closing:  # backwards, and each of them whatever another one raises
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
        """In a forked child: the folder, its logs and its threads are the parent's. Whatever is used says Closed."""
        self._lock = threading.Lock()  # it may be held by a thread that is not here
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
    """Open a folder, or make it; or connect to a server: `inturn://host:port`, with TLS `inturns://host:port`.

    A folder needs no server. The first process that opens it serves all others through a socket in it, and when it
    ends, one of them takes over. `flush` (short for `log=LogSettings(flush=...)`: "always", the default, "interval" or
    "os"), `log`, `lease` and `observer` are those of the process that has the folder open; a server has its own.

    A server that cannot be reached raises ConnectionLost, after `wait_s`. Later losses are mended by themselves. One
    that asks who you are wants a `token`, or a certificate in `tls`, else AuthenticationFailed is raised; `tls` also
    says which CA to trust, and switches TLS on whatever the address says. The token is shown nowhere. A forked child
    must not use the connection of its parent: there everything raises Closed.
    """
    if flush is not None:
        if log is not None:
            raise InvalidInput("connect(): give flush= or log=, not both")
        log = LogSettings(flush=one_of(Flush, "flush", flush))
    credentials = Credentials(token, tls)
    return Connection(target, log=log, lease=lease, observer=observer, wait_s=wait_s, credentials=credentials)
