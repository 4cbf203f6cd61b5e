"""Key requests (park, resume, skip), and descriptions of keys with failures, parking lots or requests.

The broker only stores a request. The lease holder of the key's partition carries out the request, and reports this
with a commit.
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
    """The failures, parking lot and requests of a key in a partition."""

    failures: list[FailureRow] = field(default_factory=list)
    lot: ParkingLotRow | None = None
    requests: list[RequestState] = field(default_factory=list)


def describe_keys(
    failures: Iterable[FailureRow], lots: Iterable[ParkingLotRow], requests: Iterable[RequestState]
) -> list[KeyDescription]:
    """A description of every key in a partition, and of every failure without a key, sorted by age, oldest first.

    `failures` must be sorted by offset, `requests` by id.
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
    """By partition: the failing, blocked or parked key with the most waiting messages."""
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
    return KeyDescription(
        key=key,
        partition=partition,
        state="requested",
        offset=None,
        attempts=0,
        error="",
        since_ms=entry.requests[0].asked_at_ms,
        waiting=0,
        requests=requests,
    )


def _parked(lot: ParkingLotRow, failures: Sequence[FailureRow], requests: Sequence[RequestState]) -> KeyDescription:
    offset = lot.head_offset
    if offset is None and failures:
        offset = offset_of(failures[0].failure.offset)
    failure = next((row.failure for row in failures if offset_of(row.failure.offset) == offset), None)
    is_blocked = lot.state == LotState.RESUMING and failure is not None and failure.is_exhausted
    return KeyDescription(
        key=lot.key,
        partition=lot.partition,
        state="blocked" if is_blocked else lot.state,
        offset=offset,
        attempts=0 if failure is None else failure.attempts,
        error="" if failure is None else failure.error,
        since_ms=lot.since_ms,
        waiting=max(0, lot.parked_count - 1),
        reason=lot.reason,
        requests=tuple(state.request for state in requests),
    )


def _failing(
    partition: int, key: bytes | None, rows: Sequence[FailureRow], requests: Sequence[RequestState]
) -> KeyDescription:
    head = rows[0].failure
    return KeyDescription(
        key=key,
        partition=partition,
        state="blocked" if any(row.failure.is_exhausted for row in rows) else "failing",
        offset=offset_of(head.offset),
        attempts=head.attempts,
        error=head.error,
        since_ms=rows[0].first_at_ms,
        waiting=head.waiting,
        requests=tuple(state.request for state in requests),
    )


HISTORY_COUNT_MAX = 50
BLOCKING_COUNT_MAX = 1_000  # the number of inspected failures
WAITING_COUNT_MAX = 10_000  # every answer to a heartbeat contains all waiting requests


class Keys:
    """The keys of all groups. Waiting requests are kept in memory, too. Call all methods under the node's lock."""

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
        """The group's requests that were not carried out yet, oldest first; optionally of a single partition."""
        requests = (state.request for state in self._waiting[group.id].values())
        return tuple(one for one in requests if partition is None or one.partition == partition)

    def last_request_id(self, group: GroupRecord) -> int:
        """The highest request id of the group so far, or 0."""
        return self._last_request_ids.get(group.id, 0)

    def steer(
        self, subject: Subject, group: GroupRecord, command: SteerKey, home: Callable[[int], int]
    ) -> tuple[KeyRequest, bool]:
        """Store a request durably. Returns the request, and whether the request is new: an equal waiting request is not
        stored twice.

        `home` returns the partition whose lease holder carries out requests for keys of a slot.
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
        request = KeyRequest(
            id=0,
            partition=partition,
            key=command.key,
            kind=kind.value,
            offset=offset,
            by=command.by,
            why=command.why,
            origin=origin,
        )
        waiting = self._waiting[group.id]
        for state in waiting.values():
            if _asks_the_same(state.request, request):
                return state.request, False
        if len(waiting) >= WAITING_COUNT_MAX:
            raise InvalidInput(
                f"{len(waiting)} requests wait in group {group.name!r}, which is the limit; "
                "start the group's consumers: consumers carry out the requests"
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
                "check the id and the group; a reset of the group deletes waiting requests",
            )
        return state

    def acted_upon(self, group: GroupRecord, stored: Iterable[Progress]) -> None:
        """After progress was stored, drop the waiting requests that the progress reports as carried out."""
        for progress in stored:
            for request_id in progress.requests:
                state = self._waiting[group.id].get(request_id)
                if state is not None and state.request.partition == progress.partition:
                    del self._waiting[group.id][request_id]

    def moved(self, group: GroupRecord, parent: int, keys: Iterable[bytes], child: int) -> None:
        """Move the waiting requests of these keys to a child partition."""
        moved, waiting = set(keys), self._waiting[group.id]
        for state in list(waiting.values()):
            if state.request.partition == parent and state.request.key in moved:
                request = msgspec.structs.replace(state.request, partition=child)
                waiting[request.id] = msgspec.structs.replace(state, request=request)

    def forget(self, group: GroupRecord) -> list[int]:
        """After a reset, drop all waiting requests. Returns their ids."""
        return list(self._waiting.pop(group.id, {}))

    # Descriptions

    def list_keys(self, group: GroupRecord) -> KeyList:
        return KeyList(tuple(self._described(group)))

    def blocking(self, group: GroupRecord) -> dict[int, KeyDescription]:
        """The blocking key of every partition that has a blocking key. Called every second by `inturn top`."""
        failures = self._failures.most_waiting(group.id, BLOCKING_COUNT_MAX)
        return blocking_keys(describe_keys(failures, self._lots.of_group(group.id), ()))

    def describe(self, subject: Subject, group: GroupRecord, command: DescribeKey) -> KeyDetails:
        """The details of a key. If several partitions have the key, the oldest description."""
        check_key(subject, command.key)
        found = next((one for one in self._described(group) if one.key == command.key), None)
        if found is None:
            raise NotFound(
                "key with trouble",
                _readable(command.key),
                f"no message of the key has failed or is parked in group {group.name!r}",
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
        """Partition and offset of the first unfinished message of a key."""
        parked = self._lots.head(group.id, partition, key)
        if parked is not None:
            return parked
        failures = self._failures.of_key(group.id, partition, key)
        if not failures:
            raise NotFound(
                "message to skip of key",
                _readable(key),
                f"no message of the key has failed or is parked in group {group.name!r}; list such keys: ListKeys",
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
            f"group {group.name!r} handles or retries the key by itself; list the keys that need an operator: ListKeys",
        )


def check_key(subject: Subject, key: object) -> None:
    """Raise InvalidInput unless a message of the subject could have this key."""
    if not isinstance(key, bytes) or not key:
        raise InvalidInput(f"key {key!r}: it must be one or more bytes; messages without a key accept no key requests")
    if len(key) > subject.limits.key_bytes:
        raise LimitExceeded("key", len(key), subject.limits.key_bytes, "Limits.key_bytes")


def _partition(subject: Subject, key: bytes, given: int | None, home: Callable[[int], int]) -> int:
    """The partition of the key's messages."""
    if given is not None and not 0 <= given < subject.partition_count:
        raise NotFound(
            "partition", f"{subject.name}/{given}", f"the subject has partitions 0 to {subject.partition_count - 1}"
        )
    if subject.routing is not Routing.SLOTS:
        if given is None:
            raise InvalidInput(
                f"partition is missing: in subject {subject.name!r} the sender chooses the partition, not the key; "
                "give the partition"
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
    """Raise InvalidInput if the command names a message that is not the first of the key: the first may have
    changed."""
    if command.offset is not None and command.offset != head_offset:
        raise InvalidInput(
            f"offset {command.offset!r}: the first message of key {_readable(command.key)!r} in group "
            f"{command.group!r} is at offset {head_offset}, and only this message can be skipped; check it first: "
            "DescribeKey"
        )


def _asks_the_same(one: KeyRequest, other: KeyRequest) -> bool:
    return (one.partition, one.key, one.kind, one.offset) == (other.partition, other.key, other.kind, other.offset)


def _readable(key: bytes) -> str:
    return key.decode(errors="backslashreplace")
