"""grow: the wait of sends while a subject grows from 2 to 8 partitions under 10 000 messages a second.

A server process; a process sends at this rate, pipelined; and this process sends synchronously to a slot that moves.
The figure is the longest synchronous send around the growth, the worst of all repetitions; beside the figure the
longest send in the second before: the effect of the load and the machine.
"""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.child import Child
from benchmarks.report import BenchReport, BenchRow, Beside, median
from benchmarks.served_child import served
from inturn.client import Connection, connect
from inturn.model.routing import SLOT_COUNT, slot_of
from inturn.producer.producer import Producer

BEFORE, AFTER = 2, 8
RATE = 10_000
AIM_MS = 500.0


@dataclass(slots=True)
class Probe:
    """Sends messages in sequence, and notes the times of send and acknowledgement."""

    producer: Producer
    subject: str
    sends_s: list[tuple[float, float]] = field(default_factory=list)
    is_over: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        key = _moving_key()
        while not self.is_over.is_set():
            began_s = time.monotonic()
            self.producer.send_sync(self.subject, b"x" * 100, key=key)
            self.sends_s.append((began_s, time.monotonic()))

    def longest_ms(self, from_s: float, until_s: float) -> float:
        """The longest of the sends that were on their way within this time."""
        waits = [ended - began for began, ended in self.sends_s if ended >= from_s and began <= until_s]
        return 1000 * max(waits, default=0.0)


def run(quick: bool) -> BenchReport:
    repetitions = 1 if quick else 10
    grown_ms, usual_ms, call_ms = [], [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-")))
        address = stack.enter_context(served(folder)).hear()
        mq = stack.enter_context(connect(address, wait_s=10.0))
        for number in range(repetitions):
            grown, usual, call = _grow(mq, address, f"bench-{number}")
            grown_ms.append(grown)
            usual_ms.append(usual)
            call_ms.append(call)
    figure, usual = max(grown_ms), max(usual_ms)
    beside = [Beside("the second before, longest", usual)]
    more = {"median_ms": median(grown_ms), "grow_ms": median(call_ms), "growths": repetitions}
    what = f"{BEFORE} → {AFTER} partitions under {RATE:,} messages/s, longest wait of a send"
    row = BenchRow(what, figure, "ms", beside, figure / usual, f"< {AIM_MS:g} ms", figure < AIM_MS, more)
    return BenchReport("grow", figure, "ms", beside, figure / usual, [row])


def _grow(mq: Connection, address: str, subject: str) -> tuple[float, float, float]:
    mq.create_subject(subject, partitions=BEFORE)
    with Child("pacing_child", address, subject) as load, mq.producer() as producer:
        load.hear()
        load.ask("start", RATE)
        probe = Probe(producer, subject)
        thread = threading.Thread(target=probe.run)
        thread.start()
        time.sleep(1.5)
        at_s = time.monotonic()
        mq.grow_subject(subject, AFTER)
        over_s = time.monotonic()
        time.sleep(1.0)
        probe.is_over.set()
        thread.join()
        load.ask("stop")
    return probe.longest_ms(at_s, over_s + 0.5), probe.longest_ms(at_s - 1.0, at_s - 0.01), 1000 * (over_s - at_s)


def _moving_key() -> bytes:
    """A key of the last slot: the slot belongs to the last partition before and after the growth."""
    return next(key for key in (b"%d" % number for number in range(100_000)) if slot_of(key) == SLOT_COUNT - 1)
