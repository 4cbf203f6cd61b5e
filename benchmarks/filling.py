"""Backlogs for benchmarks: as producers would store messages, but in large batches."""

from __future__ import annotations

import os
import time
from array import array

from inturn.client import Connection
from inturn.model.batch import encode
from inturn.model.message import Outgoing
from inturn.model.routing import slot_of
from inturn.protocol.commands import Append, Appended
from inturn.protocol.request import ask

BATCH = 5_000
BODY_BYTES = 100


def fill(mq: Connection, subject: str, count: int, partitions: int, keys: int) -> None:
    """Make the subject with so many messages of 100 bytes, all different, of keys that take turns."""
    by_slot = mq.create_subject(subject, partitions).route.by_slot
    of_partition: list[list[tuple[bytes, int]]] = [[] for _ in range(partitions)]
    for number in range(keys):
        key = b"order-%d" % number
        of_partition[by_slot[slot_of(key)]].append((key, slot_of(key)))
    for first in range(0, count, BATCH):
        number = first // BATCH
        partition = number % partitions
        here = min(BATCH, count - first)
        some, at = of_partition[partition], number // partitions * BATCH
        chosen = [some[(at + one) % len(some)] for one in range(here)]
        bodies, now_ms = os.urandom(here * BODY_BYTES), time.time_ns() // 1_000_000
        messages = [
            Outgoing(bodies[one * BODY_BYTES : (one + 1) * BODY_BYTES], key, now_ms)
            for one, (key, _) in enumerate(chosen)
        ]
        batch = encode(messages, array("H", [slot for _, slot in chosen]))
        ask(mq.node, Append(subject, partition, batch), Appended)
