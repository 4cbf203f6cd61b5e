"""Statistics of a node: logs, groups, waiting commands; and which parts of the node are ready.

Cheap enough to collect every few seconds. The node's lock is held once and briefly, for the figures in memory. The
database is read in pages, without the lock. So the figures are of slightly different moments.
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
from inturn.node.catalog import Catalog
from inturn.node.long_polls import LongPolls
from inturn.protocol.commands import ReadyPart, RestlessLease
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
    appended_count: int  # messages, since the log was opened
    appended_bytes: int
    state: str  # one of LOG_STATES


@dataclass(frozen=True, slots=True)
class PlaceFigures:
    """The progress of a group in a partition. There is none for broadcast groups."""

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
    lease_count: int  # live leases
    key_states: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeFigures:
    logs: list[LogFigures]
    places: list[PlaceFigures]
    groups: list[GroupFigures]
    held: Mapping[str, int]  # waiting commands, by kind
    lease_changes: Mapping[str, int]


@dataclass(slots=True)
class _Memory:
    """The figures that need no database."""

    subjects: list[Subject]
    groups: list[GroupRecord]
    member_counts: dict[int, int]
    lease_counts: dict[int, int]
    held: dict[str, int]
    lease_changes: dict[str, int] = field(default_factory=dict)


class Statistics:
    """Any thread may call. `broker` None: the node has no logs and no leases."""

    def __init__(
        self,
        catalog: Catalog,
        broker: Broker | None,
        membership: Membership,
        held: LongPolls,
        rows: StatisticsRows,
    ) -> None:
        self._catalog = catalog
        self._broker = broker
        self._membership = membership
        self._held = held
        self._rows = rows

    def take(self) -> NodeFigures:
        """Raise StorageError if the database does not answer."""
        memory = self._from_memory()
        logs = self._logs(memory.subjects)
        ends = {(one.subject, one.partition): one.end_offset for one in logs}
        by_id = {group.id: group for group in memory.groups}
        places = []
        for place in self._rows.places():
            group = by_id.get(place.group_id)
            end_offset = None if group is None else ends.get((group.subject, place.partition))
            if group is None or end_offset is None:  # newer than the figures in memory
                continue
            if group.mode is not GroupMode.BROADCAST:  # only its members know the progress of a broadcast group
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
        """The logs are ready while at least one log takes appends; `why` counts the others."""
        with self._held.lock:
            subjects = list(self._catalog.subjects.values())
        states = [one.state for one in self._logs(subjects)]
        troubled_count = sum(state != "ok" for state in states)
        why = f"{troubled_count} of {len(states)} logs are stopped or damaged" if troubled_count else ""
        logs = ReadyPart("logs", not states or troubled_count < len(states), why)
        try:
            self._rows.check()
        except InturnError as error:
            return logs, ReadyPart("state", False, str(error))
        return logs, ReadyPart("state", True)

    def live_lease_count(self) -> int:
        with self._held.lock:
            return 0 if self._broker is None else self._broker.leases.live_count()

    def unstable_leases(self) -> tuple[RestlessLease, ...]:
        """Call under the node's lock."""
        return () if self._broker is None else self._broker.leases.changes.unstable()

    def _from_memory(self) -> _Memory:
        leases = None if self._broker is None else self._broker.leases
        with self._held.lock:
            return _Memory(
                list(self._catalog.subjects.values()),
                list(self._catalog.groups.values()),
                self._membership.counts(),
                {} if leases is None else leases.live_counts(),
                self._held.counts(),
                {} if leases is None else dict(leases.changes.counts),
            )

    def _logs(self, subjects: list[Subject]) -> list[LogFigures]:
        """Needs no lock: each figure of a log is a separate field."""
        broker = self._broker
        if broker is None:
            return []
        return [
            _figures(subject.name, index, broker.log(subject, index))
            for subject in subjects
            for index in broker.owned(subject)
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
