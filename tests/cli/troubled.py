"""Folders in which handlers have failed: made with the API, read with the commands."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import structlog

import inturn
from inturn import Connection, ConsumerSettings, Context, Message, OnExhausted, RetryDelays
from tests.contract.bed import eventually


def fail(message: Message, context: Context) -> None:
    if message.key in (b"bad", b"worse\xff"):
        raise RuntimeError("no [red]connection[/red]")


def consume(
    mq: Connection,
    until: Callable[[], object],
    on_exhausted: str,
    *,
    order: str = "key",
    handler: Callable[[Message, Context], object] = fail,
) -> None:
    """Consume as the group billing of the subject orders until the condition holds."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    settings = ConsumerSettings(
        max_attempts=2,
        on_exhausted=OnExhausted(on_exhausted),
        commit_interval_s=0.01,
        retry=RetryDelays((0.02, 0.05), 1),
    )
    with mq.consumer("orders", "billing", handler, order=order, settings=settings):
        eventually(until, "the handlers have done so much")


def states(mq: Connection) -> list[str]:
    return [one.state for one in mq.group("orders", "billing").keys()]


def make(path: Path, on_exhausted: str) -> None:
    """Offsets 0 to 3 of "orders", a subject with a single partition: bad, good, bad, worse."""
    with inturn.connect(path, flush="os") as mq:
        mq.create_subject("orders", 1)
        with mq.producer() as producer:
            for number, key in enumerate((b"bad", b"good", b"bad", b"worse\xff")):
                producer.send("orders", b'{"n": %d}' % number, key=key, properties={"mine": "yes"})
        if on_exhausted == "dead-letter":
            consume(mq, lambda: mq.group("orders", "billing").describe().partitions[0].lag == 0, on_exhausted)
        else:
            wanted = {"block": "blocked", "park": "parked"}[on_exhausted]
            consume(
                mq,
                lambda: states(mq) == [wanted, wanted] and (on_exhausted == "block" or _all_parked(mq)),
                on_exhausted,
            )


def _all_parked(mq: Connection) -> bool:
    return len(mq.group("orders", "billing").describe_key("bad").parked) == 2
