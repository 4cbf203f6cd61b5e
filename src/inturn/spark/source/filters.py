"""Filters that Spark hands over: which of them the source does itself, and what they leave to be read."""

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
class Wanted:
    """The rows that a query wants: all of these conditions hold for each. None is any."""

    partitions: frozenset[int] | None = None
    first: int = 0  # first <= offset < until
    until: int = OFFSET_END
    slots: SlotSet = ALL_SLOTS
    keys: frozenset[bytes] | None = None
    is_nothing: bool = False

    def partitions_of(self, subject: Subject) -> list[int]:
        """Those in which there may be something that is wanted."""
        if self.is_nothing or self.first >= self.until:
            return []
        everywhere = range(subject.partition_count)
        named = [one for one in everywhere if self.partitions is None or one in self.partitions]
        if not _has_fixed_places(subject):
            return named
        homes = {home for slot in self.slots for home in subject.route.lineage(slot)}
        return [one for one in named if one in homes]


def _has_fixed_places(subject: Subject) -> bool:
    """Whether the route says in which partitions a slot has ever been. Not where senders choose, or where best effort
    goes elsewhere when a partition fails."""
    return subject.routing is Routing.SLOTS and subject.strategy is Strategy.STRICT


def pushed(wanted: Wanted, filters: Sequence[Filter], subject: str) -> tuple[Wanted, list[Filter]]:
    """Take over what can be done completely; the rest is Spark's, and returned as it came."""
    rest: list[Filter] = []
    for one in sorted(filters, key=lambda one: isinstance(one, IsNotNull)):  # which the others may imply
        narrower = _narrowed(wanted, one, subject)
        if narrower is None:
            rest.append(one)
        else:
            wanted = narrower
    return wanted, rest


def _narrowed(wanted: Wanted, one: Filter, subject: str) -> Wanted | None:
    match one:
        case EqualTo((column,), value) | EqualNullSafe((column,), value):
            return _among(wanted, column, (value,), subject)
        case In((column,), values):
            return _among(wanted, column, values, subject)
        case GreaterThanOrEqual(("offset",), int(value)):
            return replace(wanted, first=max(wanted.first, value))
        case GreaterThan(("offset",), int(value)):
            return replace(wanted, first=max(wanted.first, value + 1))
        case LessThan(("offset",), int(value)):
            return replace(wanted, until=min(wanted.until, value))
        case LessThanOrEqual(("offset",), int(value)):
            return replace(wanted, until=min(wanted.until, value + 1))
        case IsNotNull(("key",)) if wanted.keys is not None:
            return wanted
    return None


def _among(wanted: Wanted, column: str, values: Iterable[Any], subject: str) -> Wanted | None:
    """The column is one of these values. Nothing is equal to NULL, but `key <=> NULL` is for Spark to find."""
    present = [value for value in values if value is not None]
    of_type = bytes if column == "key" else str if column == "subject" else int
    if not all(isinstance(value, of_type) for value in present) or (column == "key" and not present):
        return None
    match column:
        case "subject":
            return wanted if subject in present else replace(wanted, is_nothing=True)
        case "partition":
            named = frozenset(present)
            return replace(wanted, partitions=named if wanted.partitions is None else named & wanted.partitions)
        case "slot":
            kept = [one for one in present if 0 <= one < SLOT_COUNT and one in wanted.slots]
            return replace(wanted, slots=SlotSet.of(kept), is_nothing=wanted.is_nothing or not kept)
        case "key":
            return _with_keys(wanted, frozenset(present))
        case "offset" if len(present) == 1:
            return replace(wanted, first=max(wanted.first, present[0]), until=min(wanted.until, present[0] + 1))
    return None


def _with_keys(wanted: Wanted, keys: frozenset[bytes]) -> Wanted:
    """A key leads to its slot, however the subject is routed."""
    keys = keys if wanted.keys is None else wanted.keys & keys
    kept = [slot for slot in map(slot_of, keys) if slot in wanted.slots]
    return replace(wanted, keys=keys, slots=SlotSet.of(kept), is_nothing=wanted.is_nothing or not kept)
