"""Check the order of your own handlers: record a history, then let the order checker judge the history.

A test needs no more than these lines. The checker also judges runs with crashes and hand-overs.

Run: python examples/check_my_order.py [folder]
"""

import sys
import tempfile
import time

import inturn
from inturn.model.time import SystemClock
from inturn.testing.checker import check
from inturn.testing.recorder import Recorder

COUNT = 500
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name
recorder = Recorder(SystemClock())


class Record(inturn.Hook):
    """The handler's thread calls `before` and `after`, so no end is recorded after the next start."""

    def before(self, messages, context):
        for message in messages:
            recorder.started(*self._what(message, context))

    def after(self, messages, context, kind, error):
        result = {"success": "success", "timeout": "success", "failed": "failed"}.get(kind.value, "exception")
        for message in messages:
            recorder.ended(*self._what(message, context), result=result)

    def _what(self, message, context):
        where = (context.subject, context.group, context.partition, message.offset, message.key)
        return (*where, context.consumer, context.epoch, message.message_id)


def my_handler(message, context):
    """Put your handler here."""


with inturn.connect(folder, observer=recorder) as mq:  # the observer records leases and commits
    mq.create_subject("orders", partitions=4)
    with mq.producer() as producer:
        sent = [
            (producer.send("orders", b"", key=f"order-{n % 20}", message_id=str(n)), f"order-{n % 20}", str(n))
            for n in range(COUNT)
        ]
    for handle, key, message_id in sent:
        stored = handle.result()
        recorder.sent(stored.subject, stored.partition, stored.offset, key.encode(), message_id)

    consumers = [mq.consumer("orders", "mine", my_handler, hooks=[Record()], name=name) for name in ("a", "b")]
    for consumer in consumers:
        consumer.start()
    while any(partition.lag for partition in mq.group("orders", "mine").describe().partitions):
        time.sleep(0.02)

verdict = check(recorder.snapshot(), order="partition")
print(verdict)
verdict.raise_if_bad()  # an AssertionError with the events, in order

# The checker finds errors: remove an end, and the verdict reports a lost message.
broken = [event for event in recorder.snapshot() if not (hasattr(event, "result") and event.message_id == "7")]
print("and with one end missing:", ", ".join(sorted(check(broken, order="partition").kinds())))
