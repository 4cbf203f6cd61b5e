"""An online consumer of the demo's last act, in a process of its own; it records a trace.

python -m demo.incident_consumer NAME TRACES HEARTBEAT_S, and the address of the server on stdin.
"""

from __future__ import annotations

import os
import sys
import threading

from demo.children import GRACE_S, end_with_parent
from demo.incident_notify import notify
from demo.incident_sale import INCIDENT_GROUP, INCIDENT_SUBJECT, ONLINE_CONCURRENCY
from inturn.client import connect
from inturn.model.settings import ConsumerSettings


def main(name: str, traces: str, heartbeat_s: str) -> None:
    address = sys.stdin.buffer.readline().decode().strip()
    if not address:
        return  # there will be no server
    is_over = threading.Event()
    end_with_parent(is_over.set)
    settings = ConsumerSettings(
        concurrency=ONLINE_CONCURRENCY, commit_interval_s=0.1, heartbeat_s=float(heartbeat_s), trace=traces
    )
    with (
        connect(address, wait_s=GRACE_S) as connection,
        connection.consumer(INCIDENT_SUBJECT, INCIDENT_GROUP, notify, order="key", settings=settings, name=name),
    ):
        is_over.wait()
        # If the server is gone, too, there is nobody to give anything back to.
        timer = threading.Timer(GRACE_S, os._exit, [1])
        timer.daemon = True
        timer.start()


if __name__ == "__main__":
    main(*sys.argv[1:])
