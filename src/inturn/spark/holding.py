"""The driver's part of ordered work: a member of the group that holds leases, for tasks to work under."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from inturn.connection import Connection
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.consumer.duty import Duty
from inturn.consumer.worker import Handler
from inturn.model.commands import Commit, Committed, Progress
from inturn.model.errors import LeaseHeld, StaleEpoch
from inturn.model.message import Message
from inturn.model.request import ask
from inturn.model.settings import ConsumerSettings, Order

STREAM_WAIT_S = 5.0  # how long a stream waits at its start for partitions that others give up
_LOOK_S = 0.02


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
        self._number = 0
        self._keeper: Consumer = connection.consumer(
            subject,
            group,
            handler if handler is not None else _never,
            order=order,
            settings=settings,
            start=start,
            name=name,
            duty=Duty(keeps_only=True, takes_over=takes_over),
        )

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

    def wait_at_start(self, *, is_bounded: bool, count: int = 1) -> dict[int, int]:
        """Wait until so many leases are held, but not for long: a stream looks again. One that ends with what is there
        now (`is_bounded`) waits for as long as a query before it may keep them that ended without a word."""
        lease = self._connection.node.lease
        life_s = lease.life_s if is_bounded and lease is not None else 0.0
        until_s = time.monotonic() + STREAM_WAIT_S + life_s
        while len(epochs := self.epochs()) < count and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return epochs

    def _held_by_others(self, missing: set[int]) -> LeaseHeld:
        subject, group = self._keeper.subject, self._keeper.group
        described = self._connection.describe_group(subject, group)
        owners = {one.partition: one.owner for one in described.partitions if one.partition in missing}
        first = min(missing)
        return LeaseHeld(group, str(first), owners.get(first) or "nobody")

    def commit(self, offsets: dict[int, int]) -> None:
        """Everything below these is done. StaleEpoch, and nothing is stored, for partitions that were lost."""
        subject, group = self._keeper.subject, self._keeper.group
        epochs = self.epochs()
        lost = sorted(offsets.keys() - epochs.keys())
        if lost:
            raise StaleEpoch(group, str(lost[0]), 0, 0)
        self._number += 1
        progress = tuple(Progress(index, epochs[index], offset, self._number) for index, offset in offsets.items())
        taken = ask(self._connection.node, Commit(subject, group, self.owner, progress), Committed).partitions
        for one in progress:
            if one.partition not in taken:
                raise StaleEpoch(group, str(one.partition), one.epoch, one.epoch + 1)

    def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Call the tasks back, let them commit, and give the leases to whoever waits. False if that took longer."""
        return self._keeper.stop(timeout_s)

    def abandon(self) -> None:
        """Go without a word: the leases live on as long as tasks work under them, and their life beyond that."""
        self._keeper.kill()

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
