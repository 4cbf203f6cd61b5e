"""What the demo is about: orders, the five steps of each, and whether every order saw them in their order. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from inturn.model.settings import LeaseSettings

SUBJECT = "orders"
GROUP = "warehouse"
STEPS = ("created", "paid", "packed", "shipped", "delivered")
KEY_GROUP = "accounting"  # the second act: the same messages, ordered by key
CONCURRENCY = 32
ATTEMPTS_MAX = 3
POISONED_STEP = "paid"
LATER_STEPS = ("returned", "refunded")  # sent for the poisoned order only: while it is parked, while it is resumed
SERVED_GROUP = "delivery"  # the third act: a server and consumers that are processes of their own
SERVED_CONCURRENCY = 8  # of each of them
PARTITION_COUNT = 4
OPEN_COUNT = 40  # orders that one producer has under way at once


@dataclass(frozen=True, slots=True)
class ServedScale:
    """How much is done in the third act."""

    orders: int
    handling_s: float
    sending_s: float
    lease_s: float  # the life of a lease: as long as the partitions of a killed process wait, at most

    @property
    def messages(self) -> int:
        return self.orders * len(STEPS)


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is done. One partition handles at most 1 / `handling_s` messages per second, whoever owns it."""

    orders: int
    handling_s: float
    sending_s: float  # the producers spread their sends over this
    retry_s: float
    lease: LeaseSettings
    reading_s: float  # how long a parked key is shown before it is resumed
    resumed_step_s: float  # how long each step of the resumed order takes, to be looked at
    served: ServedScale

    @property
    def messages(self) -> int:
        return self.orders * len(STEPS)

    @property
    def poisoned_order(self) -> int:
        """Early, so that nearly everything is still to be done when its key is parked."""
        return self.orders // 20


# 4 partitions × 1 / 3 ms ≈ 1,250 messages per second: 12 s, and 2 s more for the partitions whose owner dies. Then
# by key: 32 handlers × 1 / 3 ms ≈ 10,000 per second: 2 s, and 5 s for the parked key, which is to be looked at. Then
# the processes: 1 or 2 s until they are there, 4 s of sending, and 2 s until the lease of the killed one has ended.
FULL = Scale(
    *(3000, 0.003, 8.0, 0.5),
    *(LeaseSettings(life_s=2.0, renew_s=0.4, margin_s=0.1), 2.0, 0.3),
    ServedScale(600, 0.004, 4.0, 2.0),
)
QUICK = Scale(
    *(600, 0.002, 1.0, 0.05),
    *(LeaseSettings(life_s=1.2, renew_s=0.15, margin_s=0.05), 0.1, 0.05),
    ServedScale(120, 0.002, 1.0, 1.0),
)


def troubles(orders: int) -> dict[tuple[int, str], str | None]:
    """Steps that fail at their first attempt, on purpose: with this exception, or (None) by a suspend."""
    jam = "label printer jammed"
    wanted = ((0.13, "packed", jam), (0.27, "paid", None), (0.62, "packed", jam), (0.78, "paid", None))
    return {(int(orders * share), step): why for share, step, why in wanted}


def key_of(order: int) -> str:
    return f"order-{order}"


def life_cycles(orders: Sequence[int], rng: random.Random) -> Iterator[tuple[int, str]]:
    """All steps of these orders: each order in its order, the orders among one another at random."""
    waiting = iter(orders)
    under_way: list[tuple[int, int]] = []
    while True:
        while len(under_way) < OPEN_COUNT and (order := next(waiting, None)) is not None:
            under_way.append((order, 0))
        if not under_way:
            return
        place = rng.randrange(len(under_way))
        order, step = under_way[place]
        yield order, STEPS[step]
        if step + 1 < len(STEPS):
            under_way[place] = order, step + 1
        else:
            under_way[place] = under_way[-1]
            under_way.pop()


class Ledger:
    """What an order's owner sees: which step each order reached, and every step that came too early."""

    def __init__(self) -> None:
        self._reached: dict[int, int] = {}
        self.too_early: list[tuple[int, str]] = []

    def note(self, order: int, step: str) -> None:
        """A step was handled. One that is repeated after a crash changes nothing."""
        reached, index = self._reached.get(order, 0), STEPS.index(step)
        if index > reached:
            self.too_early.append((order, step))
        self._reached[order] = max(reached, index + 1)

    @property
    def complete_count(self) -> int:
        """Orders that saw all five steps, none before its turn."""
        wrong = {order for order, _ in self.too_early}
        return sum(reached == len(STEPS) and order not in wrong for order, reached in self._reached.items())
