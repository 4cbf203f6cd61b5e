"""The node: broker and meta in one process, behind one `submit`.

Commands come in here, and are given to whoever answers those of their kind: see the tables of the other modules.
They are answered in the caller's thread, but for two things: an append is answered when it is durable, and a command
with `wait_s` is held back until there is something to say. One lock guards everything but the logs, which have their
own; replies are called outside of it. The lock order is node, then log; never the other way round.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from inturn.broker.broker import Broker
from inturn.broker.keys import Keys
from inturn.broker.leases import LeaseTable
from inturn.broker.pull_filters import CuttingReply, FilteringReply
from inturn.log.engine import LogEngine
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Membership
from inturn.model.errors import Closed, InturnError, InvalidInput
from inturn.model.message import tag_filter
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject
from inturn.model.time import Clock, Timers
from inturn.node.acceptance import NEW_WORK, AnswerTable, Intake, Try
from inturn.node.catalog import NOBODY_ELSE, Known, Neighbours
from inturn.node.group_commands import GroupCommands, HeartbeatCommands, LeavingCommands
from inturn.node.key_commands import BrokerGroupCommands, SteeringCommands, TrialCommands, Trials
from inturn.node.long_polls import LongPolls, Waking, waits_for
from inturn.node.partition_commands import ConsumingCommands, SharedGroupCommands
from inturn.node.statistics import Survey
from inturn.node.subject_commands import DerivedSubjectCommands, GrowthCommands, SubjectCommands
from inturn.protocol.commands import (
    Answer,
    Append,
    Command,
    DescribeNode,
    DiskRoom,
    Fetch,
    Heartbeat,
    Move,
    NodeDescription,
    OpenProducer,
    ProducerOpened,
    Pull,
    Read,
    ReadyPart,
    Reply,
)
from inturn.protocol.observer import Observer
from inturn.protocol.reply import session_of
from inturn.store.cluster import LOCAL_BROKER_GROUP, BrokerGroupRows
from inturn.store.database import Database
from inturn.store.groups import Groups, Members
from inturn.store.keys import Failures, KeyRequests
from inturn.store.leases import LeaseRows, ProgressRows
from inturn.store.offsets import GateRows, Offsets
from inturn.store.parking_lots import Lots
from inturn.store.producers import Producers
from inturn.store.statistics import SurveyRows
from inturn.store.subjects import Subjects
from inturn.version import SOFTWARE


class InProcessNode:
    """`local` says that its consumers live in this very process: when it is opened again, they are gone. `room` tells
    how full the disk is. `broker_group` is the one whose logs it has; none at all for meta, which has no logs."""

    def __init__(
        self,
        database: Database,
        engine: LogEngine,
        clock: Clock,
        timers: Timers,
        lease: LeaseSettings | None = None,
        observer: Observer | None = None,
        *,
        local: bool = True,
        room: Callable[[], DiskRoom | None] = lambda: None,
        broker_group: str = LOCAL_BROKER_GROUP,
        neighbours: Neighbours = NOBODY_ELSE,
    ) -> None:
        lease = lease if lease is not None else LeaseSettings()
        self._engine = engine
        self._clock = clock
        self._timers = timers
        self._room = room
        self._started_at_s = clock.monotonic()
        members, groups, subjects = Members(database), Groups(database), Subjects(database)
        leases = LeaseTable(LeaseRows(database), clock, lease, observer, local=local)
        holders = neighbours.holders if neighbours.holders is not None else leases.holders
        self.known = Known()
        self.membership = Membership(members, clock, lease, holders, groups.orders())
        self.registry = BrokerRegistry(BrokerGroupRows(database), clock, broker_group)
        self.broker = _broker(database, engine, leases, clock, observer, broker_group)
        self.intake = Intake(self.broker)
        self._held = LongPolls(threading.RLock(), clock, timers, self._answer, self._due_s)
        self.waking = Waking(self._held, self.membership)
        self.survey = Survey(self.known, self.broker, self.membership, self._held, SurveyRows(database))
        self._divide(subjects, groups, observer, neighbours)
        if broker_group:
            self.broker.state = self.registry.get(broker_group).state
        members.all_offline(clock.time_ms())
        for group in groups.all():
            self.known.groups[group.subject, group.name] = group
        leases.load({group.id: group for group in self.known.groups.values()})
        for subject in subjects.all():
            self.subjects.open(subject)

    def _divide(self, subjects: Subjects, groups: Groups, observer: Observer | None, neighbours: Neighbours) -> None:
        """Who answers which commands."""
        known, broker, membership, registry = self.known, self.broker, self.membership, self.registry
        held, wake, intake, clock = self._held, self.waking, self.intake, self._clock
        trials = Trials()
        self.subjects = SubjectCommands(known, subjects, registry, broker, held, clock, neighbours.sealed_for)
        self.growth = GrowthCommands(known, self.subjects, broker, membership, wake, clock, observer)
        self.derived = DerivedSubjectCommands(known, self.subjects, broker, intake, held, neighbours.forward)
        self.groups = GroupCommands(known, groups, broker, membership, wake, clock)
        self.leaving = LeavingCommands(known, membership, broker, held, wake, intake, clock, self._timers)
        self.steering = SteeringCommands(known, broker, membership, wake)
        self.broker_groups = BrokerGroupCommands(known, registry, broker, wake)
        consuming = ConsumingCommands(known, broker, held, wake, clock)
        shared = SharedGroupCommands(known, broker, wake)
        heartbeats = HeartbeatCommands(
            known, self.groups, membership, broker.keys, trials, wake, intake, self.leaving.watch
        )
        # Meta has no logs to look at: whoever asks it for a trial has asked a broker before.
        check_stored = broker.check_stored if broker.broker_group else _is_checked
        self.answers: AnswerTable = {
            OpenProducer: lambda command, _: ProducerOpened(*broker.producer_ids.open(command.name, command.nonce)),
            **consuming.answers,
            **shared.answers,
            **heartbeats.answers,
            **self.leaving.answers,
            **self.subjects.answers,
            **self.growth.answers,
            **self.derived.answers,
            **self.groups.answers,
            **self.steering.answers,
            **TrialCommands(known, trials, membership, wake, check_stored).answers,
            **self.broker_groups.answers,
            DescribeNode: self._describe,
        }
        self._dues = consuming.dues | shared.dues
        self._of_other_processes = consuming.of_other_processes

    @property
    def lock(self) -> threading.RLock:
        """What is in memory is looked at and changed under it."""
        return self._held.lock

    # Commands

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        answer: Answer | InturnError | None
        try:
            if type(command) is Append:
                self.intake.check(command)
                self.broker.append(self.known.subject(command.subject), command, reply)
                return
            if type(command) is Move:
                self.derived.move(command, reply)
                return
            if isinstance(command, Pull | Read) and command.tags and (tags := tag_filter(command.tags)) is not None:
                reply = FilteringReply(reply, tags)
            elif type(command) is Fetch:
                reply = CuttingReply(reply)
            with self._held.lock:
                answer = self._answer(command, Try.FIRST)
                if answer is None:
                    self._hold(command, reply)
                    return
        except InturnError as error:
            answer = error
        reply(answer)

    def submit_remote(self, command: Command, reply: Reply) -> None:
        """As `submit`, for a client in another process: its consumers outlive this node."""
        before = self._of_other_processes.get(type(command))
        if before is not None:
            try:
                before(command)
            except InturnError as error:
                reply(error)
                return
        self.submit(command, reply)
        if type(command) is Heartbeat:
            with self._held.lock:
                self.leaving.note_stream(command, session_of(reply))

    def _answer(self, command: Command, attempt: Try) -> Answer | None:
        """None: nothing to say yet. The last try always gives an answer or an error."""
        self.intake.check(command)
        answer = self.answers.get(type(command))
        if answer is None:
            raise InvalidInput(
                f"{type(command).__name__} is not for this server: it is another part of a cluster, or none"
            )
        return answer(command, attempt)

    def _hold(self, command: Command, reply: Reply) -> None:
        wait_s: float = command.wait_s  # type: ignore[attr-defined]
        if isinstance(command, Heartbeat):
            # A member that waits for its answer is silent: let it speak well before its time is over.
            wait_s = min(wait_s, self.broker.leases.life_s / 3)
        self._held.hold(command, reply, waits_for(command), wait_s)

    def _due_s(self, command: Command) -> float | None:
        due_s = self._dues.get(type(command))
        return None if due_s is None else due_s(command)

    # How it is

    def readiness(self) -> tuple[ReadyPart, ...]:
        """Which of its parts can do their work. Waits while the node is busy."""
        refusal = self.intake.refusal
        return ReadyPart("work", not refusal, refusal), *self.survey.ready_parts()

    @property
    def held_count(self) -> int:
        """How many leases are live."""
        with self._held.lock:
            return self.broker.leases.live_count()

    def _describe(self, _: DescribeNode, __: Try) -> Answer:
        up_s = self._clock.monotonic() - self._started_at_s
        restless = self.broker.leases.changes.restless()
        return NodeDescription(SOFTWARE, self._clock.time_ms(), up_s, self.readiness(), self._room(), restless)

    # The end

    def hung_up(self, session: object) -> None:
        """A client is gone, or its stream is: nothing is answered to it any more."""
        with self._held.lock:
            if self.intake.is_closed:
                return
            self._held.abandon(lambda reply: session_of(reply) is session)
            self.leaving.hung_up(session)

    def stop_gently(self) -> None:
        """Take no new work, and ask all consumers to give their partitions back."""
        with self._held.lock:
            self.intake.is_stopping = True
            for group in self.membership.groups():
                self.waking.announce(group)
            waiting = self._held.keys(NEW_WORK)
        for key in waiting:
            self._held.wake(key)

    def close(self) -> None:
        """Answer what is held back with Closed, then close the logs. The database stays the caller's."""
        with self._held.lock:
            if self.intake.is_closed:
                return
            self.intake.is_closed = True
        self._held.close(lambda: Closed("node"))
        self._engine.close()

    def disown(self) -> None:
        """In a forked child: refuse everything, touch nothing. The locks may be held by threads that are not here."""
        self._held.lock = threading.RLock()
        self.intake.is_closed = True


def _broker(
    database: Database,
    engine: LogEngine,
    leases: LeaseTable,
    clock: Clock,
    observer: Observer | None,
    broker_group: str,
) -> Broker:
    return Broker(
        engine,
        Offsets(database),
        ProgressRows(database),
        Producers(database),
        leases,
        Keys(Failures(database), Lots(database), KeyRequests(database), clock),
        GateRows(database),
        clock,
        observer,
        broker_group,
    )


def _is_checked(subject: Subject, partition: int, offset: int) -> None: ...
