"""Two producers and a group of two consumers; the first consumer stops, the second takes the partitions over.

Run: python examples/orders.py [folder]
"""

import sys
import tempfile
import threading
import time

import inturn

STEPS = (b"created", b"paid", b"packed", b"shipped", b"delivered")
ORDERS = 200
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name

lock = threading.Lock()  # partitions are handled in parallel and share these variables
handled: dict[str, list[bytes]] = {}  # by order
by_consumer = {"first": 0, "second": 0}
owners: dict[int, str] = {}  # by partition


def handle(message: inturn.Message, context: inturn.Context) -> None:
    name = context.consumer.partition("-")[0]  # the rest makes the name unique
    with lock:
        handled.setdefault(message.key_text, []).append(message.body)
        by_consumer[name] += 1
        if owners.setdefault(context.partition, name) != name:
            # The epoch rises with every hand-over; pass the epoch to your database to refuse writes of a former owner.
            print(f"partition {context.partition} is {name}'s now: epoch {context.epoch}, from offset {message.offset}")
            owners[context.partition] = name
    time.sleep(0.001)


def send(mq: inturn.Connection, orders: range) -> None:
    # An order has a single producer: messages of two producers have no defined order.
    with mq.producer() as producer:
        for step in STEPS:
            for order in orders:
                producer.send("orders", step, key=f"order-{order}")


with inturn.connect(folder) as mq:
    mq.create_subject("orders", partitions=4)
    first = mq.consumer("orders", "warehouse", handle, name="first")
    second = mq.consumer("orders", "warehouse", handle, name="second")
    first.start()
    second.start()
    tills = [threading.Thread(target=send, args=(mq, range(start, ORDERS, 2))) for start in (0, 1)]
    for till in tills:
        till.start()
    while by_consumer["first"] < 100:
        time.sleep(0.01)
    first.stop()  # running handlers end, then commit and release: `second` continues at once without repeats
    for till in tills:
        till.join()
    while sum(by_consumer.values()) < ORDERS * len(STEPS):
        time.sleep(0.01)
    second.stop()

wrong = [order for order, steps in handled.items() if tuple(steps) != STEPS]
print(f"handled by {by_consumer}")
print(f"{len(handled)} orders, each step in its order: {not wrong}")
