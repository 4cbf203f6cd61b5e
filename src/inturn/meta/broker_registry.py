"""The registry of broker groups: state, address and last report of each broker, and the choice for new subjects."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from inturn.model.errors import AlreadyExists, BrokerGroupClosed, InvalidInput, NotFound
from inturn.model.settings import BrokerGroupState
from inturn.model.subject import Subject, check_name
from inturn.model.time import Clock
from inturn.protocol.commands import BrokerGroupDescription, ReportBroker
from inturn.store.cluster import BrokerGroupRow, BrokerGroupRows

DEFAULT_SPREAD = 2  # broker groups of a subject that names none
SILENT_S = 5.0  # a broker without a report for this time counts as dead


class BrokerRegistry:
    """Called under the node's lock. `own` is the node's own broker group; empty for a node without logs."""

    def __init__(self, rows: BrokerGroupRows, clock: Clock, own: str) -> None:
        self._rows = rows
        self._clock = clock
        self._own = own
        self.silent_s = SILENT_S
        self._groups = {row.name: row for row in rows.all()}
        if own and own not in self._groups:
            self._groups[own] = BrokerGroupRow(0, own)  # the row is written with the first change
        # After a restart, every broker has the full time for its next report.
        self._heard_at_s = dict.fromkeys(self._groups, clock.monotonic())

    def report(self, command: ReportBroker) -> BrokerGroupRow:
        """Store the report of a broker. Raise AlreadyExists if the group belongs to a different folder."""
        check_name("broker group", command.broker_group)
        known = self._groups.get(command.broker_group)
        if known is not None and known.folder_id != command.identity:
            raise AlreadyExists("broker group", command.broker_group, f"another folder, at {known.address}")
        now_ms = self._clock.time_ms()
        if known is None:
            known = self._rows.add(command.broker_group, command.address, command.identity, now_ms)
        elif known.address != command.address:
            self._rows.change(known.name, known.state, command.address, now_ms)
            known = replace(known, address=command.address)
        self._groups[known.name] = known
        self._heard_at_s[known.name] = self._clock.monotonic()
        return known

    def set_state(self, name: str, state: BrokerGroupState) -> None:
        """Durably. Raise NotFound for an unknown group."""
        known = self.get(name)
        now_ms = self._clock.time_ms()
        if not known.number:
            known = self._rows.add(name, known.address, known.folder_id, now_ms)
        self._rows.change(name, state, known.address, now_ms)
        self._groups[name] = replace(known, state=state)

    def get(self, name: str) -> BrokerGroupRow:
        known = self._groups.get(name)
        if known is None:
            names = ", ".join(sorted(self._groups)) or "none yet"
            raise NotFound("broker group", name, f"there are: {names}")
        return known

    @property
    def names(self) -> list[str]:
        return sorted(self._groups)

    def name_of(self, number: int) -> str | None:
        return next((row.name for row in self._groups.values() if row.number == number), None)

    def is_heard(self, name: str) -> bool:
        return name == self._own or self._clock.monotonic() < self._heard_at_s.get(name, -math.inf) + self.silent_s

    def describe(self, subjects: Iterable[Subject]) -> tuple[BrokerGroupDescription, ...]:
        """All broker groups, by name."""
        counts = _partition_counts(subjects)
        now_s = self._clock.monotonic()
        return tuple(
            BrokerGroupDescription(
                row.name,
                row.state.value,
                row.address,
                self.is_heard(row.name),
                counts[row.name],
                0.0 if row.name == self._own else now_s - self._heard_at_s[row.name],
            )
            for _, row in sorted(self._groups.items())
        )

    def chosen(self, partition_count: int, asked: Sequence[str], subjects: Iterable[Subject]) -> tuple[str, ...]:
        """The broker groups of a new subject; the partitions take the groups in turn. The result is `asked`, or the two
        available groups with the fewest partitions, or the only available group. Raise NotFound, InvalidInput or
        BrokerGroupClosed."""
        if asked:
            for name in asked:
                self.get(name)
            if len(asked) > partition_count:
                raise InvalidInput(
                    f"{len(asked)} broker groups for {partition_count} partitions; give as many, or fewer groups"
                )
            return tuple(asked)
        counts = _partition_counts(subjects)
        available = [
            row.name
            for row in self._groups.values()
            if row.state is BrokerGroupState.AVAILABLE and self.is_heard(row.name)
        ]
        if not available:
            raise self._none_available()
        by_load = sorted(available, key=lambda name: (counts[name], name))
        return tuple(by_load[: min(DEFAULT_SPREAD, partition_count)])

    def _none_available(self) -> BrokerGroupClosed | NotFound:
        if not self._groups:
            return NotFound("broker group", "", "start a broker: `inturn serve --role broker --broker-group NAME`")
        row = min(self._groups.values(), key=lambda one: one.name)
        return BrokerGroupClosed(row.name, row.state.value if self.is_heard(row.name) else "dead")


def _partition_counts(subjects: Iterable[Subject]) -> Counter[str]:
    return Counter(one.broker_group for subject in subjects for one in subject.route.partitions)
