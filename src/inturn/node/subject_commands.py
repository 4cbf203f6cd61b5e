"""Commands about subjects: create, find, describe, grow, derived subjects; and appends and moves to their logs.

A derived subject is the retry or the dead-letter subject of a group. A group moves failed messages to its own derived
subjects only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeAlias

from inturn.broker.broker import Broker
from inturn.meta.broker_registry import BrokerRegistry
from inturn.meta.membership import Membership
from inturn.model.errors import BrokerGroupClosed, GroupConflict, InvalidInput
from inturn.model.offsets import parse_position
from inturn.model.routing import check_partition_count
from inturn.model.settings import BrokerGroupState, GroupMode, Keyless, Limits, Routing, Strategy, one_of
from inturn.model.subject import RESERVED, Subject, check_name, dead_letter_subject, retry_subject
from inturn.model.time import Clock
from inturn.node.acceptance import Admission, AnswerTable, CommandService, SubmitTable, Try
from inturn.node.catalog import Catalog, check_mode
from inturn.node.long_polls import LongPolls, WakeUps, of_log
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

# Sends a batch to the broker of another broker group.
Forward: TypeAlias = Callable[[str, Append, Reply], None]


def origin_of(group: str, subject: str) -> str:
    """The subject that the messages were first sent to: the subject of a retry subject, or the subject itself."""
    return subject.removeprefix(retry_subject(group, ""))


def check_target(group: GroupRecord, to_subject: str) -> None:
    """Raise InvalidInput unless the group may move failed messages to this subject."""
    origin = origin_of(group.name, group.subject)
    allowed = (retry_subject(group.name, origin), dead_letter_subject(group.name, origin))
    if to_subject not in allowed:
        raise InvalidInput(
            f"subject {to_subject!r}: failed messages of group {group.name!r} move to "
            f"{allowed[0]!r} or {allowed[1]!r} only"
        )


def check_growth(subject: Subject, partition_count: int) -> None:
    """Raise InvalidInput for a subject that cannot grow, or not to this number of partitions."""
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


def by_route(subject: Subject) -> int:
    return subject.route.version


class SubjectLogs(CommandService):
    """The logs of subjects at this node: opened, sealed, described.

    `sealed_for` returns the route version below which the logs of a subject take no appends.
    """

    def __init__(
        self, catalog: Catalog, broker: Broker, held: LongPolls, sealed_for: Callable[[Subject], int] = by_route
    ) -> None:
        self._catalog = catalog
        self._broker = broker
        self._held = held
        self._sealed_for = sealed_for

    @property
    def answers(self) -> AnswerTable:
        return {DescribeSubject: self._describe, ResolvePosition: self._resolve_position}

    def open(self, subject: Subject, first: int) -> None:
        """Open the logs of the partitions from index `first` on."""
        for index in self._broker.owned(subject):
            if index < first:
                continue
            log = self._broker.open_log(subject.route.partitions[index])
            log.on_grown(partial(self._held.wake, of_log(subject.name, index)))
            log.seal(subject.name, self._sealed_for(subject))

    def seal(self, before: Subject, subject: Subject) -> None:
        """Seal the logs of the former route for the present route of the subject."""
        self._broker.seal(before, self._sealed_for(subject))

    def _describe(self, command: DescribeSubject, _: Try) -> Answer:
        subject = self._catalog.subject(command.name)
        return SubjectDescription(subject, self._broker.describe(subject))

    def _resolve_position(self, command: ResolvePosition, _: Try) -> Answer:
        subject = self._catalog.subject(command.subject)
        return Offsets(self._broker.resolve(subject, parse_position(command.position)))


class Routes(CommandService):
    """Opens subjects and replaces their routes. `logs` None: the node has no logs, only routes."""

    def __init__(
        self,
        catalog: Catalog,
        logs: SubjectLogs | None,
        membership: Membership,
        wake: WakeUps,
        observer: Observer | None,
    ) -> None:
        self._catalog = catalog
        self._logs = logs
        self._membership = membership
        self._wake = wake
        self._observer = observer

    @property
    def answers(self) -> AnswerTable:
        return {
            FindSubject: lambda command, _: self._catalog.subject(command.name),
            ListSubjects: lambda _, __: SubjectList(tuple(self._catalog.subjects.values())),
        }

    def open(self, subject: Subject, first: int = 0) -> None:
        """`first`: partitions with a lower index are open already."""
        self._catalog.subjects[subject.name] = subject
        if self._logs is not None:
            self._logs.open(subject, first)

    def replace(self, before: Subject, subject: Subject) -> None:
        """The subject has grown: use the new route, open the new logs, notify all members."""
        if self._logs is not None:
            self._logs.seal(before, subject)
        if self._observer is not None:
            self._observer.grown(subject)
        self.open(subject, before.partition_count)
        for group in self._membership.groups():
            if group.subject == subject.name:
                self._membership.reassign(group, subject)
                self._wake.announce(group)


class SubjectCommands(CommandService):
    """Creates subjects."""

    def __init__(
        self, catalog: Catalog, rows: Subjects, registry: BrokerRegistry, routes: Routes, clock: Clock
    ) -> None:
        self._catalog = catalog
        self._rows = rows
        self._registry = registry
        self._routes = routes
        self._clock = clock

    @property
    def answers(self) -> AnswerTable:
        return {CreateSubject: self._create}

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
        """Create the subject, or return an existing equal subject. Raise AlreadyExists for a different subject.

        `reserved`: the name may begin with the reserved prefix.
        """
        limits = limits if limits is not None else Limits()
        known = self._catalog.subjects.get(name)
        homes: Sequence[str] = broker_groups
        if known is None or broker_groups:
            homes = self._registry.chosen(partitions, broker_groups, self._catalog.subjects.values())
        subject = self._rows.create(
            name,
            partitions,
            routing,
            strategy,
            limits,
            self._clock.time_ms(),
            homes or (LOCAL_BROKER_GROUP,),  # not used if the subject exists
            keyless=keyless,
            reserved=reserved,
            is_chosen=bool(broker_groups),
        )
        if subject.name not in self._catalog.subjects:
            self._routes.open(subject)
        return subject


class Growth:
    """The stored part of a growth."""

    def __init__(self, catalog: Catalog, rows: Subjects, routes: Routes, clock: Clock) -> None:
        self._catalog = catalog
        self._rows = rows
        self._routes = routes
        self._clock = clock

    def settled(self, name: str) -> Subject:
        """The subject as stored: the database may have stored a growth whose answer was lost."""
        subject, stored = self._catalog.subject(name), self._rows.get(name)
        if stored.route.version > subject.route.version:
            self._routes.replace(subject, stored)
            return stored
        return subject

    def is_stored(self, subject: Subject) -> bool:
        """Whether a growth is stored. `subject`: before the growth."""
        return self._rows.get(subject.name).route.version != subject.route.version

    def store(self, subject: Subject, partition_count: int, barriers: Mapping[int, int]) -> Subject:
        """Store the growth durably; the node does not use the new route yet."""
        return self._rows.grow(subject.route.grown(partition_count, barriers), self._clock.time_ms())


class GrowthCommands(CommandService):
    """Grows subjects whose logs are all at this node."""

    def __init__(self, growth: Growth, routes: Routes, broker: Broker) -> None:
        self._growth = growth
        self._routes = routes
        self._broker = broker

    @property
    def answers(self) -> AnswerTable:
        return {GrowSubject: self._grow}

    def _grow(self, command: GrowSubject, _: Try) -> Answer:
        """Seal the parents, store route and barriers, notify the members. A failure before the second step undoes the
        first."""
        subject = self._growth.settled(command.name)
        check_growth(subject, command.partitions)
        if command.partitions == subject.partition_count:
            return subject
        barriers = self._broker.seal(subject, subject.route.version + 1)
        try:
            for index in barriers:  # a growth gate reads below the barrier, and readers see only synced messages
                self._broker.log(subject, index).sync()
            grown = self._growth.store(subject, command.partitions, barriers)
        except BaseException:
            if not self._growth.is_stored(subject):
                self._broker.seal(subject, subject.route.version)
            raise
        self._routes.replace(subject, grown)
        return grown


class DerivedSubjectCommands(CommandService):
    """Opens the retry and dead-letter subjects of groups."""

    def __init__(self, catalog: Catalog, subjects: SubjectCommands) -> None:
        self._catalog = catalog
        self._subjects = subjects

    @property
    def answers(self) -> AnswerTable:
        return {OpenRetry: self._open_retry, OpenDeadLetters: self._open_dead_letters}

    def _open_retry(self, command: OpenRetry, _: Try) -> Answer:
        subject = self._catalog.subject(command.subject)
        name = retry_subject(check_name("group", command.group), command.subject)
        known = self._catalog.subjects.get(name)
        if known is not None and known.partition_count != command.levels:
            raise GroupConflict(
                command.group,
                f"its retry subject has {known.partition_count} delays, this consumer asks for {command.levels}; "
                "use as many RetryDelays.levels_s",
            )
        return known if known is not None else self._make(name, command.levels, Routing.SELECTOR, subject)

    def _open_dead_letters(self, command: OpenDeadLetters, _: Try) -> Answer:
        subject = self._catalog.subject(command.subject)
        name = dead_letter_subject(check_name("group", command.group), origin_of(command.group, subject.name))
        known = self._catalog.subjects.get(name)
        return known if known is not None else self._make(name, 1, Routing.SLOTS, subject, subject.limits)

    def _make(
        self, name: str, partitions: int, routing: Routing, subject: Subject, limits: Limits | None = None
    ) -> Subject:
        """Place the derived subject in the broker group of the first partition of its subject."""
        home = (subject.route.partitions[0].broker_group,)
        return self._subjects.make(name, partitions, routing, limits=limits, broker_groups=home, reserved=True)


class MessageCommands(CommandService):
    """Appends and moves: answered when the messages are durable.

    `forward` sends a batch to the broker of another broker group; None: the node moves messages to its own logs only.
    """

    def __init__(
        self, catalog: Catalog, broker: Broker, admission: Admission, held: LongPolls, forward: Forward | None
    ) -> None:
        self._catalog = catalog
        self._broker = broker
        self._admission = admission
        self._held = held
        self._forward = forward

    @property
    def submits(self) -> SubmitTable:
        return {Append: self._append, Move: self._move}

    def _append(self, command: Append, reply: Reply) -> None:
        self._admission.check(command)
        self._broker.append(self._catalog.subject(command.subject), command, reply)

    def _move(self, command: Move, reply: Reply) -> None:
        with self._held.lock:
            self._admission.check(command)
            group = self._catalog.group(command.subject, command.group)
            check_target(group, command.to_subject)
            target = self._catalog.subject(command.to_subject)
            if not group.is_exclusive:
                check_mode(group, GroupMode.SHARED)
                self._broker.log(self._catalog.subject(command.subject), command.partition)
                self._broker.sharing.check(group, command.partition, command.epoch, command.member, command.receipts)
        self._store(group, target, command, reply)

    def _store(self, group: GroupRecord, target: Subject, command: Move, reply: Reply) -> None:
        """A derived subject is in one broker group, for all partitions of its subject."""
        exists = 0 <= command.to_partition < target.partition_count
        if self._forward is None or not exists or command.to_partition in self._broker.owned(target):
            self._check_stores()
            self._broker.move(group, target, command, reply)
            return
        self._broker.check_mover(group, command)
        self._forward(
            target.route.partitions[command.to_partition].broker_group,
            Append(command.to_subject, command.to_partition, command.batch),
            lambda answer: reply(Done() if isinstance(answer, Appended) else answer),
        )

    def _check_stores(self) -> None:
        """Raise BrokerGroupClosed unless this broker group stores messages now."""
        if self._broker.state is not BrokerGroupState.AVAILABLE:
            raise BrokerGroupClosed(self._broker.broker_group, self._broker.state.value)
