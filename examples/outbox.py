"""A transactional outbox: an order and the message about the order are written in the same transaction.

The shop crashes between two orders, while no scanner is running. All committed messages are sent later, the steps of
every order in sequence. The second part stores messages on disk while the server is away.

Run: python examples/outbox.py [folder]
"""

import logging
import sqlite3
import sys
import tempfile
import time
from pathlib import Path

import structlog

import inturn
from inturn.server.server import Server
from inturn.transport.address import Address

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the outage is intended
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = Path(sys.argv[1] if sys.argv[1:] else temporary.name)
folder.mkdir(exist_ok=True)


def wait_until_empty(outbox: inturn.Outbox) -> None:
    while outbox.status().waiting:
        time.sleep(0.01)


# Inside your own transaction

shop = sqlite3.connect(folder / "shop.db")  # or psycopg.connect(...), or a SQLAlchemy Connection or Session
shop.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, state TEXT)")
outbox = inturn.Outbox(folder / "shop.db")
outbox.create_table(shop)
shop.commit()


def change(order: int, state: str) -> None:
    with shop:  # commits, or rolls back
        shop.execute("INSERT OR REPLACE INTO orders VALUES (?, ?)", (order, state))
        outbox.put(shop, "order.book", state.encode(), key=f"order-{order}")
        if state == "lost":
            raise RuntimeError("the shop crashed")


for state in ("created", "paid", "shipped"):
    for order in range(10):
        change(order, state)
try:
    change(3, "lost")
except RuntimeError as error:
    print(f"{error}; order 3 is {shop.execute('SELECT state FROM orders WHERE id = 3').fetchone()[0]}")
shop.close()

service = Server(folder / "data", address=Address("127.0.0.1"))
mq = inturn.connect(str(service.address))
mq.create_subject("order.book", partitions=4)
with outbox.scan(mq):  # or, as a process: inturn outbox scan --database shop.db --server inturn://…
    wait_until_empty(outbox)
steps: dict[str, list[str]] = {}
for message in mq.reader("order.book"):
    steps.setdefault(message.key_text, []).append(message.body.decode())
print(f"{len(steps)} orders, each {', '.join(steps['order-3'])}: {len(set(map(tuple, steps.values()))) == 1}")

# While the server is away

mq.create_subject("clicks", partitions=1, strategy="best-effort")
kept = inturn.Outbox(folder / "kept.db")
producer = mq.producer(settings=inturn.ProducerSettings(tries_max=2), outbox=kept)
producer.send_sync("clicks", b"0", key="ann")
service.close(grace_s=0.0)
results = [producer.send("clicks", b"%d" % number, key="ann").result() for number in range(1, 5)]
print(f"kept, and durable: {all(isinstance(result, inturn.Kept) for result in results)}")

service = Server(folder / "data", address=service.address)
wait_until_empty(kept)
print(f"ann clicked {' '.join(message.body.decode() for message in mq.reader('clicks'))}")
mq.close()
service.close()
