"""Order by key: a poisoned order is parked and resumed, all other orders are not affected.

Run: python examples/key_order.py [folder]
"""

import asyncio
import logging
import sys
import tempfile
import threading

import structlog

import inturn

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # failures are intended
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name

ORDERS, STEPS = 50, ("created", "paid", "shipped")
POISONED = "order-7"
address_is_known = False
running = most = 0
handled: dict[str, list[str]] = {}
changed = threading.Event()


async def ship(message, context):
    """Runs for up to 100 orders at a time on a single partition; the steps of an order run in sequence."""
    global running, most
    running += 1
    most = max(most, running)
    await asyncio.sleep(0.005)  # a call to a remote server
    running -= 1
    if message.key_text == POISONED and message.body == b"paid" and not address_is_known:
        raise RuntimeError("no such street")
    handled.setdefault(message.key_text, []).append(message.body.decode())
    changed.set()


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        changed.wait(0.01)
        changed.clear()
    raise SystemExit("that took too long")


with inturn.connect(folder) as mq:
    mq.create_subject("orders", partitions=1)
    with mq.producer() as producer:
        for step in STEPS:
            for number in range(ORDERS):
                producer.send("orders", step.encode(), key=f"order-{number}")

    settings = inturn.ConsumerSettings(concurrency=100, max_attempts=3, on_exhausted="park")
    with mq.consumer("orders", "shipping", ship, order="key", settings=settings):
        wait_until(lambda: sum(map(len, handled.values())) == ORDERS * len(STEPS) - 2)
        wait_until(lambda: [key.state for key in mq.group("orders", "shipping").keys()] == ["parked"])
        print(f"up to {most} handlers at once, {mq.subject('orders').partition_count} partition")
        for key in mq.group("orders", "shipping").keys():
            print(f"{key.key.decode()} is {key.state} at offset {key.offset}: {key.reason}, {key.error}")
            print(f"  {key.waiting} message behind it; {len(handled[POISONED])} step handled so far")

        address_is_known = True
        mq.group("orders", "shipping").resume(POISONED, by="ann", why="found the address")
        wait_until(lambda: not mq.group("orders", "shipping").keys())
        print(f"{POISONED} after ann resumed it: {', '.join(handled[POISONED])}")

print(f"{ORDERS} orders, each in its order: {all(tuple(steps) == STEPS for steps in handled.values())}")
