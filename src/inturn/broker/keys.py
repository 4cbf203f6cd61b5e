"""Steering keys: what people ask of them (park, resume, skip), and what there is to see of them.

A request is only kept here. Whoever holds the lease of the key's partition acts upon it, and says so with a commit.

The keys of a group that do not go on by themselves: failures, parking lots and requests, seen together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from inturn.model.errors import InvalidInput, LimitExceeded, NotFound
from inturn.model.offsets import offset_of, place_of
from inturn.model.routing import slot_of
from inturn.model.settings import PULL_BYTES_MAX, KeyAction, LotState, Routing, one_of
from inturn.model.subject import Subject
from inturn.model.time import Clock
from inturn.protocol.commands import (
    DescribeKey,
    KeyDescription,
    KeyDetails,
    KeyList,
    KeyRequest,
    LotContent,
    Progress,
    RequestState,
    SteerKey,
)
from inturn.store.database import check_number, check_text
from inturn.store.groups import GroupRecord
from inturn.store.keys import BY_LENGTH_MAX, WHY_LENGTH_MAX, FailureRow, Failures, KeyRequests
from inturn.store.parking_lots import ParkingLotRow, ParkingLots

_STANDING = frozenset(("failing", "blocked", LotState.PARKED.value))


@dataclass(slots=True)
class _Entry:
    """All there is about one key of one partition."""

    failures: list[FailureRow] = field(default_factory=list)
    lot: ParkingLotRow | None = None
    requests: list[RequestState] = field(default_factory=list)


def describe_keys(
    failures: Iterable[FailureRow], lots: Iterable[ParkingLotRow], requests: Iterable[RequestState]
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


def _parked(lot: ParkingLotRow, failures: Sequence[FailureRow], requests: Sequence[RequestState]) -> KeyDescription:
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


HISTORY_COUNT_MAX = 50
BLOCKING_COUNT_MAX = 1_000  # failures that are looked at
# All of them are in every answer to a heartbeat.
WAITING_COUNT_MAX = 10_000


class Keys:
    """Requests that wait are kept in memory, too. Call it under the node's lock."""

    def __init__(self, failures: Failures, lots: ParkingLots, requests: KeyRequests, clock: Clock) -> None:
        self._failures = failures
        self._lots = lots
        self._requests = requests
        self._clock = clock
        self._waiting: dict[int, dict[int, RequestState]] = defaultdict(dict)  # by group, by id, in order
        self._last_request_ids = requests.last_ids()
        for group_id, state in requests.waiting():
            self._waiting[group_id][state.request.id] = state

    # Requests

    def waiting(self, group: GroupRecord, partition: int | None = None) -> tuple[KeyRequest, ...]:
        """Those of the group that nobody acted upon yet, in the order they were asked; maybe of one partition only."""
        requests = (state.request for state in self._waiting[group.id].values())
        return tuple(one for one in requests if partition is None or one.partition == partition)

    def last_request_id(self, group: GroupRecord) -> int:
        """The highest id of any request of the group so far; 0 if there is none."""
        return self._last_request_ids.get(group.id, 0)

    def steer(
        self, subject: Subject, group: GroupRecord, command: SteerKey, home: Callable[[int], int]
    ) -> tuple[KeyRequest, bool]:
        """The request, durable, and whether it is new: one that says the same and waits is not asked twice.

        `home` tells whose holder acts on keys of a slot.
        """
        kind = one_of(KeyAction, "action", command.action)
        check_key(subject, command.key)
        check_text("by", command.by, BY_LENGTH_MAX)
        check_text("why", command.why, WHY_LENGTH_MAX)
        partition = _partition(subject, command.key, command.partition, home)
        offset = origin = None
        if kind is KeyAction.SKIP:
            origin, offset = self._head(group, partition, command.key)
            _check_head(command, offset)
        elif kind is KeyAction.RESUME:
            self._check_resumable(group, partition, command.key)
        request = KeyRequest(0, partition, command.key, kind.value, offset, command.by, command.why, origin)
        waiting = self._waiting[group.id]
        for state in waiting.values():
            if _asks_the_same(state.request, request):
                return state.request, False
        if len(waiting) >= WAITING_COUNT_MAX:
            raise InvalidInput(
                f"{len(waiting)} requests wait in group {group.name!r}, which is the limit; "
                "start its consumers, they act upon them"
            )
        now_ms = self._clock.time_ms()
        request = self._requests.add(group.id, request, now_ms)
        waiting[request.id] = RequestState(request, now_ms, None)
        self._last_request_ids[group.id] = request.id
        return request, True

    def is_waiting(self, group: GroupRecord, request_id: int) -> bool:
        return request_id in self._waiting[group.id]

    def find(self, group: GroupRecord, request_id: int) -> RequestState:
        state = self._waiting[group.id].get(request_id)
        if state is None:
            check_number("request id", request_id)
            state = self._requests.find(group.id, request_id)
        if state is None:
            raise NotFound(
                "key request",
                str(request_id),
                "check its id and group; a reset of the group takes back those that wait",
            )
        return state

    def acted_upon(self, group: GroupRecord, stored: Iterable[Progress]) -> None:
        """After progress was stored: what it says to be done does not wait any more."""
        for progress in stored:
            for request_id in progress.requests:
                state = self._waiting[group.id].get(request_id)
                if state is not None and state.request.partition == progress.partition:
                    del self._waiting[group.id][request_id]

    def moved(self, group: GroupRecord, parent: int, keys: Iterable[bytes], child: int) -> None:
        """What was asked of these keys is for the holder of another partition now."""
        moved, waiting = set(keys), self._waiting[group.id]
        for state in list(waiting.values()):
            if state.request.partition == parent and state.request.key in moved:
                request = msgspec.structs.replace(state.request, partition=child)
                waiting[request.id] = msgspec.structs.replace(state, request=request)

    def forget(self, group: GroupRecord) -> list[int]:
        """After a reset: nothing waits any more. Returns the ids of what did."""
        return list(self._waiting.pop(group.id, {}))

    # Looking

    def list_keys(self, group: GroupRecord) -> KeyList:
        return KeyList(tuple(self._described(group)))

    def blocking(self, group: GroupRecord) -> dict[int, KeyDescription]:
        """The key that holds back most, by partition where there is one. People ask for this every second."""
        failures = self._failures.most_waiting(group.id, BLOCKING_COUNT_MAX)
        return blocking_keys(describe_keys(failures, self._lots.of_group(group.id), ()))

    def describe(self, subject: Subject, group: GroupRecord, command: DescribeKey) -> KeyDetails:
        """The one that lasts longest, if keys choose no partition and several have it."""
        check_key(subject, command.key)
        found = next((one for one in self._described(group) if one.key == command.key), None)
        if found is None:
            raise NotFound(
                "key with trouble", _readable(command.key), f"nothing of it failed or is parked in group {group.name!r}"
            )
        content = self.read_lot(group, found.partition, command.key, command.after, command.max_bytes)
        history = self._requests.history(group.id, found.partition, command.key, HISTORY_COUNT_MAX)
        return KeyDetails(found, content.messages, content.is_end, history)

    def read_lot(self, group: GroupRecord, partition: int, key: bytes, after: int, max_bytes: int) -> LotContent:
        if not 0 < max_bytes <= PULL_BYTES_MAX:
            raise InvalidInput(f"max_bytes {max_bytes}: it must be 1 to {PULL_BYTES_MAX}")
        return self._lots.read(group.id, partition, key, after, max_bytes)

    def _described(self, group: GroupRecord) -> Iterable[KeyDescription]:
        requests = self._waiting[group.id].values()
        return describe_keys(self._failures.of_group(group.id), self._lots.of_group(group.id), requests)

    def _head(self, group: GroupRecord, partition: int, key: bytes) -> tuple[int, int]:
        """Partition and offset of the first message of a key that is not over."""
        parked = self._lots.head(group.id, partition, key)
        if parked is not None:
            return parked
        failures = self._failures.of_key(group.id, partition, key)
        if not failures:
            raise NotFound(
                "message to skip of key",
                _readable(key),
                f"nothing of it failed or is parked in group {group.name!r}; see which keys do: ListKeys",
            )
        return place_of(failures[0].offset, partition)

    def _check_resumable(self, group: GroupRecord, partition: int, key: bytes) -> None:
        if self._lots.is_there(group.id, partition, key):
            return
        if any(failure.is_exhausted for failure in self._failures.of_key(group.id, partition, key)):
            return
        parks = (one for one in self.waiting(group, partition) if one.kind == KeyAction.PARK)
        if any(one.key == key for one in parks):
            return
        raise NotFound(
            "parked or blocked key",
            _readable(key),
            f"group {group.name!r} handles it, or repeats it by itself; see which keys wait for somebody: ListKeys",
        )


def check_key(subject: Subject, key: object) -> None:
    """Raise InvalidInput unless a message of the subject could have this key."""
    if not isinstance(key, bytes) or not key:
        raise InvalidInput(f"key {key!r}: it must be one or more bytes; messages without a key cannot be steered")
    if len(key) > subject.limits.key_bytes:
        raise LimitExceeded("key", len(key), subject.limits.key_bytes, "Limits.key_bytes")


def _partition(subject: Subject, key: bytes, given: int | None, home: Callable[[int], int]) -> int:
    """Where the messages of the key are."""
    if given is not None and not 0 <= given < subject.partition_count:
        raise NotFound(
            "partition", f"{subject.name}/{given}", f"the subject has partitions 0 to {subject.partition_count - 1}"
        )
    if subject.routing is not Routing.SLOTS:
        if given is None:
            raise InvalidInput(
                f"partition is missing: in subject {subject.name!r} the sender chooses it, the key does not tell it"
            )
        return given
    routed = home(slot_of(key))
    if given is not None and given != routed:
        raise InvalidInput(
            f"partition {given}: key {_readable(key)!r} of subject {subject.name!r} belongs to partition {routed}; "
            "leave the partition out"
        )
    return routed


def _check_head(command: SteerKey, head_offset: int) -> None:
    """Raise InvalidInput if another message than the first of the key is meant: it may be gone already."""
    if command.offset is not None and command.offset != head_offset:
        raise InvalidInput(
            f"offset {command.offset!r}: the first message of key {_readable(command.key)!r} in group "
            f"{command.group!r} is at offset {head_offset}, and only that can be skipped; look at it first: DescribeKey"
        )


def _asks_the_same(one: KeyRequest, other: KeyRequest) -> bool:
    return (one.partition, one.key, one.kind, one.offset) == (other.partition, other.key, other.kind, other.offset)


def _readable(key: bytes) -> str:
    return key.decode(errors="backslashreplace")
