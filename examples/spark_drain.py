"""The night of the big sale: notifications fall behind; a drain handles the backlog and hands the group back.

The same on the command line: inturn drain order.book --group notify --handler shop:notify

    pip install 'inturn[spark]'
    python spark_drain.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import inturn
import inturn.spark

ORDERS, STEPS = 400, ("created", "paid", "packed", "shipped")


def notify(message: inturn.Message, context: inturn.Context) -> None:
    """Slow, like a call to a remote service; the same function online and on Spark."""
    time.sleep(0.01)


def main() -> None:
    spark = inturn.spark.session(master="local[2]")
    with tempfile.TemporaryDirectory() as folder, inturn.connect(Path(folder) / "data") as mq:
        mq.create_subject("order.book", partitions=2)
        two_at_once = inturn.ConsumerSettings(concurrency=2)
        online = mq.consumer("order.book", "notify", notify, order="key", settings=two_at_once)
        with online, mq.producer() as producer:
            for step in STEPS:
                for number in range(ORDERS):
                    producer.send("order.book", step.encode(), key=f"order-{number}")
            producer.flush()
            print(f"{mq.group('order.book', 'notify').describe().lag} notifications are late")

            report = inturn.spark.drain(spark, mq.target, "order.book", "notify", notify)
            print(f"drained {report.done} at {report.per_s:,.0f}/s; taken over in {report.take_over_s:.2f} s")

            producer.send_sync("order.book", b"delivered", key="order-7")  # handled by the online consumer again
            while mq.group("order.book", "notify").describe().lag:
                time.sleep(0.05)
            print(f"online again: {online.statistics().partitions} and nothing late")
    spark.stop()


if __name__ == "__main__":
    main()
