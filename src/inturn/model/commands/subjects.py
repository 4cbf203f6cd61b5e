"""Subjects: making them, growing them, looking at them."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command
from inturn.model.route import Partition
from inturn.model.settings import Limits
from inturn.model.subject import Subject


class CreateSubject(Command, frozen=True, gc=False):
    """Answered with the Subject. The same again is no error; other settings are (AlreadyExists)."""

    name: str
    partitions: int
    routing: str
    strategy: str
    limits: Limits
    keyless: str = "independent"
    # Of the partitions, in turns; none given: over two that are available, or one if there is one.
    broker_groups: tuple[str, ...] = ()


class GrowSubject(Command, frozen=True, gc=False):
    """Give a subject that routes by slots more partitions. Answered with the Subject; the same again is no error."""

    name: str
    partitions: int


class FindSubject(Command, frozen=True, gc=False):
    name: str


class ListSubjects(Command, frozen=True, gc=False):
    pass


class SubjectList(msgspec.Struct, frozen=True, gc=False):
    subjects: tuple[Subject, ...]


class DescribeSubject(Command, frozen=True, gc=False):
    name: str


class PartitionDescription(msgspec.Struct, frozen=True, gc=False):
    index: int
    partition: Partition
    start_offset: int
    end_offset: int
    size_bytes: int
    state: str  # "ok", "stopped", "damaged"
    appended_per_s: float = 0.0  # messages, over the last ten seconds


class SubjectDescription(msgspec.Struct, frozen=True, gc=False):
    subject: Subject
    partitions: tuple[PartitionDescription, ...]
