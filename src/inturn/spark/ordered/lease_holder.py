"""The lease holder: a member of the group in the driver that holds leases. Tasks work under these leases."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from pyroaring import BitMap64

from inturn.client import Connection
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.consumer.options import Scope
from inturn.consumer.worker import Handler
from inturn.model.errors import ConnectionLost, InturnError, LeaseError, LeaseHeld, NotFound, StaleEpoch
from inturn.model.message import Message
from inturn.model.offsets import CommitTracker
from inturn.model.routing import ALL_SLOTS
from inturn.model.settings import ConsumerSettings, Order
from inturn.protocol.commands import Assignment, Claim, Commit, Committed, Done, Granted, Heartbeat, Progress, Release
from inturn.protocol.request import ask

STREAM_WAIT_S = 5.0  # how long a stream waits at its start for other members to hand partitions over
_POLL_S = 0.02
_END_S = 10.0  # limit for the end of a killed consumer's thread


@dataclass(slots=True)
class LeasePosition:
    """The progress of a partition under a held lease: the state at the grant, plus commits of this process since
    then."""

    epoch: int
    tracker: CommitTracker
    failed: set[int]  # offsets
    parked: tuple[bytes, ...]  # keys
    is_wanted_back: bool = False  # the lease goes to another member as soon as no claim is left

    @property
    def offset(self) -> int:
        return self.tracker.low

    def done_below(self, until: int) -> bytes:
        """The finished offsets between the committed offset and `until`, as a roaring bitmap."""
        _, finished = self.tracker.snapshot()
        if not finished:
            return b""
        offsets = BitMap64.deserialize(finished)
        offsets.remove_range(until, offsets.max() + 1)
        return offsets.serialize() if offsets else b""


class LeaseHolder:
    """Holds and releases leases by the rules of every consumer, but pulls no messages.

    With a handler, and settings that use a retry subject, the messages of the retry subject are handled here, in the
    driver.
    """

    def __init__(
        self,
        connection: Connection,
        subject: str,
        group: str,
        handler: Handler | None = None,
        *,
        order: Order = Order.KEY,
        settings: ConsumerSettings | None = None,
        start: str = "first",
        takes_over: bool = False,
        name: str = "spark",
    ) -> None:
        self._connection = connection
        self._number = 0  # of the latest commit or claim
        self._positions: dict[int, LeasePosition] = {}
        self._claimed: dict[int, tuple[int, int]] = {}  # partition → epoch and number
        self._consumer: Consumer = connection.consumer(
            subject,
            group,
            handler if handler is not None else _never,
            order=order,
            settings=settings,
            start=start,
            name=name,
            duty=Scope(keeps_only=True, takes_over=takes_over),
        )
        settings = settings if settings is not None else ConsumerSettings()
        strategy, tags = str(settings.assignment), settings.tags or ""
        self._beat = Heartbeat(subject, group, self._consumer.name, order.value, start, assignment=strategy, tags=tags)

    @property
    def owner(self) -> str:
        """The name under which the leases are held."""
        return self._consumer.name

    def start(self) -> None:
        self._consumer.start()

    def epochs(self) -> dict[int, int]:
        """The epochs of the held leases, by partition. Raises the error that ended the membership, if any."""
        if self._consumer.error is not None:
            raise self._consumer.error
        return {index: lease.epoch for index, lease in self._consumer.leases().items()}

    def wait_for(
        self, partitions: set[int], timeout_s: float, watch: Callable[[dict[int, int]], None] | None = None
    ) -> dict[int, int]:
        """Wait until the leases of all these partitions are held. After `timeout_s` raise LeaseHeld with the owners."""
        until_s = time.monotonic() + timeout_s
        while True:
            epochs = self.epochs()
            if partitions <= epochs.keys():
                return epochs
            if watch is not None:
                watch(epochs)
            if time.monotonic() > until_s:
                raise self._held_by_others(partitions - epochs.keys())
            time.sleep(_POLL_S)

    def wait_for_open(self, timeout_s: float, watch: Callable[[dict[int, int]], None] | None = None) -> dict[int, int]:
        """As `wait_for`, for all open partitions. Partitions behind a growth gate are left out."""
        return self.wait_for(self.open_partitions(timeout_s), timeout_s, watch)

    def open_partitions(self, timeout_s: float) -> set[int]:
        """The partitions without a closed growth gate. Waits until the first heartbeat has created the group."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                described = self._connection.group(self._consumer.subject, self._consumer.group).describe()
                return {one.partition for one in described.partitions if one.gate is None}
            except NotFound:
                if time.monotonic() > until_s or self.epochs():
                    raise
            time.sleep(_POLL_S)

    def wait_at_start(self, *, is_bounded: bool, count: int = 1) -> dict[int, int]:
        """Wait until `count` leases are held, at most `STREAM_WAIT_S`: a stream checks again later. A query that ends
        with the messages stored now (`is_bounded`) also waits for a lease's life, because an earlier query that crashed
        may still own the leases."""
        until_s = time.monotonic() + STREAM_WAIT_S + (self._life_s if is_bounded else 0.0)
        while True:
            epochs = self.epochs()
            # Leases are granted one at a time. The partition of the first lease may have no new messages.
            is_all = not is_bounded or self._consumer.assigned() <= epochs.keys()
            if (len(epochs) >= count and is_all) or time.monotonic() > until_s:
                return epochs
            time.sleep(_POLL_S)

    def _held_by_others(self, missing: set[int]) -> LeaseHeld:
        described = self._connection.group(self._consumer.subject, self._consumer.group).describe()
        owners = {one.partition: one.owner for one in described.partitions if one.partition in missing}
        named = sorted({owners.get(index) or "nobody" for index in missing})
        return LeaseHeld(self._consumer.group, ", ".join(map(str, sorted(missing))), ", ".join(named))

    # Row readers: tasks read under the leases, the driver commits

    def positions(self) -> dict[int, LeasePosition]:
        """The positions of all held leases, by partition, including leases that are wanted back."""
        if self._consumer.error is not None:
            raise self._consumer.error
        kept = self._consumer.kept()
        for index, one in kept.items():
            if index not in self._positions or self._positions[index].epoch != one.epoch:
                tracker = CommitTracker(one.offset, one.finished)
                self._positions[index] = LeasePosition(one.epoch, tracker, set(one.failed), one.parked)
            self._positions[index].is_wanted_back = one.is_wanted_back
        return {index: self._positions[index] for index in kept}

    def wait_for_work(self, until: Mapping[int, int]) -> dict[int, LeasePosition]:
        """The positions of these partitions. A partition without a held lease is left out only if other members have
        committed it up to the given offset.

        Waits for a lease's life, because a crashed member may still own a lease. Then raises LeaseHeld with the
        unfinished partitions and their owners.
        """
        until_s = time.monotonic() + STREAM_WAIT_S + self._life_s
        while True:
            positions = {index: one for index, one in self.positions().items() if not one.is_wanted_back}
            missing = until.keys() - positions.keys()
            if missing:
                described = self._connection.group(self._consumer.subject, self._consumer.group).describe()
                missing -= {
                    one.partition for one in described.partitions if one.committed >= until.get(one.partition, 0)
                }
            if not missing:
                return {index: positions[index] for index in until if index in positions}
            if time.monotonic() > until_s:
                raise self._held_by_others(missing)
            time.sleep(_POLL_S)

    @property
    def _life_s(self) -> float:
        lease = self._connection.node.lease
        return 0.0 if lease is None else lease.life_s

    def claim(self, epochs: Mapping[int, int]) -> None:
        """Claim partitions while rows are read under their leases. A claimed lease moves to another member only after
        `commit`, or when the lease's life is over. A lease that is lost in between is reported by `commit`."""
        for index, epoch in epochs.items():
            self._number += 1
            claim = Claim(*self._where, index, self.owner, epoch, self._reader, self._number, ALL_SLOTS.to_bytes())
            with contextlib.suppress(LeaseError):
                ask(self._connection.node, claim, Granted)
                self._claimed[index] = epoch, self._number

    def _release_claims(self, partitions: Iterable[int]) -> None:
        for index in [one for one in partitions if one in self._claimed]:
            epoch, number = self._claimed.pop(index)
            # Progress number 0 carries no commit: the broker only ends the claim.
            release = Release(*self._where, self._reader, Progress(index, epoch, 0, 0, ask=number))
            with contextlib.suppress(LeaseError):
                ask(self._connection.node, release, Done)

    @property
    def _where(self) -> tuple[str, str]:
        return self._consumer.subject, self._consumer.group

    @property
    def _reader(self) -> str:
        return f"{self.owner}-rows"

    def commit(self, offsets: Mapping[int, int], epochs: Mapping[int, int]) -> None:
        """Commit all messages below these offsets, under these epochs. Messages finished above the offsets stay
        finished. Raises StaleEpoch for a lost lease, after the other partitions were committed."""
        positions = self.positions()
        held = {index: one for index, one in positions.items() if index in offsets and one.epoch == epochs[index]}
        progress = [self._progress(index, offsets[index], one) for index, one in held.items()]
        taken: tuple[int, ...] = ()
        if progress:
            commit = Commit(*self._where, self.owner, tuple(progress))
            committed = ask(self._connection.node, commit, Committed)
            if committed.unreached:  # the commit may have been stored or not; the caller repeats it
                partition = committed.unreached[0]
                raise ConnectionLost(f"the broker of partition {partition}", "its commit was not answered")
            taken = committed.partitions
        self._release_claims(offsets)
        for index in sorted(offsets.keys() - set(taken)):
            current = positions[index].epoch if index in positions else 0
            raise StaleEpoch(self._consumer.group, str(index), epochs[index], current)

    def _progress(self, index: int, until: int, place: LeasePosition) -> Progress:
        place.tracker.skip(place.offset, until)
        settled = sorted(one for one in place.failed if one < until)
        place.failed.difference_update(settled)
        offset, finished = place.tracker.snapshot()
        self._number += 1
        return Progress(index, place.epoch, offset, self._number, finished, settled=tuple(settled))

    # The end

    def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Notify the tasks to end, wait for their commits, and release the leases. False after `timeout_s`."""
        with contextlib.suppress(InturnError):  # a claim that cannot be released expires
            self._release_claims(list(self._claimed))
        return self._consumer.stop(timeout_s)

    def abandon(self) -> None:
        """Leave without a release: the leases stay valid while tasks work under them, and for one lease life after."""
        self._consumer.kill()

    def leave_to_tasks(self) -> None:
        """As `abandon`, but end the take-over: another member may take over, and waits for the leases."""
        self._consumer.kill()
        self._consumer.wait(_END_S)  # after the wait the consumer sends no more heartbeats
        ask(self._connection.node, self._beat, Assignment)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def make_group(connection: Connection, subject: str, group: str, order: Order, start: str) -> None:
    """Create the group at `start`. A group that exists is not changed."""
    if all((one.subject, one.group) != (subject, group) for one in connection.groups()):
        with LeaseHolder(connection, subject, group, order=order, start=start) as holder:
            holder.wait_at_start(is_bounded=False)


def _never(message: Message, context: Context) -> None:
    raise AssertionError("a lease holder without a handler received a message")
