"""Subjects of a cluster: meta has their routes, the brokers their logs."""

from __future__ import annotations

import threading
import uuid

from inturn.cluster.brokers import Brokers, homes_of
from inturn.cluster.errands import ErrandTable, Here
from inturn.meta.growth import check_growth
from inturn.model.commands import (
    Answer,
    CreateSubject,
    DescribeSubject,
    GrowSubject,
    LearnSubject,
    Offsets,
    OpenDeadLetters,
    OpenRetry,
    ResolvePosition,
    Sealed,
    SealSubject,
    SubjectDescription,
)
from inturn.model.position import parse_position
from inturn.model.subject import Subject
from inturn.node.growth import GrowthCommands
from inturn.node.known import Known


class SubjectErrands:
    def __init__(self, known: Known, growth: GrowthCommands, brokers: Brokers, here: Here) -> None:
        self._known = known
        self._growth = growth
        self._brokers = brokers
        self._here = here
        self._growing = threading.Lock()
        self.growths: set[str] = set()  # attempts that may still come to something

    @property
    def errands(self) -> ErrandTable:
        return {
            CreateSubject: self._make,
            OpenRetry: self._make,
            OpenDeadLetters: self._make,
            GrowSubject: self._grow,
            DescribeSubject: self._describe,
            ResolvePosition: self._resolve_position,
        }

    def _make(self, command: CreateSubject | OpenRetry | OpenDeadLetters) -> Answer:
        subject = self._here.ask(command, Subject)
        self._tell(subject)
        return subject

    def _tell(self, subject: Subject) -> None:
        """Brokers that cannot be asked now learn it later by themselves."""
        self._brokers.tell(homes_of(subject), LearnSubject(subject))

    def _grow(self, command: GrowSubject) -> Answer:
        """Seal the parents at all brokers, store route and barriers here, tell the brokers. Before the second step
        nothing has happened, and the seals are broken; after it, it has, whoever dies."""
        with self._growing:
            with self._brokers.lock:
                subject = self._growth.settled(command.name)
            check_growth(subject, command.partitions)
            if command.partitions == subject.partition_count:
                return subject
            self._tell(subject)  # one that was away may not have caught up
            growth = uuid.uuid4().hex
            self.growths.add(growth)
            grown: Subject | None = None
            try:
                grown = self._grown(subject, command.partitions, growth)
            finally:
                if grown is not None or not self._growth.is_stored(subject):
                    self.growths.discard(growth)  # else nobody knows whether it is stored: it stays sealed
            self._tell(grown)
            return grown

    def _grown(self, subject: Subject, partition_count: int, growth: str) -> Subject:
        seal = SealSubject(subject.name, subject.route.version + 1, growth)
        sealed = self._brokers.ask_all(homes_of(subject), seal, Sealed)
        barriers = dict(place for one in sealed.values() for place in one.barriers)
        with self._brokers.lock:
            self._growth.store(subject, partition_count, barriers)
            return self._growth.settled(subject.name)

    def _describe(self, command: DescribeSubject) -> Answer:
        found = self._here.ask(command, SubjectDescription)
        told = self._brokers.ask_all(self._brokers.homes(command.name), command, SubjectDescription)
        partitions = sorted((one for each in told.values() for one in each.partitions), key=lambda one: one.index)
        return SubjectDescription(found.subject, tuple(partitions))

    def _resolve_position(self, command: ResolvePosition) -> Answer:
        parse_position(command.position)
        told = self._brokers.ask_all(self._brokers.homes(command.subject), command, Offsets)
        with self._brokers.lock:
            partitions = self._known.subject(command.subject).route.partitions
        offsets = [told[one.broker_group].offsets for one in partitions]
        return Offsets(tuple(each[index] if index < len(each) else 0 for index, each in enumerate(offsets)))
