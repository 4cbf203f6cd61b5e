"""C12: shared and broadcast groups while processes are killed, the server restarts, and retention removes messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from inturn import Connection, Context, Flush, LogSettings, Message
from inturn.testing import History, check
from inturn.testing.history import HandlerEnd, HandlerStart, SendAcknowledged
from tests.contract.bed import SHORT_LEASE, WAIT_S, Seen, eventually, quick, send, send_all
from tests.contract.test_served import Served

CONSUMER = """
import sys, time, inturn
mq = inturn.connect(sys.argv[1])
log = open(sys.argv[2], "a", buffering=1)
def handle(message, context):
    log.write(f"{message.partition} {message.offset} {context.epoch} {context.attempt} start\\n")
    time.sleep(0.002)
    log.write(f"{message.partition} {message.offset} {context.epoch} {context.attempt} end\\n")
settings = inturn.ConsumerSettings(concurrency=4, visibility_s=1.0, commit_interval_s=0.02, heartbeat_s=0.15)
with mq.consumer("orders", "g", handle, mode="shared", settings=settings) as consumer:
    print("up", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path / "data", SHORT_LEASE)
    yield made
    made.close()


@pytest.fixture
def mq(served: Served) -> Connection:
    connection = served.connect()
    connection.create_subject("orders", partitions=2)
    return connection


def lag(mq: Connection) -> int:
    return mq.group("orders", "g").describe().lag


class Crew:
    """Consumers of a shared group. Every consumer is a process that writes notes."""

    def __init__(self, target: str, folder: Path) -> None:
        self._target = target
        self._folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def add(self) -> subprocess.Popen[str]:
        log = self._folder / f"{len(self.processes)}.txt"
        command = [sys.executable, "-c", CONSUMER, self._target, str(log)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        self.processes.append(process)
        return process

    def kill(self, process: subprocess.Popen[str]) -> None:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate(timeout=WAIT_S)

    def close(self) -> None:
        """The remaining processes end by themselves."""
        for process in self.processes:
            if process.poll() is None:
                process.communicate("", timeout=60)

    def lines(self) -> list[tuple[str, list[str]]]:
        found = []
        for number in range(len(self.processes)):
            log = self._folder / f"{number}.txt"
            text = log.read_text() if log.exists() else ""
            found += [(str(number), line.split()) for line in text.splitlines() if line.endswith(("start", "end"))]
        return found

    def handled(self) -> Counter[tuple[int, int]]:
        return Counter((int(line[0]), int(line[1])) for _, line in self.lines() if line[-1] == "end")

    def history(self, sent: list[SendAcknowledged]) -> History:
        """Without times: the check is for losses."""
        events: list[SendAcknowledged | HandlerStart | HandlerEnd] = [*sent]
        for who, (partition, offset, epoch, _, what) in self.lines():
            place = ("orders", "g", int(partition), int(offset), None, who, int(epoch))
            events.append(HandlerStart(*place) if what == "start" else HandlerEnd(*place, None, "success"))
        return History(events)


@pytest.fixture
def crew(served: Served, tmp_path: Path) -> Iterator[Crew]:
    made = Crew(str(served.service.address), tmp_path)
    yield made
    made.close()


def test_consumers_that_are_killed_and_a_server_that_restarts_lose_nothing_and_repeat_nothing_that_is_acknowledged(
    served: Served, mq: Connection, crew: Crew
) -> None:
    """kill -9 of a consumer process and a restart of the node in the middle."""
    sent: list[SendAcknowledged] = []
    with mq.producer() as producer:
        for number in range(1500):
            stored = producer.send("orders", b"%d" % number)
            if number % 100 == 99:
                stored.result(WAIT_S)
    for part in mq.describe_subject("orders").partitions:
        sent += [SendAcknowledged("orders", part.index, offset, None, None) for offset in range(part.end_offset)]
    assert len(sent) == 1500
    doomed, other = crew.add(), crew.add()
    eventually(lambda: lag(mq) < 1200, "they are at work")
    crew.kill(doomed)
    eventually(lambda: lag(mq) < 800, "the other one goes on")
    before = acknowledged(mq)
    handled = crew.handled()
    served.service.close(grace_s=0.0)
    served.start()
    eventually(lambda: lag(mq) < 600, "it goes on after the restart")
    crew.kill(other)
    last = crew.add()
    eventually(lambda: lag(mq) == 0, "everything is acknowledged", timeout_s=20)
    crew.close()
    assert last.returncode == 0
    check(crew.history(sent), order="none").raise_if_bad()
    counts = crew.handled()
    assert set(counts) == {(one.partition, one.offset) for one in sent}
    repeated = {place for place, count in counts.items() if count > handled[place] and place in handled}
    assert not repeated & before, "what was acknowledged before the restart never came again"
    # Three faults. After each, up to two members repeat the messages that were fetched and not acknowledged.
    assert sum(counts.values()) - 1500 < 3 * 2 * 100


def acknowledged(mq: Connection) -> set[tuple[int, int]]:
    """All messages below the committed offsets, without finished messages above."""
    partitions = mq.group("orders", "g").describe().partitions
    return {(one.partition, offset) for one in partitions for offset in range(one.committed)}


def test_a_client_of_a_killed_process_gets_nothing_more_and_its_messages_come_back(
    served: Served, mq: Connection, crew: Crew
) -> None:
    doomed = crew.add()
    crew.kill(doomed)
    eventually(lambda: served.service.connection_count == 1, "the server has noticed")
    send_all(mq, "orders", 20)
    seen = Seen()
    with mq.consumer("orders", "g", seen, mode="shared", settings=quick()):
        seen.wait_for(20)
    assert set(seen.attempts) == {1}, "nothing was given to its long poll"


def test_a_server_that_stops_gently_gets_back_what_was_not_begun(served: Served, mq: Connection) -> None:
    send_all(mq, "orders", 40)
    may_end = threading.Event()

    def handle(message: Message, context: Context) -> None:
        may_end.wait(WAIT_S)

    seen = Seen(handle)
    consumer = mq.consumer("orders", "g", seen, mode="shared", settings=quick(concurrency=2, visibility_s=60.0))
    consumer.start()
    seen.wait_for(2)
    node = served.service._opened.node
    node.stop_gently()
    eventually(lambda: outstanding(mq) == 2, "only what runs is outstanding")
    may_end.set()
    eventually(lambda: outstanding(mq) == 0, "what ran is acknowledged")
    assert lag(mq) == 38
    served.service.close(grace_s=0.0)
    served.start()
    seen.wait_for(40)
    eventually(lambda: lag(mq) == 0, "it goes on by itself")
    consumer.stop()
    assert Counter(seen.bodies) == Counter(b"%d" % number for number in range(40))


def outstanding(mq: Connection) -> int:
    return sum(one.outstanding for one in mq.group("orders", "g").describe().partitions)


def test_a_broadcast_consumer_goes_on_when_the_server_was_away(
    served: Served, mq: Connection, tmp_path: Path, quiet: None
) -> None:
    send_all(mq, "orders", 10)
    seen = Seen()
    with mq.consumer("orders", "g", seen, mode="broadcast", offsets=tmp_path / "own", order="key", settings=quick()):
        seen.wait_for(10)
        served.service.close(grace_s=0.0)
        time.sleep(2 * SHORT_LEASE.life_s)  # long enough for the member to release all partitions
        served.start()
        send(mq, "orders", "k:more")
        seen.wait_for(11)
    assert Counter(seen.bodies) == Counter([*(b"%d" % number for number in range(10)), b"more"])


def test_what_retention_took_is_said_and_passed_by_broadcast_and_shared_groups(tmp_path: Path, quiet: None) -> None:
    served = Served(tmp_path / "data")
    served.service.close(grace_s=0.0)
    served.options["log"] = LogSettings(
        flush=Flush.OS, segment_bytes=4096, retention_bytes=16384, checkpoint_interval_s=0.01
    )
    served.start()
    mq = served.connect()
    mq.create_subject("line", partitions=1)
    own = tmp_path / "own"
    fails = Seen(lambda message, context: False)  # no result: the message is delivered again
    for group, handler, how in (("b", Seen(), {"offsets": own}), ("s", fails, {})):
        mode = "broadcast" if how else "shared"
        send(mq, "line", "early")
        with mq.consumer("line", group, handler, mode=mode, settings=quick(), **how):  # type: ignore[arg-type]
            handler.wait_for(1)
    engine = served.service._opened._engine
    with mq.producer() as producer:

        def takes_something() -> bool:
            """Retention stays below the last checkpoint. Appends write checkpoints, but not too often."""
            for _ in range(50):
                producer.send_sync("line", b"x" * 500)
            return engine.apply_retention() > 0

        eventually(takes_something, "retention takes something")
    part = mq.describe_subject("line").partitions[0]
    oldest, end = part.start_offset, part.end_offset
    assert oldest > 2
    structlog.reset_defaults()
    seen, shared = Seen(), Seen()
    with structlog.testing.capture_logs() as logs:
        with mq.consumer("line", "b", seen, mode="broadcast", offsets=own, settings=quick()) as later:
            seen.wait_for(end - oldest)
            assert later.leases()[0].missing == oldest - 1, "it had handled one"
        with mq.consumer("line", "s", shared, mode="shared", settings=quick()):
            shared.wait_for(end - oldest)
            eventually(lambda: mq.group("line", "s").describe().lag == 0, "what is gone is passed")
    (said,) = [one for one in logs if one["event"] == "consumer.offsets_gone"]
    assert (said["partition"], said["starts_at"]) == (0, oldest)
    assert [message.offset for message in seen.messages] == list(range(oldest, end))
    assert sorted(message.offset for message in shared.messages) == list(range(oldest, end))
    assert mq.group("line", "s").keys() == [], "what failed and is gone is over"
    served.close()
