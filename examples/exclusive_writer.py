"""A named producer is the only writer of a name: opening the name again fences the previous producer.

So a writer that seemed dead (a long pause, a lost network) cannot write between the messages of the successor.

Run: python examples/exclusive_writer.py [folder]
"""

import contextlib
import logging
import sys
import tempfile

import structlog

import inturn
from inturn.errors import ProducerFenced

structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))  # the refusal is intended
temporary = tempfile.TemporaryDirectory(prefix="inturn-")
folder = sys.argv[1] if sys.argv[1:] else temporary.name

with inturn.connect(folder) as mq:
    mq.create_subject("ledger", partitions=1)

    first = mq.producer(name="bookkeeper")
    first.send_sync("ledger", b"opening balance 100", key="account-1")

    second = mq.producer(name="bookkeeper")  # as a second process would do
    second.send_sync("ledger", b"withdraw 30", key="account-1")

    try:
        first.send_sync("ledger", b"withdraw 90", key="account-1")  # `first` does not know about `second`
    except ProducerFenced as error:
        print(f"refused: {error}")
    with contextlib.suppress(ProducerFenced):  # `close` raises again for the message that was not stored
        first.close()

    for message in mq.reader("ledger"):
        print(f"{message.offset}: {message.body.decode()}")
