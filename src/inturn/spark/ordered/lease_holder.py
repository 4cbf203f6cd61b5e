"""The driver's part of ordered work: a member of the group that holds leases, for tasks to work under."""

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
from inturn.consumer.scope import Scope
from inturn.consumer.worker import Handler
from inturn.model.errors import ConnectionLost, InturnError, LeaseError, LeaseHeld, NotFound, StaleEpoch
from inturn.model.message import Message
from inturn.model.offsets import CommitTracker
from inturn.model.routing import ALL_SLOTS
from inturn.model.settings import ConsumerSettings, Order
from inturn.protocol.commands import Assignment, Claim, Commit, Committed, Done, Granted, Heartbeat, Progress, Release
from inturn.protocol.request import ask

STREAM_WAIT_S = 5.0  # how long a stream waits at its start for partitions that others give up
_LOOK_S = 0.02
_END_S = 10.0  # for a thread that has nothing to wait for


@dataclass(slots=True)
class HeldPlace:
    """How far a partition is whose lease is held: as it was granted, and as was committed here since."""

    epoch: int
    tracker: CommitTracker
    failed: set[int]  # offsets
    parked: tuple[bytes, ...]  # keys
    is_wanted_back: bool = False  # it goes to somebody else as soon as nobody works under it

    @property
    def offset(self) -> int:
        return self.tracker.low

    def done_below(self, until: int) -> bytes:
        """The offsets from the committed one up to `until` that are done all the same, as a roaring bitmap."""
        _, finished = self.tracker.snapshot()
        if not finished:
            return b""
        offsets = BitMap64.deserialize(finished)
        offsets.remove_range(until, offsets.max() + 1)
        return offsets.serialize() if offsets else b""


class Holding:
    """Leases that are kept and handed back by the rules of every consumer; nothing is pulled here.

    With a handler and settings that say so, messages of the group's retry subject are handled here, in the driver.
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
        self._number = 0  # of commits and claims
        self._places: dict[int, HeldPlace] = {}
        self._claimed: dict[int, tuple[int, int]] = {}  # epoch and number, by partition
        self._keeper: Consumer = connection.consumer(
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
        self._beat = Heartbeat(subject, group, self._keeper.name, order.value, start, assignment=strategy, tags=tags)

    @property
    def owner(self) -> str:
        """The name under which the leases are held."""
        return self._keeper.name

    def start(self) -> None:
        self._keeper.start()

    def epochs(self) -> dict[int, int]:
        """Those of the leases that are held, by partition. Raises what keeps it from being a member."""
        if self._keeper.error is not None:
            raise self._keeper.error
        return {index: lease.epoch for index, lease in self._keeper.leases().items()}

    def wait_for(
        self, partitions: set[int], timeout_s: float, watch: Callable[[dict[int, int]], None] | None = None
    ) -> dict[int, int]:
        """Wait until the leases of all of these are held. LeaseHeld names who still has one after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        while True:
            epochs = self.epochs()
            if partitions <= epochs.keys():
                return epochs
            if watch is not None:
                watch(epochs)
            if time.monotonic() > until_s:
                raise self._held_by_others(partitions - epochs.keys())
            time.sleep(_LOOK_S)

    def wait_for_open(self, timeout_s: float, watch: Callable[[dict[int, int]], None] | None = None) -> dict[int, int]:
        """The same of all partitions that the group may consume: those born of growth may have to come later."""
        return self.wait_for(self.open_partitions(timeout_s), timeout_s, watch)

    def open_partitions(self, timeout_s: float) -> set[int]:
        """Those that the group may consume. Waits until there is the group, which the first heartbeat makes."""
        until_s = time.monotonic() + timeout_s
        while True:
            try:
                described = self._connection.group(self._keeper.subject, self._keeper.group).describe()
                return {one.partition for one in described.partitions if one.gate is None}
            except NotFound:
                if time.monotonic() > until_s or self.epochs():
                    raise
            time.sleep(_LOOK_S)

    def wait_at_start(self, *, is_bounded: bool, count: int = 1) -> dict[int, int]:
        """Wait until so many leases are held, but not for long: a stream looks again. One that ends with what is there
        now (`is_bounded`) waits for as long as a query before it may keep them that ended without a word."""
        until_s = time.monotonic() + STREAM_WAIT_S + (self._life_s if is_bounded else 0.0)
        while True:
            epochs = self.epochs()
            # Leases are granted one by one: the first may be of a partition in which nothing is new.
            is_all = not is_bounded or self._keeper.assigned() <= epochs.keys()
            if (len(epochs) >= count and is_all) or time.monotonic() > until_s:
                return epochs
            time.sleep(_LOOK_S)

    def _held_by_others(self, missing: set[int]) -> LeaseHeld:
        described = self._connection.group(self._keeper.subject, self._keeper.group).describe()
        owners = {one.partition: one.owner for one in described.partitions if one.partition in missing}
        named = sorted({owners.get(index) or "nobody" for index in missing})
        return LeaseHeld(self._keeper.group, ", ".join(map(str, sorted(missing))), ", ".join(named))

    # For those who read rows under the leases, and commit here

    def places(self) -> dict[int, HeldPlace]:
        """Of all leases that are held, by partition; also of those that are wanted back."""
        if self._keeper.error is not None:
            raise self._keeper.error
        kept = self._keeper.kept()
        for index, one in kept.items():
            if index not in self._places or self._places[index].epoch != one.epoch:
                tracker = CommitTracker(one.offset, one.finished)
                self._places[index] = HeldPlace(one.epoch, tracker, set(one.failed), one.parked)
            self._places[index].is_wanted_back = one.is_wanted_back
        return {index: self._places[index] for index in kept}

    def wait_for_work(self, until: Mapping[int, int]) -> dict[int, HeldPlace]:
        """The places of these partitions; those that are not held are done up to the given offsets, by others.

        Waits for as long as somebody who is gone without a word may keep a lease. LeaseHeld names what is not done and
        who has it then.
        """
        until_s = time.monotonic() + STREAM_WAIT_S + self._life_s
        while True:
            places = {index: one for index, one in self.places().items() if not one.is_wanted_back}
            missing = until.keys() - places.keys()
            if missing:
                described = self._connection.group(self._keeper.subject, self._keeper.group).describe()
                missing -= {
                    one.partition for one in described.partitions if one.committed >= until.get(one.partition, 0)
                }
            if not missing:
                return {index: places[index] for index in until if index in places}
            if time.monotonic() > until_s:
                raise self._held_by_others(missing)
            time.sleep(_LOOK_S)

    @property
    def _life_s(self) -> float:
        lease = self._connection.node.lease
        return 0.0 if lease is None else lease.life_s

    def keep_for_now(self, epochs: Mapping[int, int]) -> None:
        """Rows are read under these leases: if they are to go to somebody else, not before `commit`, or before a
        lease's life is over. A lease that is lost meanwhile is met at the commit."""
        for index, epoch in epochs.items():
            self._number += 1
            claim = Claim(*self._where, index, self.owner, epoch, self._reader, self._number, ALL_SLOTS.to_bytes())
            with contextlib.suppress(LeaseError):
                ask(self._connection.node, claim, Granted)
                self._claimed[index] = epoch, self._number

    def _let_go(self, partitions: Iterable[int]) -> None:
        for index in [one for one in partitions if one in self._claimed]:
            epoch, number = self._claimed.pop(index)
            # Number 0 says nothing new: only the claim is given back.
            release = Release(*self._where, self._reader, Progress(index, epoch, 0, 0, ask=number))
            with contextlib.suppress(LeaseError):
                ask(self._connection.node, release, Done)

    @property
    def _where(self) -> tuple[str, str]:
        return self._keeper.subject, self._keeper.group

    @property
    def _reader(self) -> str:
        return f"{self.owner}-rows"

    def commit(self, offsets: Mapping[int, int], epochs: Mapping[int, int]) -> None:
        """Everything below these is done, under these epochs; what is finished above stays so. StaleEpoch, when all
        others are stored, for one that was lost."""
        places = self.places()
        held = {index: one for index, one in places.items() if index in offsets and one.epoch == epochs[index]}
        progress = [self._progress(index, offsets[index], one) for index, one in held.items()]
        taken: tuple[int, ...] = ()
        if progress:
            commit = Commit(*self._where, self.owner, tuple(progress))
            committed = ask(self._connection.node, commit, Committed)
            if committed.unreached:  # whether it was taken is not known: the same again says it
                partition = committed.unreached[0]
                raise ConnectionLost(f"the broker of partition {partition}", "its commit was not answered")
            taken = committed.partitions
        self._let_go(offsets)
        for index in sorted(offsets.keys() - set(taken)):
            current = places[index].epoch if index in places else 0
            raise StaleEpoch(self._keeper.group, str(index), epochs[index], current)

    def _progress(self, index: int, until: int, place: HeldPlace) -> Progress:
        place.tracker.skip(place.offset, until)
        settled = sorted(one for one in place.failed if one < until)
        place.failed.difference_update(settled)
        offset, finished = place.tracker.snapshot()
        self._number += 1
        return Progress(index, place.epoch, offset, self._number, finished, settled=tuple(settled))

    # The end

    def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Call the tasks back, let them commit, and give the leases to whoever waits. False if that took longer."""
        with contextlib.suppress(InturnError):  # a claim that cannot be given back ends by itself
            self._let_go(list(self._claimed))
        return self._keeper.stop(timeout_s)

    def abandon(self) -> None:
        """Go without a word: the leases live on as long as tasks work under them, and their life beyond that."""
        self._keeper.kill()

    def stand_back(self) -> None:
        """As `abandon`, and no longer as the one who takes over: others may do that, and wait for the leases."""
        self._keeper.kill()
        self._keeper.wait(_END_S)  # nothing of it comes after this
        ask(self._connection.node, self._beat, Assignment)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def make_group(connection: Connection, subject: str, group: str, order: Order, start: str) -> None:
    """A group that is new stands at its start from now on; one that exists stays where it is."""
    if all((one.subject, one.group) != (subject, group) for one in connection.groups()):
        with Holding(connection, subject, group, order=order, start=start) as holding:
            holding.wait_at_start(is_bounded=False)


def _never(message: Message, context: Context) -> None:
    raise AssertionError("nothing is handled by whoever only holds leases")
