"""A server in this process; a producer and two consumers connect by address, as separate processes would.

On the command line the server is `inturn serve FOLDER`.

Run: python examples/served.py [folder]
"""

import sys
import tempfile
import threading
import time

import inturn
from inturn.server.server import Server
from inturn.transport.address import Address

STEPS = (b"created", b"paid", b"shipped")
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name

lock = threading.Lock()
seen: dict[str, list[bytes]] = {}  # by order
by_consumer = {"ann": 0, "bob": 0}


def handle(message: inturn.Message, context: inturn.Context) -> None:
    with lock:
        seen.setdefault(message.key_text, []).append(message.body)
        by_consumer[context.consumer.partition("-")[0]] += 1


service = Server(folder, address=Address("127.0.0.1", 0))  # port 0: any free port
address = str(service.address)
print("serving at", address)

with inturn.connect(address) as ann, inturn.connect(address) as bob:  # two connections, as from two processes
    ann.create_subject("orders", partitions=4)
    with (
        ann.consumer("orders", "billing", handle, order="key", name="ann"),
        bob.consumer("orders", "billing", handle, order="key", name="bob"),
    ):
        while len({one.owner for one in ann.group("orders", "billing").describe().partitions} - {None}) < 2:
            time.sleep(0.01)  # until both consumers have partitions
        with inturn.connect(address) as mq, mq.producer() as producer:
            for step in STEPS:
                for number in range(50):
                    producer.send("orders", step, key=f"order-{number}")
        while sum(by_consumer.values()) < 50 * len(STEPS):
            time.sleep(0.01)

print("stopped, and nobody held a lease any more:", service.close())
print("both had something to do:", all(by_consumer.values()))
print(f"{len(seen)} orders, each in its order:", all(tuple(steps) == STEPS for steps in seen.values()))
