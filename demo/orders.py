"""The subjects of the demo: orders with five steps each, the notifications of a big sale, and the scales of the acts.

No I/O, except that the handler `notify` sleeps.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.routing import slot_of
from inturn.model.settings import LeaseSettings
from inturn.model.subject import Subject

SUBJECT = "orders"
GROUP = "warehouse"
STEPS = ("created", "paid", "packed", "shipped", "delivered")
PARTITION_COUNT = 4
OPEN_COUNT = 40  # orders that one producer has under way at once
FIRST_CONSUMERS = ("ada", "ben", "cleo")
LATE_CONSUMER = "dora"
# Second act: the same messages, ordered by key
KEY_GROUP = "accounting"
CONCURRENCY = 32
ATTEMPTS_MAX = 3
POISONED_STEP = "paid"
LATER_STEPS = ("returned", "refunded")  # of the poisoned order only, sent while the key is parked and while it resumes
# Third act: a server and consumers, each a process
SERVED_GROUP = "delivery"
SERVED_CONCURRENCY = 8  # per consumer
# Last act: the big sale
INCIDENT_SUBJECT = "order.book"
INCIDENT_GROUP = "notify"
INCIDENT_PARTITIONS = 4
ONLINE = ("ada", "ben")  # two processes
ONLINE_CONCURRENCY = 4  # per process
TASK_CONCURRENCY = 64
TASK_COUNT = 2
NOTIFY_S = 0.004  # duration of a handler
NOTIFY = f"{__name__}:notify"
SKEW = 0.6  # customer n gets 1 / n ** SKEW as many notifications as the first customer


# Scales


@dataclass(frozen=True, slots=True)
class ServedScale:
    """The amount of work in the third act."""

    orders: int
    handling_s: float
    sending_s: float
    lease_s: float  # life of a lease: the longest wait of the partitions of a killed process

    @property
    def messages(self) -> int:
        return self.orders * len(STEPS)


@dataclass(frozen=True, slots=True)
class Scale:
    """The amount of work in the first two acts. A partition handles at most 1 / `handling_s` messages per second."""

    orders: int
    handling_s: float
    sending_s: float  # the producers spread their sends over this time
    retry_s: float
    lease: LeaseSettings
    reading_s: float  # a parked key stays on the screen so long before it is resumed
    resumed_step_s: float  # duration of each step of the resumed order
    served: ServedScale

    @property
    def messages(self) -> int:
        return self.orders * len(STEPS)

    @property
    def poisoned_order(self) -> int:
        """An early order: nearly all messages still wait when its key is parked."""
        return self.orders // 20


@dataclass(frozen=True, slots=True)
class IncidentScale:
    """The amount of work in the last act: a rush, then a trickle until `after_s` after the hand-back."""

    rush: int
    rush_s: float
    trickle_per_s: int
    after_s: float
    customers: int
    round_s: float  # of the drain
    lease_s: float


# First act: 4 partitions × 1 / 3 ms ≈ 1,250 messages per second: 6 s, and 1.5 s for the leases of the dead consumer.
# Second: 32 handlers × 1 / 3 ms ≈ 10,000 per second: 1 to 2 s, and 3 s to look at the parked key. Third: 1 s to start
# the processes, 3 s of sending, and 2 s until the leases of the killed process have ended.
FULL = Scale(
    *(1600, 0.003, 4.5, 0.5),
    *(LeaseSettings(life_s=1.5, renew_s=0.3, margin_s=0.1), 1.5, 0.2),
    ServedScale(500, 0.004, 3.0, 2.0),
)
QUICK = Scale(
    *(600, 0.002, 1.0, 0.05),
    *(LeaseSettings(life_s=1.2, renew_s=0.15, margin_s=0.05), 0.1, 0.05),
    ServedScale(120, 0.002, 1.0, 1.0),
)
# Online 2 × 4 handlers × 1 / 4 ms = 2,000 per second at best: the rush is nearly four times as fast. On Spark 2 × 64
# would be 32,000; two cores do about 20,000. The first of 2,000 customers gets 2 % of all, in order.
FULL_INCIDENT = IncidentScale(30_000, 4.0, 400, 1.0, 2000, 10.0, 5.0)
QUICK_INCIDENT = IncidentScale(6000, 1.0, 200, 0.5, 500, 10.0, 5.0)


# Orders


class OrderStep(msgspec.Struct):
    """The body of a message."""

    order: int
    step: str


def key_of(order: int) -> str:
    return f"order-{order}"


def order_message(order: int, step: str) -> tuple[bytes, str, str]:
    """Body, key and message id."""
    return msgspec.json.encode(OrderStep(order, step)), key_of(order), f"{order}/{step}"


def expected_counts(subject: Subject, orders: int) -> list[int]:
    """The number of messages of all these orders, by partition."""
    counts = Counter(subject.route.by_slot[slot_of(key_of(order).encode())] for order in range(orders))
    return [counts[partition] * len(STEPS) for partition in range(PARTITION_COUNT)]


def troubles(orders: int) -> dict[tuple[int, str], str | None]:
    """Steps that fail at their first attempt: with this exception, or (None) by a suspend."""
    jam = "label printer jammed"
    wanted = ((0.13, "packed", jam), (0.27, "paid", None), (0.62, "packed", jam), (0.78, "paid", None))
    return {(int(orders * share), step): why for share, step, why in wanted}


def life_cycles(orders: Sequence[int], rng: random.Random) -> Iterator[tuple[int, str]]:
    """All steps of these orders: the steps of an order in their order, the orders interleaved at random."""
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
    """The application's view: the step that each order has reached, and every step that came too early."""

    def __init__(self) -> None:
        self._reached: dict[int, int] = {}
        self.too_early: list[tuple[int, str]] = []

    def note(self, order: int, step: str) -> None:
        """A step was handled. A step that is repeated after a crash changes nothing."""
        reached, index = self._reached.get(order, 0), STEPS.index(step)
        if index > reached:
            self.too_early.append((order, step))
        self._reached[order] = max(reached, index + 1)

    @property
    def complete_count(self) -> int:
        """Orders that saw all five steps, none too early."""
        wrong = {order for order, _ in self.too_early}
        return sum(reached == len(STEPS) and order not in wrong for order, reached in self._reached.items())


# The big sale


async def notify(message: Message, context: Context) -> None:
    """The handler of the last act: the same function online and in the tasks of Spark. Slow, as network calls are."""
    await asyncio.sleep(NOTIFY_S)


def customer_key(customer: int) -> str:
    return f"customer-{customer}"


def notifications(customers: int, seed: int = 11) -> Iterator[tuple[str, int]]:
    """Without end: the key of a customer, and the number of the notification for this customer, from 1 on."""
    rng = random.Random(seed)
    heights = list(accumulate((rank + 1) ** -SKEW for rank in range(customers)))
    sent: Counter[int] = Counter()
    while True:
        for customer in rng.choices(range(1, customers + 1), cum_weights=heights, k=1000):
            sent[customer] += 1
            yield customer_key(customer), sent[customer]


def notification_id(key: str, number: int) -> str:
    return f"{key}/{number}"


class Inbox:
    """The customers' view: whether each customer got notification 1, 2, 3 and so on."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}
        self._confused: set[str] = set()

    def note(self, message_id: str) -> None:
        """A customer got a notification. A repeated notification does no harm, an early notification does."""
        key, _, number = message_id.rpartition("/")
        last = self._last.get(key, 0)
        if int(number) > last + 1:
            self._confused.add(key)
        self._last[key] = max(last, int(number))

    @property
    def customers(self) -> int:
        return len(self._last)

    @property
    def in_order(self) -> int:
        return len(self._last) - len(self._confused)
