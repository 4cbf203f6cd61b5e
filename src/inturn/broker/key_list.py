"""The keys of a group that do not go on by themselves: failures, parking lots and requests, seen together."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from inturn.model.commands import KeyDescription, RequestState
from inturn.model.mark import offset_of
from inturn.model.settings import LotState
from inturn.state.failures import FailureRow
from inturn.state.lots import LotRow

_STANDING = frozenset(("failing", "blocked", LotState.PARKED.value))


@dataclass(slots=True)
class _Entry:
    """All there is about one key of one partition."""

    failures: list[FailureRow] = field(default_factory=list)
    lot: LotRow | None = None
    requests: list[RequestState] = field(default_factory=list)


def describe_keys(
    failures: Iterable[FailureRow], lots: Iterable[LotRow], requests: Iterable[RequestState]
) -> list[KeyDescription]:
    """One for each key of a partition, and one for each failure without a key; what lasts longest comes first.

    Failures are given by offset, requests as they were asked.
    """
    entries: dict[tuple[int, bytes], _Entry] = {}
    described = []
    for row in failures:
        if row.failure.key is None:
            described.append(_failing(row.partition, None, [row], ()))
        else:
            entries.setdefault((row.partition, row.failure.key), _Entry()).failures.append(row)
    for lot in lots:
        entries.setdefault((lot.partition, lot.key), _Entry()).lot = lot
    for state in requests:
        entries.setdefault((state.request.partition, state.request.key), _Entry()).requests.append(state)
    described += [_describe(partition, key, entry) for (partition, key), entry in entries.items()]
    return sorted(described, key=lambda one: (one.since_ms, one.partition, one.key or b"", one.offset or 0))


def blocking_keys(described: Iterable[KeyDescription]) -> dict[int, KeyDescription]:
    """By partition: of the keys that fail, are blocked or parked, the one behind which most waits."""
    found: dict[int, KeyDescription] = {}
    for one in described:
        known = found.get(one.partition)
        if one.state in _STANDING and (known is None or one.waiting > known.waiting):
            found[one.partition] = one
    return found


def _describe(partition: int, key: bytes, entry: _Entry) -> KeyDescription:
    if entry.lot is not None:
        return _parked(entry.lot, entry.failures, entry.requests)
    if entry.failures:
        return _failing(partition, key, entry.failures, entry.requests)
    requests = tuple(state.request for state in entry.requests)
    return KeyDescription(key, partition, "requested", None, 0, "", entry.requests[0].asked_at_ms, 0, "", requests)


def _parked(lot: LotRow, failures: Sequence[FailureRow], requests: Sequence[RequestState]) -> KeyDescription:
    offset = lot.head_offset
    if offset is None and failures:
        offset = offset_of(failures[0].failure.offset)
    failure = next((row.failure for row in failures if offset_of(row.failure.offset) == offset), None)
    is_blocked = lot.state == LotState.RESUMING and failure is not None and failure.is_exhausted
    return KeyDescription(
        lot.key,
        lot.partition,
        "blocked" if is_blocked else lot.state,
        offset,
        0 if failure is None else failure.attempts,
        "" if failure is None else failure.error,
        lot.since_ms,
        max(0, lot.parked_count - 1),
        lot.reason,
        tuple(state.request for state in requests),
    )


def _failing(
    partition: int, key: bytes | None, rows: Sequence[FailureRow], requests: Sequence[RequestState]
) -> KeyDescription:
    head = rows[0].failure
    return KeyDescription(
        key,
        partition,
        "blocked" if any(row.failure.is_exhausted for row in rows) else "failing",
        offset_of(head.offset),
        head.attempts,
        head.error,
        rows[0].first_at_ms,
        head.waiting,
        "",
        tuple(state.request for state in requests),
    )
