"""An audit in CI: handle some messages, then prove from the trace that every key was handled in order.

pip install inturn[spark]
python examples/spark_audit.py
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

from inturn import ConsumerSettings, Context, Message, connect
from inturn.spark.audit.audit import audit
from inturn.spark.session import session

COUNT = 500


def main() -> None:
    done: list[int] = []
    is_over = threading.Event()

    def handler(message: Message, context: Context) -> None:
        done.append(message.offset)
        if len(done) == COUNT:
            is_over.set()

    with tempfile.TemporaryDirectory() as folder:
        data, traces = Path(folder, "data"), Path(folder, "traces")
        with connect(data) as mq:
            mq.create_subject("orders", partitions=2)
            with mq.producer() as producer:
                for number in range(COUNT):
                    producer.send("orders", b"%d" % number, key=b"customer-%d" % (number % 20))
            settings = ConsumerSettings(trace=str(traces))
            with mq.consumer("orders", "billing", handler, order="key", settings=settings):
                is_over.wait(60)
        spark = session("audit", "local[2]")
        try:
            verdict = audit(spark, traces, log=data, subject="orders", complete=True)
        finally:
            spark.stop()
    print(verdict)
    verdict.raise_if_bad()
    assert verdict.total("finished") == COUNT, "an empty trace would break no order either"


if __name__ == "__main__":
    main()
