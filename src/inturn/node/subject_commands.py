"""Where a group may move messages that failed: its own retry and dead-letter subjects, and nowhere else.

Growing a subject: what may grow, and into what.

Subjects: made, opened with their logs, found and described.

Growth: a subject gets more partitions while it is used.

Derived subjects: the retry and dead-letter subjects of a group, and what is moved there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from inturn.broker.broker import Broker
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Membership
from inturn.model.errors import GroupConflict, InvalidInput
from inturn.model.offsets import parse_position
from inturn.model.routing import check_partition_count
from inturn.model.settings import GroupMode, Keyless, Limits, Routing, Strategy, one_of
from inturn.model.subject import RESERVED, Subject, check_name, dead_letter_subject, retry_subject
from inturn.model.time import Clock
from inturn.node.acceptance import AnswerTable, Intake, Try
from inturn.node.catalog import Forward, Known, check_mode
from inturn.node.long_polls import LongPolls, Waking, of_log
from inturn.protocol.commands import (
    Answer,
    Append,
    Appended,
    CreateSubject,
    DescribeSubject,
    Done,
    FindSubject,
    GrowSubject,
    ListSubjects,
    Move,
    Offsets,
    OpenDeadLetters,
    OpenRetry,
    Reply,
    ResolvePosition,
    SubjectDescription,
    SubjectList,
)
from inturn.protocol.observer import Observer
from inturn.store.cluster import LOCAL_BROKER_GROUP
from inturn.store.groups import GroupRecord
from inturn.store.subjects import Subjects


def origin_of(group: str, subject: str) -> str:
    """The subject that the group's messages come from in the first place: its retry subject is only a detour."""
    return subject.removeprefix(retry_subject(group, ""))


def check_target(group: GroupRecord, to_subject: str) -> None:
    """Raise InvalidInput unless failed messages of the group may be moved there."""
    origin = origin_of(group.name, group.subject)
    allowed = (retry_subject(group.name, origin), dead_letter_subject(group.name, origin))
    if to_subject not in allowed:
        raise InvalidInput(
            f"subject {to_subject!r}: failed messages of group {group.name!r} move to "
            f"{allowed[0]!r} or {allowed[1]!r} only"
        )


def check_growth(subject: Subject, partition_count: int) -> None:
    """Raise InvalidInput for a subject that cannot grow, or not into so many partitions."""
    check_partition_count(subject.name, partition_count)
    if subject.name.startswith(RESERVED):
        raise InvalidInput(f"subject {subject.name!r} belongs to a group, and has as many partitions as that needs")
    if subject.routing is not Routing.SLOTS:
        raise InvalidInput(
            f"subject {subject.name!r} is routed by a selector, which would choose differently among more partitions, "
            "and no order would hold; create another subject, and have its consumers finish this one first"
        )
    if partition_count < subject.partition_count:
        raise InvalidInput(
            f"subject {subject.name!r} has {subject.partition_count} partitions already; it can grow, not shrink: "
            f"give {subject.partition_count + 1} or more"
        )


class SubjectCommands:
    """`sealed_for` tells the route version before which the logs of a subject take no appends."""

    def __init__(
        self,
        known: Known,
        rows: Subjects,
        registry: BrokerRegistry,
        broker: Broker,
        held: LongPolls,
        clock: Clock,
        sealed_for: Callable[[Subject], int],
    ) -> None:
        self._known = known
        self.rows = rows
        self._registry = registry
        self._broker = broker
        self._held = held
        self._clock = clock
        self.sealed_for = sealed_for

    @property
    def answers(self) -> AnswerTable:
        return {
            CreateSubject: self._create,
            FindSubject: lambda command, _: self._known.subject(command.name),
            ListSubjects: lambda _, __: SubjectList(tuple(self._known.subjects.values())),
            DescribeSubject: self._describe,
            ResolvePosition: self._resolve_position,
        }

    def _create(self, command: CreateSubject, _: Try) -> Answer:
        return self.make(
            command.name,
            command.partitions,
            one_of(Routing, "routing", command.routing),
            one_of(Strategy, "strategy", command.strategy),
            command.limits,
            one_of(Keyless, "keyless", command.keyless),
            broker_groups=command.broker_groups,
        )

    def make(
        self,
        name: str,
        partitions: int,
        routing: Routing,
        strategy: Strategy = Strategy.STRICT,
        limits: Limits | None = None,
        keyless: Keyless = Keyless.INDEPENDENT,
        *,
        broker_groups: Sequence[str] = (),
        reserved: bool = False,
    ) -> Subject:
        """Or the one that is there, if it is the same; AlreadyExists. `reserved`: its name may be one of ours."""
        limits = limits if limits is not None else Limits()
        known = self._known.subjects.get(name)
        homes: Sequence[str] = broker_groups
        if known is None or broker_groups:
            homes = self._registry.chosen(partitions, broker_groups, self._known.subjects.values())
        subject = self.rows.create(
            name,
            partitions,
            routing,
            strategy,
            limits,
            self._clock.time_ms(),
            homes or (LOCAL_BROKER_GROUP,),  # where it is, if it is there
            keyless=keyless,
            reserved=reserved,
            is_chosen=bool(broker_groups),
        )
        if subject.name not in self._known.subjects:
            self.open(subject)
        return subject

    def open(self, subject: Subject, first: int = 0) -> None:
        """`first`: the partitions before are open already."""
        self._known.subjects[subject.name] = subject
        for index in self._broker.owned(subject):
            if index < first:
                continue
            log = self._broker.open_log(subject.route.partitions[index])
            log.on_grown(partial(self._held.wake, of_log(subject.name, index)))
            log.seal(subject.name, self.sealed_for(subject))

    def _describe(self, command: DescribeSubject, _: Try) -> Answer:
        subject = self._known.subject(command.name)
        return SubjectDescription(subject, self._broker.describe(subject))

    def _resolve_position(self, command: ResolvePosition, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        return Offsets(self._broker.resolve(subject, parse_position(command.position)))


class GrowthCommands:
    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        broker: Broker,
        membership: Membership,
        wake: Waking,
        clock: Clock,
        observer: Observer | None,
    ) -> None:
        self._known = known
        self._rows = subjects.rows
        self._subjects = subjects
        self._broker = broker
        self._membership = membership
        self._wake = wake
        self._clock = clock
        self._observer = observer

    @property
    def answers(self) -> AnswerTable:
        return {GrowSubject: self._grow}

    def _grow(self, command: GrowSubject, _: Try) -> Answer:
        """Seal the parents, store route and barriers, tell everybody. Before the second step nothing has happened."""
        subject = self.settled(command.name)
        check_growth(subject, command.partitions)
        if command.partitions == subject.partition_count:
            return subject
        barriers = self._broker.seal(subject, subject.route.version + 1)
        try:
            for index in barriers:  # a gate looks at what is below the barrier, and readers see only what is synced
                self._broker.log(subject, index).sync()
            grown = self.store(subject, command.partitions, barriers)
        except BaseException:
            if not self.is_stored(subject):
                self._broker.seal(subject, subject.route.version)
            raise
        self.grown(subject, grown)
        return grown

    def settled(self, name: str) -> Subject:
        """As it is stored: perhaps the database took a growth, and its answer was lost."""
        subject, stored = self._known.subject(name), self._rows.get(name)
        if stored.route.version > subject.route.version:
            self.grown(subject, stored)
            return stored
        return subject

    def is_stored(self, subject: Subject) -> bool:
        """Whether a growth of the subject as it was has come to something."""
        return self._rows.get(subject.name).route.version != subject.route.version

    def store(self, subject: Subject, partition_count: int, barriers: Mapping[int, int]) -> Subject:
        """Durable, and known to nobody yet."""
        return self._rows.grow(subject.route.grown(partition_count, barriers), self._clock.time_ms())

    def grown(self, before: Subject, subject: Subject) -> None:
        """Go on with it as it is now, and let all members hear of it."""
        self._broker.seal(before, self._subjects.sealed_for(subject))
        if self._observer is not None:
            self._observer.grown(subject)
        self._subjects.open(subject, before.partition_count)
        for group in self._membership.groups():
            if group.subject == subject.name:
                self._membership.reassign(group, subject)
                self._wake.announce(group)


class DerivedSubjectCommands:
    """`forward` is for a broker of a cluster; without it, only what is here can be moved to."""

    def __init__(
        self,
        known: Known,
        subjects: SubjectCommands,
        broker: Broker,
        intake: Intake,
        held: LongPolls,
        forward: Forward | None,
    ) -> None:
        self._known = known
        self._subjects = subjects
        self._broker = broker
        self._intake = intake
        self._held = held
        self._forward = forward

    @property
    def answers(self) -> AnswerTable:
        return {OpenRetry: self._open_retry, OpenDeadLetters: self._open_dead_letters}

    def _open_retry(self, command: OpenRetry, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        name = retry_subject(check_name("group", command.group), command.subject)
        known = self._known.subjects.get(name)
        if known is not None and known.partition_count != command.levels:
            raise GroupConflict(
                command.group,
                f"its retry subject has {known.partition_count} delays, this consumer asks for {command.levels}; "
                "use as many RetryDelays.levels_s",
            )
        return known if known is not None else self._made(name, command.levels, Routing.SELECTOR, subject)

    def _open_dead_letters(self, command: OpenDeadLetters, _: Try) -> Answer:
        subject = self._known.subject(command.subject)
        name = dead_letter_subject(check_name("group", command.group), origin_of(command.group, subject.name))
        known = self._known.subjects.get(name)
        return known if known is not None else self._made(name, 1, Routing.SLOTS, subject, subject.limits)

    def _made(
        self, name: str, partitions: int, routing: Routing, subject: Subject, limits: Limits | None = None
    ) -> Subject:
        """In the broker group of the first partition of the subject that it is for."""
        home = (subject.route.partitions[0].broker_group,)
        return self._subjects.make(name, partitions, routing, limits=limits, broker_groups=home, reserved=True)

    def move(self, command: Move, reply: Reply) -> None:
        """Answered when it is durable, as an append; raises what is wrong with it before. Call it without the lock."""
        with self._held.lock:
            self._intake.check(command)
            group = self._known.group(command.subject, command.group)
            check_target(group, command.to_subject)
            target = self._known.subject(command.to_subject)
            if not group.is_exclusive:
                check_mode(group, GroupMode.SHARED)
                self._broker.log(self._known.subject(command.subject), command.partition)
                self._broker.sharing.check(group, command.partition, command.epoch, command.member, command.receipts)
        self._store(group, target, command, reply)

    def _store(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        """A derived subject is in one broker group, for all partitions of the subject that it is for."""
        is_there = 0 <= command.to_partition < target.partition_count
        if self._forward is None or not is_there or command.to_partition in self._broker.owned(target):
            self._intake.check_stores()
            self._broker.move(group, target, command, reply)
            return
        self._broker.check_mover(group, command)
        self._forward(
            target.route.partitions[command.to_partition].broker_group,
            Append(command.to_subject, command.to_partition, command.batch),
            lambda answer: reply(Done() if isinstance(answer, Appended) else answer),
        )
