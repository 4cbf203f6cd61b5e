"""The decoder alone on a stored subject: the bound for all code that delivers messages."""

from __future__ import annotations

import time

from inturn.client import Connection
from inturn.model.batch import StoredBatch, decode
from inturn.model.message import Origin
from inturn.protocol.commands import Pulled, Read
from inturn.protocol.request import ask


def read_batches(mq: Connection, subject: str) -> list[StoredBatch]:
    """All batches of the first partition."""
    batches: list[StoredBatch] = []
    offset = 0
    while True:
        pulled = ask(mq.node, Read(subject, 0, offset, 1 << 20), Pulled)
        if not pulled.batches:
            return batches
        batches += pulled.batches
        offset = pulled.next_offset


def decode_s(batches: list[StoredBatch], count: int) -> float:
    """The time of a bare loop that decodes the batches."""
    origin = Origin("bench", 0)
    seen = 0
    began = time.perf_counter()
    for batch in batches:
        for _ in decode(batch, origin):
            seen += 1
    took = time.perf_counter() - began
    assert seen == count
    return took
