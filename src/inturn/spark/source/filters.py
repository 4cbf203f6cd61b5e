"""Filter pushdown: the filters that the source applies, and the rows that remain to be read."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)

from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet, slot_of
from inturn.model.settings import Routing, Strategy
from inturn.model.subject import Subject

OFFSET_END = 2**63 - 1


@dataclass(frozen=True, slots=True)
class RowFilter:
    """A condition on rows: all fields must hold. None means any value."""

    partitions: frozenset[int] | None = None
    first: int = 0  # first <= offset < until
    until: int = OFFSET_END
    slots: SlotSet = ALL_SLOTS
    keys: frozenset[bytes] | None = None
    is_nothing: bool = False

    def partitions_of(self, subject: Subject) -> list[int]:
        """The partitions that may have matching rows."""
        if self.is_nothing or self.first >= self.until:
            return []
        everywhere = range(subject.partition_count)
        named = [one for one in everywhere if self.partitions is None or one in self.partitions]
        if not _has_fixed_places(subject):
            return named
        homes = {home for slot in self.slots for home in subject.route.lineage(slot)}
        return [one for one in named if one in homes]


def _has_fixed_places(subject: Subject) -> bool:
    """Whether the route lists all partitions that may have messages of a slot. False if senders choose the partition,
    and for best effort, because best-effort sends avoid a failed partition."""
    return subject.routing is Routing.SLOTS and subject.strategy is Strategy.STRICT


def push_down(row_filter: RowFilter, filters: Sequence[Filter], subject: str) -> tuple[RowFilter, list[Filter]]:
    """Narrow `row_filter` by all filters that the source can apply completely. Returns the new row filter, and the
    remaining filters unchanged, for Spark."""
    rest: list[Filter] = []
    for one in sorted(filters, key=lambda one: isinstance(one, IsNotNull)):  # last: an earlier filter may imply it
        narrower = _narrowed(row_filter, one, subject)
        if narrower is None:
            rest.append(one)
        else:
            row_filter = narrower
    return row_filter, rest


def _narrowed(row_filter: RowFilter, one: Filter, subject: str) -> RowFilter | None:
    match one:
        case EqualTo((column,), value) | EqualNullSafe((column,), value):
            return _among(row_filter, column, (value,), subject)
        case In((column,), values):
            return _among(row_filter, column, values, subject)
        case GreaterThanOrEqual(("offset",), int(value)):
            return replace(row_filter, first=max(row_filter.first, value))
        case GreaterThan(("offset",), int(value)):
            return replace(row_filter, first=max(row_filter.first, value + 1))
        case LessThan(("offset",), int(value)):
            return replace(row_filter, until=min(row_filter.until, value))
        case LessThanOrEqual(("offset",), int(value)):
            return replace(row_filter, until=min(row_filter.until, value + 1))
        case IsNotNull(("key",)) if row_filter.keys is not None:
            return row_filter
    return None


def _among(row_filter: RowFilter, column: str, values: Iterable[Any], subject: str) -> RowFilter | None:
    """Narrow to rows with a listed value in the column. No value equals NULL; Spark evaluates `key <=> NULL`."""
    present = [value for value in values if value is not None]
    of_type = bytes if column == "key" else str if column == "subject" else int
    if not all(isinstance(value, of_type) for value in present) or (column == "key" and not present):
        return None
    match column:
        case "subject":
            return row_filter if subject in present else replace(row_filter, is_nothing=True)
        case "partition":
            named = frozenset(present)
            return replace(
                row_filter, partitions=named if row_filter.partitions is None else named & row_filter.partitions
            )
        case "slot":
            kept = [one for one in present if 0 <= one < SLOT_COUNT and one in row_filter.slots]
            return replace(row_filter, slots=SlotSet.of(kept), is_nothing=row_filter.is_nothing or not kept)
        case "key":
            return _with_keys(row_filter, frozenset(present))
        case "offset" if len(present) == 1:
            return replace(
                row_filter, first=max(row_filter.first, present[0]), until=min(row_filter.until, present[0] + 1)
            )
    return None


def _with_keys(row_filter: RowFilter, keys: frozenset[bytes]) -> RowFilter:
    """A key determines its slot under every routing."""
    keys = keys if row_filter.keys is None else row_filter.keys & keys
    kept = [slot for slot in map(slot_of, keys) if slot in row_filter.slots]
    return replace(row_filter, keys=keys, slots=SlotSet.of(kept), is_nothing=row_filter.is_nothing or not kept)
