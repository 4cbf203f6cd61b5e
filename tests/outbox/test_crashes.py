"""P8: scanners as separate processes, killed or frozen: no row is lost, out of order, or stored twice."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
from inturn import Connection, Outbox
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.contract.bed import eventually
from tests.outbox.shop import check_once_and_in_order, fill, made, stored
from tests.outbox.test_scanner import wait_until_empty

CHILD = Path(__file__).parent / "scanner_child.py"
ROWS = 1200


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Connection]:
    """A server that syncs every append, and a client."""
    service = Server(tmp_path / "served", address=Address("127.0.0.1"))
    with inturn.connect(str(service.address)) as connection:
        connection.create_subject("orders", partitions=4)
        yield connection
    service.close(grace_s=0.0)


@contextlib.contextmanager
def child(mq: Connection, url: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, str(CHILD), url, mq.target]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def count(mq: Connection) -> int:
    return sum(one.end_offset for one in mq.describe_subject("orders").partitions)


def owner(outbox: Outbox) -> str:
    return outbox.status().scanner or ""


def test_scanners_that_are_killed_in_the_middle_lose_nothing_and_repeat_nothing(served: Connection, url: str) -> None:
    outbox, chance = made(url), random.Random(7)
    total = in_the_middle = 0
    while in_the_middle < 2:
        assert total < 10 * ROWS, "they are never killed in the middle"
        fill(outbox, url, ROWS // 2, start=total)
        total += ROWS // 2
        with child(served, url) as process:
            until = count(served) + chance.randint(50, 400)
            eventually(lambda until=until: count(served) >= until, "it is on its way")  # type: ignore[misc]
            process.send_signal(signal.SIGKILL)
        in_the_middle += count(served) < total
    with child(served, url):
        wait_until_empty(outbox)
    check_once_and_in_order(stored(served), total)


def test_a_frozen_scanner_that_wakes_up_does_no_harm(served: Connection, postgres_url: str) -> None:
    """Frozen anywhere, even inside a transaction. With SQLite, a frozen process keeps the lock of the file."""
    url = postgres_url
    outbox = made(url)
    fill(outbox, url, ROWS)
    with child(served, url) as frozen:
        eventually(lambda: count(served) >= 50, "it has begun")
        frozen.send_signal(signal.SIGSTOP)
        os.waitpid(frozen.pid, os.WUNTRACED)
        former = owner(outbox)
        with child(served, url):
            eventually(lambda: owner(outbox) not in ("", former), "the other one takes over")
            frozen.send_signal(signal.SIGCONT)
            wait_until_empty(outbox)
            fill(outbox, url, 200, start=ROWS)
            wait_until_empty(outbox)
        check_once_and_in_order(stored(served), ROWS + 200)
        fill(outbox, url, 200, start=ROWS + 200)
        wait_until_empty(outbox)
    check_once_and_in_order(stored(served), ROWS + 400)


def test_two_scanner_processes_at_once_send_everything_once(served: Connection, postgres_url: str) -> None:
    url = postgres_url
    outbox = made(url)
    with child(served, url), child(served, url):
        for part in range(5):
            fill(outbox, url, 100, start=100 * part)
        wait_until_empty(outbox)
    check_once_and_in_order(stored(served), 500)
