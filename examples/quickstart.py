"""The example of the README: messages of one key are handled in the order of sending.

Run: python examples/quickstart.py [folder]
"""

import sys
import tempfile

import inturn

temporary = tempfile.TemporaryDirectory(prefix="inturn-")
mq = inturn.connect(sys.argv[1] if sys.argv[1:] else temporary.name)  # a folder; no server
mq.create_subject("order.book", partitions=4)

with mq.producer() as producer:  # leaving the block waits until all messages are stored
    for step in ("created", "paid", "shipped"):
        producer.send("order.book", step.encode(), key="order-42")


@mq.handler("order.book", group="notify", order="key")
def notify(message, context):
    print(message.key_text, message.body.decode())
    if message.body == b"shipped":
        mq.shutdown()


mq.run()  # until Ctrl-C, or shutdown()
mq.close()
