"""The connection: a folder opened like a database, and everything one can do with it.

Longer than a usual file: it is the one list of what there is, and most of it is what the methods promise.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from datetime import datetime
from types import TracebackType
from typing import Self, TypeVar

from inturn.client.dead_letters import DeadLetters
from inturn.client.keys import broker_group_names, settings_with, steer, tried
from inturn.client.open import ConnectedNode, note_opened, reached
from inturn.client.reader import Reader
from inturn.client.run import Foreground
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Hook
from inturn.consumer.parking import unparked
from inturn.consumer.scope import EVERYTHING, Scope
from inturn.consumer.statistics import ConsumerStatistics
from inturn.consumer.validation import check_handler
from inturn.consumer.worker import Handler
from inturn.model.errors import Closed, InvalidInput
from inturn.model.message import Message
from inturn.model.offsets import Position, parse_position, position_text
from inturn.model.routing import check_partition_count
from inturn.model.settings import (
    BrokerGroupState,
    ConsumerSettings,
    Flush,
    GroupMode,
    KeyAction,
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
from inturn.producer.validation import encoded_key
from inturn.protocol.commands import (
    BrokerGroupDescription,
    BrokerGroupList,
    Command,
    CreateSubject,
    DescribeGroup,
    DescribeKey,
    DescribeNode,
    DescribeSubject,
    Done,
    FindSubject,
    GroupDescription,
    GroupList,
    GroupName,
    GrowSubject,
    KeyDescription,
    KeyDetails,
    KeyList,
    ListBrokerGroups,
    ListGroups,
    ListKeys,
    ListSubjects,
    NodeDescription,
    RequestState,
    ResetGroup,
    SetBrokerGroup,
    SetOrder,
    SubjectDescription,
    SubjectList,
    TrialState,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import ask
from inturn.security.credentials import NONE, Credentials
from inturn.security.settings import TlsSettings

_Wanted = TypeVar("_Wanted")
_HandlerT = TypeVar("_HandlerT", bound=Handler)


class Connection:
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
                name,
                partitions,
                one_of(Routing, "routing", routing),
                one_of(Strategy, "strategy", strategy),
                limits if limits is not None else Limits(),
                one_of(Keyless, "keyless", keyless),
                broker_group_names(broker_groups),
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
        keeper = None if outbox is None else outbox.keeper(self._node, self._clock)
        try:
            producer = Producer(self._node, self._clock, settings, name=name, hooks=hooks, keeper=keeper)
        except BaseException:
            if keeper is not None:
                keeper.close()
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

    def consumer(
        self,
        subject: str,
        group: str,
        handler: Handler,
        *,
        order: Order | str | None = None,
        mode: GroupMode | str = GroupMode.EXCLUSIVE,
        offsets: str | os.PathLike[str] | None = None,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        tags: str | None = None,
        processes: int | None = None,
        hooks: Sequence[Hook] = (),
        name: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        duty: Scope = EVERYTHING,
    ) -> Consumer:
        """A member of the group, not started yet: use it in a `with` block, or call `start` and `stop`.

        `order` says what runs one after the other: "partition" (unless it is said), "key" (messages of one key;
        different keys run at the same time, whatever partition they are in), or "none". `mode` is that of the group,
        from its first member on: "exclusive" (a partition belongs to one member; needed for order), "shared" (all
        members take messages of all partitions; no order, each message comes again unless it is acknowledged in time),
        or "broadcast" (every member gets everything, and keeps its place in the folder `offsets`, under its `name`).
        The handler may be `async def`; it then runs in `loop`, or in an event loop of the consumer's own. `start` says
        where a group that is new begins; one that exists goes on where it was. `tags` ("paid || shipped", short for
        `settings.tags`) leaves out messages that have none of these: they count as done. `processes` (short for
        `settings.workers` and `concurrency`) runs the handler in so many processes. `duty` is for programs that divide
        the work of a group themselves.
        """
        self._check_open()
        self.subject(subject)
        settings = settings_with(settings, tags, processes)
        consumer = Consumer(
            self._node,
            self._clock,
            subject,
            group,
            handler,
            order=order,
            mode=mode,
            offsets=offsets,
            start=start,
            settings=settings,
            lease=self._node.lease,
            hooks=hooks,
            name=name,
            loop=loop,
            duty=duty,
        )
        with self._lock:
            self._consumers = [one for one in self._consumers if not one.is_over] + [consumer]
        self._tell_watchers(consumer)
        return consumer

    def handler(
        self,
        subject: str,
        group: str,
        *,
        order: Order | str | None = None,
        mode: GroupMode | str = GroupMode.EXCLUSIVE,
        offsets: str | os.PathLike[str] | None = None,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        tags: str | None = None,
        processes: int | None = None,
        hooks: Sequence[Hook] = (),
        name: str | None = None,
    ) -> Callable[[_HandlerT], _HandlerT]:
        """Decorate a function `(message, context)` to be run by `run`."""

        check_name("subject", subject, reserved=True)
        check_name("group", group)
        if order is not None:
            one_of(Order, "order", order)
        one_of(GroupMode, "mode", mode)
        settings = settings_with(settings, tags, processes)

        def register(function: _HandlerT) -> _HandlerT:
            check_handler(function)
            self._handlers.append(
                lambda: self.consumer(
                    subject,
                    group,
                    function,
                    order=order,
                    mode=mode,
                    offsets=offsets,
                    start=start,
                    settings=settings,
                    hooks=hooks,
                    name=name,
                )
            )
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

    def describe_group(self, subject: str, group: str) -> GroupDescription:
        """Members, and per partition: committed offset, lag, owner and epoch of the lease."""
        return self._ask(DescribeGroup(subject, group), GroupDescription)

    def reset_group(self, subject: str, group: str, position: str | int | datetime | Position) -> None:
        """Move the group to a position in all partitions. GroupConflict while one of its consumers runs."""
        self._ask(ResetGroup(subject, group, position_text(parse_position(position))), Done)

    def set_order(self, subject: str, group: str, order: Order | str | None) -> None:
        """Decide which order the members of a group keep to, whatever they ask for; None leaves it to them again.

        Members follow a stricter order than they asked for ("partition" is stricter than "key", "key" than "none"):
        they finish what runs, and go on with it. At a weaker one they stop with GroupConflict, since their handlers may
        rely on what they asked for. GroupConflict for a shared group, which keeps no order, and while keys are parked
        unless it is "key". Retries (the group's retry subject) keep what was asked for.
        """
        text = "" if order is None else one_of(Order, "order", order).value
        self._ask(SetOrder(subject, group, text), Done)

    def consume_directly(
        self, subject: str, group: str, member: str, partition: int, offset: int, *, timeout_s: float = 30.0
    ) -> TrialState:
        """Have one member of the group handle one stored message now, for diagnosis, and tell what became of it.

        The handler is called beside whatever runs, with `context.is_direct` and epoch 0; hooks see it. Order is not
        kept, and nothing is committed, counted or moved, whatever the result. `member` is one of
        `describe_group(...).members`, or the beginning of its name (as given to `consumer(name=...)`). NotFound if the
        member or the message is not there, or the member left meanwhile; TrialTimeout if it did not tell in time: the
        handler may run all the same.
        """
        return tried(self._ask, self._clock, subject, group, member, partition, offset, timeout_s)

    # Keys

    def keys(self, subject: str, group: str) -> list[KeyDescription]:
        """The keys of the group that do not go on by themselves (failing, blocked, parked, being resumed), and those
        that somebody asked something of; what lasts longest comes first."""
        return list(self._ask(ListKeys(subject, group), KeyList).keys)

    def describe_key(self, subject: str, group: str, key: str | bytes) -> KeyDetails:
        """One key: its state, what is parked of it, and who asked what of it. NotFound if nothing is the matter.

        Where senders choose the partition and several have trouble with the key, it is the longest trouble.
        """
        return self._ask(DescribeKey(subject, group, encoded_key(key)), KeyDetails)

    def key_head(self, subject: str, group: str, key: str | bytes) -> Message | None:
        """The first message of the key that is not over, from the parking lot or the log. None if it is not there:
        nothing failed or was parked yet, or retention was quicker. NotFound as `describe_key`."""
        return self.head_of(subject, self.describe_key(subject, group, key))

    def head_of(self, subject: str, details: KeyDetails) -> Message | None:
        """As `key_head`, for what `describe_key` has told."""
        if details.parked:
            return unparked(details.parked[0], subject)
        offset = details.description.offset
        if offset is None:
            return None
        reader = self.reader(subject, offset)
        found = reader.read(details.description.partition)
        return found[0] if found and found[0].offset == offset else None

    def park_key(
        self,
        subject: str,
        group: str,
        key: str | bytes,
        *,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Put all messages of the key that are not handled, and all that come, into the key's parking lot, in order.

        The consumer that holds the key's partition does it, when the handler that runs for this key has returned. This
        waits for it, `wait_s` at the most; if it is not done by then, `done_at_ms` is None, and the request stays: the
        same consumer or the next holder of the partition acts upon it. `by` and `why` are kept with the request; `by`
        is user@host unless it is given. `partition` is needed only where senders choose the partition (routing
        "selector"). A repeated request that still waits is the same request. Needs a group that consumes with
        order="key"; others take no notice.
        """
        return steer(self._ask, KeyAction.PARK, subject, group, key, by, why, partition, wait_s)

    def resume_key(
        self,
        subject: str,
        group: str,
        key: str | bytes,
        *,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Let a parked or blocked key run again: what waits, in order, before any newer message of the key. Attempts
        are counted from the beginning.

        Done means that it has begun, not that the lot is empty. Waits, and stays if it is not done in time, as
        `park_key`. NotFound if the key is neither parked nor blocked.
        """
        return steer(self._ask, KeyAction.RESUME, subject, group, key, by, why, partition, wait_s)

    def skip_key(
        self,
        subject: str,
        group: str,
        key: str | bytes,
        *,
        offset: int | None = None,
        by: str | None = None,
        why: str = "",
        partition: int | None = None,
        wait_s: float = 10.0,
    ) -> RequestState:
        """Drop the first message of a failing, blocked or parked key for this group, with a record of who and why.

        It stays in the log. A key that failed goes on with its next message; a parked one stays parked. Give the
        `offset` that you have seen as the first one: then InvalidInput, which names the present one, is raised if that
        is not the first any more, and a repeated skip drops nothing else. Waits, and stays if it is not done in time,
        as `park_key`; it is then still only for that message. NotFound if nothing of the key failed or is parked.
        """
        return steer(self._ask, KeyAction.SKIP, subject, group, key, by, why, partition, wait_s, offset)

    # Dead letters

    def dead_letters(self, subject: str, group: str) -> DeadLetters:
        """The messages that the group has given up on this subject (`on_exhausted="dead-letter"`): to look at, and to
        drive again. NotFound if the subject or the group is not there."""
        self._check_open()
        return DeadLetters(self._node, subject, group)

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
