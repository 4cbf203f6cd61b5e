"""A node made of services: submit, long polls, statistics and life cycle, without the commands themselves.

A node in this process and each server of a cluster add the services of their role. A command without a service is
refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from inturn.broker.broker import Broker
from inturn.log.engine import LogEngine
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Holders, Membership
from inturn.model.errors import Closed, InturnError
from inturn.model.offsets import Position
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject
from inturn.model.time import Clock, Timers
from inturn.node.acceptance import (
    NEW_WORK,
    Admission,
    AnswerTable,
    CommandService,
    Dispatcher,
    Try,
    not_for_this_server,
)
from inturn.node.catalog import Catalog
from inturn.node.group_commands import GroupCommands, MemberCommands
from inturn.node.key_commands import BrokerGroupCommands
from inturn.node.long_polls import LongPolls, WakeUps, waits_for
from inturn.node.statistics import Statistics
from inturn.protocol.commands import (
    Answer,
    Command,
    DescribeNode,
    DiskRoom,
    Heartbeat,
    NodeDescription,
    ReadyPart,
    Reply,
)
from inturn.protocol.request import session_of
from inturn.store.cluster import BrokerGroupRows
from inturn.store.database import Database
from inturn.store.groups import Groups, Members
from inturn.store.statistics import StatisticsRows
from inturn.store.subjects import Subjects
from inturn.version import SOFTWARE


class ServiceNode:
    """Answers commands in the caller's thread, with two exceptions: an append is answered when the append is durable,
    and a command with `wait_s` is held back until an answer exists or the time is over.

    A single lock guards all state but the logs; each log has a lock. Replies are called without the lock. The
    lock order is node, then log; never the other way round.

    `broker` None: the node has no logs. `holders` returns the members that hold leases of a group. `room` returns the
    free space of the disk. `refusal` makes the error for a command without a service. Every node lists groups and
    broker groups, sets the state of broker groups, and describes itself; `serve` adds all other services.
    """

    members: MemberCommands | None = None  # None: the node hears no members

    def __init__(
        self,
        database: Database,
        engine: LogEngine,
        clock: Clock,
        timers: Timers,
        lease: LeaseSettings,
        *,
        room: Callable[[], DiskRoom | None],
        broker: Broker | None,
        holders: Holders,
        refusal: Callable[[Command], InturnError] = not_for_this_server,
    ) -> None:
        self._engine = engine
        self.clock = clock
        self.timers = timers
        self.lease = lease
        self._room = room
        self._started_at_s = clock.monotonic()
        self.subject_rows, self.group_rows, self.member_rows = Subjects(database), Groups(database), Members(database)
        self.catalog = Catalog()
        self.membership = Membership(self.member_rows, clock, lease, holders, self.group_rows.orders())
        self.registry = BrokerRegistry(BrokerGroupRows(database), clock, "" if broker is None else broker.broker_group)
        self.admission = Admission(broker)
        self._dispatcher = Dispatcher(self.admission, refusal)
        self.held = LongPolls(threading.RLock(), clock, timers, self._dispatcher.answer, self._dispatcher.due_s)
        self.wake = WakeUps(self.held, self.membership)
        self.statistics = Statistics(self.catalog, broker, self.membership, self.held, StatisticsRows(database))
        resolve = _first_offsets if broker is None else broker.resolve
        self.groups = GroupCommands(self.catalog, self.group_rows, self.membership, self.wake, clock, resolve)
        self.broker_groups = BrokerGroupCommands(self.catalog, self.registry, broker, self.wake)
        self.serve(self.groups, self.broker_groups, _DescribeCommands(self._describe))

    def serve(self, *services: CommandService) -> None:
        """Answer the commands of these services. Call before the first command."""
        self._dispatcher.add(*services)

    @property
    def lock(self) -> threading.RLock:
        """Guards all state in memory but the logs."""
        return self.held.lock

    # Commands

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        submit = self._dispatcher.submits.get(type(command))
        if submit is None:
            self.answer(command, reply)
            return
        try:
            submit(command, reply)
        except InturnError as error:
            reply(error)

    def answer(self, command: Command, reply: Reply) -> None:
        """Answer under the lock, by the answer tables of the services. Hold the command back without an answer yet."""
        answer: Answer | InturnError | None
        try:
            wrapper = self._dispatcher.wrappers.get(type(command))
            if wrapper is not None:
                reply = wrapper(command, reply)
            with self.held.lock:
                answer = self._dispatcher.answer(command, Try.FIRST)
                if answer is None:
                    self._hold(command, reply)
                    return
        except InturnError as error:
            answer = error
        reply(answer)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        """As `submit`, for a client in another process: the client's consumers outlive this node."""
        check = self._dispatcher.remote_checks.get(type(command))
        if check is not None:
            try:
                check(command)
            except InturnError as error:
                reply(error)
                return
        self.submit(command, reply)
        if type(command) is Heartbeat and self.members is not None:
            with self.held.lock:
                self.members.note_session(command, session_of(reply))

    def _hold(self, command: Command, reply: Reply) -> None:
        wait_s: float = command.wait_s  # type: ignore[attr-defined]
        if isinstance(command, Heartbeat):
            # A member that waits for the answer sends no heartbeat: answer well before the member counts as silent.
            wait_s = min(wait_s, self.lease.life_s / 3)
        self.held.hold(command, reply, waits_for(command), wait_s)

    # State

    def readiness(self) -> tuple[ReadyPart, ...]:
        """Which parts of the node can work. Blocks while the node is busy."""
        refusal = self.admission.refusal
        return ReadyPart("work", not refusal, refusal), *self.statistics.ready_parts()

    @property
    def held_count(self) -> int:
        """The number of live leases that consumers have to release before the node ends."""
        return self.statistics.live_lease_count()

    def _describe(self, _: DescribeNode, __: Try) -> Answer:
        up_s = self.clock.monotonic() - self._started_at_s
        unstable = self.statistics.unstable_leases()
        return NodeDescription(SOFTWARE, self.clock.time_ms(), up_s, self.readiness(), self._room(), unstable)

    # Life cycle

    def load_groups(self) -> None:
        """Read the groups of the catalog from the database."""
        for group in self.group_rows.all():
            self.catalog.groups[group.subject, group.name] = group

    def hung_up(self, session: object) -> None:
        """The stream of a server session is gone: drop the waiting commands of the session."""
        with self.held.lock:
            if self.admission.is_closed:
                return
            self.held.abandon(lambda reply: session_of(reply) is session)
            if self.members is not None:
                self.members.hung_up(session)

    def stop_gently(self) -> None:
        """Accept no new work, and ask all consumers to release their partitions."""
        with self.held.lock:
            self.admission.is_stopping = True
            for group in self.membership.groups():
                self.wake.announce(group)
            waiting = self.held.keys(NEW_WORK)
        for key in waiting:
            self.held.wake(key)

    def close(self) -> None:
        """Answer waiting commands with Closed, then close the logs. The caller closes the database."""
        with self.held.lock:
            if self.admission.is_closed:
                return
            self.admission.is_closed = True
        self.held.close(lambda: Closed("node"))
        self._engine.close()

    def disown(self) -> None:
        """In a forked child: refuse all commands, and touch no files. Threads of the parent may hold the locks."""
        self.held.lock = threading.RLock()
        self.admission.is_closed = True


class _DescribeCommands(CommandService):
    def __init__(self, describe: Callable[[DescribeNode, Try], Answer]) -> None:
        self._describe = describe

    @property
    def answers(self) -> AnswerTable:
        return {DescribeNode: self._describe}


def _first_offsets(subject: Subject, _: Position) -> tuple[int, ...]:
    return (0,) * subject.partition_count
