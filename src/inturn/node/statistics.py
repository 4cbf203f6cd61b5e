"""A look at all that a node has: its logs, its groups, what it holds back; and which of its parts can do their work.

Made to be taken every few seconds beside the work. The node's lock is held for what is in memory, once and shortly;
the database is read in pages, outside of it. So the figures are of slightly different moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from inturn.broker.broker import Broker, log_state
from inturn.log.engine import Log
from inturn.meta.membership import Membership
from inturn.model.errors import InturnError
from inturn.model.settings import GroupMode
from inturn.model.subject import Subject
from inturn.node.catalog import Known
from inturn.node.long_polls import LongPolls
from inturn.protocol.commands import ReadyPart
from inturn.store.groups import GroupRecord
from inturn.store.statistics import StatisticsRows

LOG_STATES = ("ok", "stopped", "damaged")


@dataclass(frozen=True, slots=True)
class LogFigures:
    subject: str
    partition: int
    start_offset: int
    end_offset: int
    size_bytes: int
    appended_count: int  # messages, since it was opened
    appended_bytes: int
    state: str  # one of LOG_STATES


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """Where a group is in a partition; not of broadcast groups."""

    subject: str
    group: str
    partition: int
    done: int
    lag: int


@dataclass(frozen=True, slots=True)
class GroupFigures:
    subject: str
    group: str
    member_count: int
    lease_count: int  # that are live
    key_states: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeFigures:
    logs: list[LogFigures]
    places: list[PlaceFigures]
    groups: list[GroupFigures]
    held: Mapping[str, int]  # commands that are held back, by kind
    lease_changes: Mapping[str, int]


@dataclass(slots=True)
class _Memory:
    """What is known without the database."""

    subjects: list[Subject]
    groups: list[GroupRecord]
    member_counts: dict[int, int]
    lease_counts: dict[int, int]
    held: dict[str, int]
    lease_changes: dict[str, int] = field(default_factory=dict)


class Survey:
    """Any thread may take it."""

    def __init__(
        self,
        known: Known,
        broker: Broker,
        membership: Membership,
        held: LongPolls,
        rows: StatisticsRows,
    ) -> None:
        self._known = known
        self._broker = broker
        self._membership = membership
        self._held = held
        self._rows = rows

    def take(self) -> NodeFigures:
        """Raises StorageError if the database does not answer."""
        memory = self._look()
        logs = self._logs(memory.subjects)
        ends = {(one.subject, one.partition): one.end_offset for one in logs}
        by_id = {group.id: group for group in memory.groups}
        places = []
        for place in self._rows.places():
            group = by_id.get(place.group_id)
            end_offset = None if group is None else ends.get((group.subject, place.partition))
            if group is None or end_offset is None:  # it came after the look
                continue
            if group.mode is not GroupMode.BROADCAST:  # whose members know what they have done, and nobody else
                lag = max(0, end_offset - place.done)
                places.append(PlaceFigures(group.subject, group.name, place.partition, place.done, lag))
        key_states = {group_id: self._rows.key_states(group_id) for group_id in self._rows.troubled()}
        groups = [
            GroupFigures(
                group.subject,
                group.name,
                memory.member_counts.get(group.id, 0),
                memory.lease_counts.get(group.id, 0),
                key_states.get(group.id, {}),
            )
            for group in memory.groups
        ]
        return NodeFigures(logs, places, groups, memory.held, memory.lease_changes)

    def ready_parts(self) -> tuple[ReadyPart, ReadyPart]:
        """The logs are ready while one of them takes appends: the others are told of, and no reason to go elsewhere."""
        with self._held.lock:
            subjects = list(self._known.subjects.values())
        states = [one.state for one in self._logs(subjects)]
        troubled_count = sum(state != "ok" for state in states)
        why = f"{troubled_count} of {len(states)} logs are stopped or damaged" if troubled_count else ""
        logs = ReadyPart("logs", not states or troubled_count < len(states), why)
        try:
            self._rows.check()
        except InturnError as error:
            return logs, ReadyPart("state", False, str(error))
        return logs, ReadyPart("state", True)

    def _look(self) -> _Memory:
        leases = self._broker.leases
        with self._held.lock:
            return _Memory(
                list(self._known.subjects.values()),
                list(self._known.groups.values()),
                self._membership.counts(),
                leases.live_counts(),
                self._held.counts(),
                dict(leases.changes.counts),
            )

    def _logs(self, subjects: list[Subject]) -> list[LogFigures]:
        """Without the lock: each figure of a log is one field, and changes by itself."""
        return [
            _figures(subject.name, index, self._broker.log(subject, index))
            for subject in subjects
            for index in self._broker.owned(subject)
        ]


def _figures(subject: str, index: int, log: Log) -> LogFigures:
    return LogFigures(
        subject,
        index,
        log.start_offset,
        log.end_offset,
        log.size_bytes,
        log.appended_count,
        log.appended_bytes,
        log_state(log),
    )
