"""The options of a handler after a failure, and the names of the result kinds.

Run: python examples/failures.py [folder]
"""

import logging
import sys
import tempfile
import threading

import structlog

import inturn
from inturn import Result

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # failures are intended
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name
done = threading.Event()


class Print(inturn.Hook):
    """Hooks see every attempt, including failed attempts: the place for metrics and traces."""

    def after(self, messages, context, kind, error):
        bodies = ", ".join(message.body.decode() for message in messages)
        print(f"  {bodies}, attempt {context.attempt}: {kind.value}" + (f" ({error})" if error else ""))


def retrying(message, context):
    """No message overtakes a failed message: `c` waits until `b` is handled."""
    if message.body == b"a" and context.attempt == 1:
        return inturn.suspend(0.05)  # "not yet": again after this time
    if message.body == b"b" and context.attempt == 1:
        raise RuntimeError("no connection")  # again after a growing back-off: see ConsumerSettings.backoff_min_s
    if message.body == b"c":
        done.set()
    return None


is_second_try = False


def all_or_nothing(message, context):
    """With manual acknowledgement no message is committed before the handler returns COMMIT."""
    global is_second_try
    if message.body != b"c":
        return Result.SUCCESS  # handled, but repeated after a rollback
    if not is_second_try:
        is_second_try = True
        return Result.ROLLBACK  # repeat all messages since the last commit: a, b, c
    done.set()
    return Result.COMMIT  # a, b and c are committed together


def consume(group, handler, ack):
    print(f"{group}:")
    done.clear()
    settings = inturn.ConsumerSettings(ack=ack, suspend_s=0.05)
    with mq.consumer("letters", group, handler, settings=settings, hooks=[Print()]):
        done.wait(3)
    partition = mq.group("letters", group).describe().partitions[0]
    print(f"  committed offset {partition.committed} of {partition.end_offset}")


with inturn.connect(folder) as mq:
    mq.create_subject("letters", partitions=1)
    with mq.producer() as producer:
        for body in (b"a", b"b", b"c"):
            producer.send("letters", body, key="one")
    consume("retrying", retrying, ack="auto")
    consume("all-or-nothing", all_or_nothing, ack="manual")
