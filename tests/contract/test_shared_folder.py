"""A folder, several processes: the first process serves the other processes, and hands the folder on at the end."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
from inturn.model.errors import VersionMismatch
from inturn.server.folder import SOCKET_PATH_MAX, Folder, socket_path
from tests.contract.bed import WAIT_S, Seen, committed, eventually, quick

# Opens the folder, prints a line, and executes commands from stdin, line by line.
OTHER = """
import sys, inturn
def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\\n")  # at once: a handler speaks, too
    sys.stdout.flush()
mq = inturn.connect(sys.argv[1])
say("open", mq.node.is_opened_here)
producer = consumer = None
for line in sys.stdin:
    word, *rest = line.split()
    if word == "send":
        producer = producer or mq.producer()
        stored = producer.send_sync("line", rest[0].encode(), key="k", timeout_s=60)
        say("stored", stored.offset)
    elif word == "consume":
        def handle(message, context):
            say("handled", message.body.decode(), context.epoch)
        consumer = mq.consumer("line", "g", handle)
        consumer.start()
    elif word == "here":
        say("here", mq.node.is_opened_here)
mq.close()
say("closed")
"""


class Other:
    """A second process on the folder."""

    def __init__(self, folder: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        self.has_it_open = self.hear() == "open True"

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self.process.communicate(timeout=60)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    with inturn.connect(path) as mq:
        mq.create_subject("line", 1)
    return path


@pytest.fixture
def other(folder: Path) -> Iterator[Other]:
    made = Other(folder)
    yield made
    made.close()


def bodies(mq: inturn.Connection) -> list[bytes]:
    return [message.body for message in mq.reader("line")]


def test_a_second_process_just_works(folder: Path, other: Other) -> None:
    assert other.has_it_open
    with inturn.connect(folder) as mq:
        assert not mq.node.is_opened_here  # type: ignore[attr-defined]
        with mq.producer() as producer:
            producer.send_sync("line", b"ours", key="k")
        assert other.ask("send theirs") == "stored 1"
        assert bodies(mq) == [b"ours", b"theirs"]


@pytest.mark.parametrize("how", ["closed", "killed"])
def test_the_end_of_the_first_process_hands_the_folder_on(folder: Path, other: Other, how: str) -> None:
    with inturn.connect(folder) as mq:
        producer = mq.producer()
        assert producer.send_sync("line", b"0", key="k").offset == 0
        assert other.ask("send 1") == "stored 1"
        handles = [producer.send("line", b"%d" % number, key="k") for number in range(2, 500)]
        if how == "killed":
            other.kill()
        else:
            other.close()
        handles += [producer.send("line", b"%d" % number, key="k") for number in range(500, 700)]
        assert [handle.result(2 * WAIT_S).offset for handle in handles] == list(range(2, 700))
        eventually(lambda: mq.node.is_opened_here, "it has the folder now")  # type: ignore[attr-defined]
        assert bodies(mq) == [b"%d" % number for number in range(700)], "nothing lost, nothing twice, in order"
        third = Other(folder)
        assert not third.has_it_open
        assert third.ask("send 700") == "stored 700"
        third.close()


def test_a_consumer_keeps_its_lease_when_the_process_that_serves_it_is_killed(folder: Path, other: Other) -> None:
    """B2, B4: the consumer continues at once, although the lease has 15 s to live."""
    seen = Seen()
    with inturn.connect(folder) as mq, mq.consumer("line", "g", seen, settings=quick()):
        assert other.ask("send 0") == "stored 0"
        seen.wait_for(1)
        eventually(lambda: committed(mq) == 1, "it is committed")
        other.kill()
        with mq.producer() as producer:
            producer.send_sync("line", b"1", key="k", timeout_s=WAIT_S)
        seen.wait_for(2)
        eventually(lambda: committed(mq) == 2, "the second is committed, too")
        assert seen.bodies == [b"0", b"1"]
        assert set(seen.epochs) == {1}, "it is the same lease"


def test_the_consumers_of_a_killed_process_are_succeeded_at_once(folder: Path, other: Other) -> None:
    """B2: the killed process had the folder open, so the leases end with the process.

    The default lease has 15 s to live.
    """
    other.say("consume")
    assert other.ask("send 0") in ("stored 0", "handled 0 1")
    other.hear()
    with inturn.connect(folder) as mq:
        eventually(lambda: committed(mq) == 1, "it is committed")
        seen = Seen()
        with mq.consumer("line", "g", seen, settings=quick()):
            began_s = time.monotonic()
            other.kill()
            with mq.producer() as producer:
                producer.send_sync("line", b"1", key="k", timeout_s=WAIT_S)
            seen.wait_for(1)
            assert time.monotonic() - began_s < WAIT_S / 2
        assert seen.bodies == [b"1"]
        assert seen.epochs[0] > 1


def test_several_connections_of_one_process_share_the_folder(folder: Path) -> None:
    with inturn.connect(folder) as first, inturn.connect(folder) as second, inturn.connect(folder) as third:
        assert [mq.node.is_opened_here for mq in (first, second, third)] == [True, False, False]  # type: ignore[attr-defined]
        first.close()
        with third.producer() as producer:
            producer.send_sync("line", b"x", key="k", timeout_s=WAIT_S)
        assert bodies(second) == [b"x"]


def test_nobody_is_left_behind_by_many_comings_and_goings(folder: Path) -> None:
    """Connections open and close while a producer sends: every connection may have to take over."""
    stop = threading.Event()

    def come_and_go() -> None:
        while not stop.is_set():
            with inturn.connect(folder) as mq:
                mq.subjects()
            stop.wait(0.05)  # a thread that opens again at once leaves no chance to the others

    threads = [threading.Thread(target=come_and_go) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        with inturn.connect(folder) as mq, mq.producer() as producer:
            offsets = [producer.send_sync("line", b"%d" % number, key="k").offset for number in range(60)]
            assert offsets == list(range(60))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    with inturn.connect(folder) as mq:
        assert bodies(mq) == [b"%d" % number for number in range(60)]


def test_a_path_that_is_too_long_for_a_socket_works_as_well(tmp_path: Path) -> None:
    folder = tmp_path / ("a" * 90) / ("b" * 90)
    assert len(socket_path(folder.parent)) <= SOCKET_PATH_MAX
    with inturn.connect(folder) as first, inturn.connect(folder) as second:
        first.create_subject("line", 1)
        assert [subject.name for subject in second.subjects()] == ["line"]


def test_the_socket_is_for_its_owner_only(folder: Path) -> None:
    with inturn.connect(folder):
        assert os.stat(socket_path(folder)).st_mode & 0o777 == 0o600
    assert not os.path.exists(socket_path(folder))


def test_a_process_of_another_version_is_told_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with inturn.connect(folder):
        monkeypatch.setattr("inturn.transport.client_stream.VERSIONS", (900, 901))
        with pytest.raises(VersionMismatch):
            inturn.connect(folder)


def test_a_socket_that_cannot_be_made_costs_nothing_but_company(folder: Path) -> None:
    os.mkdir(socket_path(folder))
    with inturn.connect(folder) as mq, mq.producer() as producer:
        assert producer.send_sync("line", b"x", key="k").offset == 0


def test_nobody_is_served_if_others_than_the_owner_could_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def chmod(path: object, mode: int) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", chmod)
    with inturn.connect(folder) as mq:
        assert [subject.name for subject in mq.subjects()] == ["line"]
        with socket.socket(socket.AF_UNIX) as stranger, pytest.raises(OSError, match=r"refused|No such file"):
            stranger.connect(socket_path(folder))


def test_a_failure_while_the_folder_is_opened_leaves_nothing_behind(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("of nobody's making")

    before = set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr("inturn.server.folder.listen_in", fail)
        with pytest.raises(RuntimeError):
            inturn.connect(folder)
    eventually(lambda: set(threading.enumerate()) <= before, "no thread is left")
    Folder(folder).close()


def test_a_full_disk_does_not_keep_the_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", pwrite)
        with pytest.raises(OSError, match="No space left"):
            inturn.connect(folder)
    Folder(folder).close()
