"""Subjects: made, opened with their logs, found and described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from inturn.broker.broker import Broker
from inturn.meta.broker_registry import BrokerRegistry
from inturn.model.clock import Clock
from inturn.model.commands import (
    Answer,
    CreateSubject,
    DescribeSubject,
    FindSubject,
    ListSubjects,
    Offsets,
    ResolvePosition,
    SubjectDescription,
    SubjectList,
)
from inturn.model.position import parse_position
from inturn.model.settings import Keyless, Limits, Routing, Strategy, one_of
from inturn.model.subject import Subject
from inturn.node.answering import AnswerTable, Try
from inturn.node.known import Known
from inturn.node.long_polls import LongPolls
from inturn.node.waking import of_log
from inturn.state.node_role import LOCAL_BROKER_GROUP
from inturn.state.subjects import Subjects


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
