"""One subject, two groups: mailers share the work of one partition, and every cache gets every message.

Run: python examples/shared_and_broadcast.py [folder]
"""

import sys
import tempfile
import threading
from pathlib import Path

import inturn

temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = Path(sys.argv[1] if sys.argv[1:] else temporary.name)
MAILS = [b"mail %d" % number for number in range(60)]


class Noting:
    """A handler that records all messages, and sets `done` after the last message."""

    def __init__(self, work_s: float = 0.0):
        self.bodies = []
        self.done = threading.Event()
        self.work_s = work_s

    def __call__(self, message, context):
        if self.work_s and context.attempt == 1 and message.body == b"mail 7":
            return inturn.suspend(0.05)  # delivered again, to any free worker; no message waits
        threading.Event().wait(self.work_s)
        self.bodies.append(message.body)
        if len(self.bodies) == len(MAILS):
            self.done.set()
        return None


with inturn.connect(folder) as mq:
    mq.create_subject("mails", partitions=1)
    with mq.producer() as producer:
        for mail in MAILS:
            producer.send("mails", mail)

    mailers = [Noting(0.005), Noting(0.005)]
    settings = inturn.ConsumerSettings(concurrency=2, visibility_s=10)
    consumers = [mq.consumer("mails", "mailing", mailer, mode="shared", settings=settings) for mailer in mailers]
    with consumers[0], consumers[1]:  # usually in separate processes
        while sum(len(mailer.bodies) for mailer in mailers) < len(MAILS):
            threading.Event().wait(0.01)
    sent = [body for mailer in mailers for body in mailer.bodies]
    group = mq.group("mails", "mailing").describe().partitions[0]
    print(f"{len(set(sent))} mails, each sent once: {sorted(sent) == sorted(MAILS)}")
    print(f"both had something to do on one partition: {all(mailer.bodies for mailer in mailers)}")
    print(f"came again: {group.redeliveries}")

    caches = {"one": Noting(), "two": Noting()}
    for name, cache in caches.items():
        with mq.consumer("mails", "caches", cache, mode="broadcast", offsets=folder / "offsets", name=name):
            cache.done.wait(10)
    print(f"every cache heard everything, in order: {all(cache.bodies == MAILS for cache in caches.values())}")
