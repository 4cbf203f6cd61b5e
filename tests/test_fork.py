"""A forked child shares no state with the parent. In the child all objects are closed, and the child holds no lock."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn

# The child prints the result of every call, then lives until stdin ends. The parent continues, then vanishes.
FORK = """
import os, signal, sys, time
import inturn

mq = inturn.connect(sys.argv[1])
mq.create_subject("orders", 1)
producer = mq.producer()
reader = mq.reader("orders")
consumer = mq.consumer("orders", "g", lambda message, context: None)
consumer.start()
producer.send_sync("orders", b"before", timeout_s=60)
ready, done = os.pipe()
child = os.fork()
if child == 0:
    calls = {
        "send": lambda: producer.send("orders", b"child"),
        "send_sync": lambda: producer.send_sync("orders", b"child", timeout_s=2),
        "another subject": lambda: producer.send("others", b"child"),
        "producer": lambda: mq.producer(),
        "subject": lambda: mq.subject("orders"),
        "create_subject": lambda: mq.create_subject("more", 1),
        "reader": lambda: mq.reader("orders"),
        "read": lambda: reader.read(0),
        "consumer": lambda: mq.consumer("orders", "h", lambda message, context: None),
        "describe_group": lambda: mq.group("orders", "g").describe(),
        "producer.close": lambda: producer.close(),
        "close": lambda: mq.close(),
        "connect": lambda: inturn.connect(sys.argv[1]),
    }
    for name, call in calls.items():
        began_s = time.monotonic()
        try:
            call()
            outcome = "returned"
        except Exception as error:
            outcome = type(error).__name__
        print(name, outcome, "soon" if time.monotonic() - began_s < 10 else "late", sep=":", flush=True)
    os.write(done, b"!")
    os.read(0, 1)
    sys.exit(0)
os.read(ready, 1)
producer.send_sync("orders", b"after", timeout_s=60)
print("parent:acknowledged:soon", flush=True)
if sys.argv[2] == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
mq.close()
"""
BUSY = """
import os, sys, threading
import inturn

mq = inturn.connect(sys.argv[1], flush="os")
mq.create_subject("orders", 4)
producer = mq.producer()
sent = 0
stopping = threading.Event()

def send():
    global sent
    while not stopping.is_set():
        producer.send("orders", b"%d" % sent, key="k")
        sent += 1

sender = threading.Thread(target=send)
sender.start()
children = []
for _ in range(10):
    while sent < 200 * len(children):
        stopping.wait(0.001)
    child = os.fork()
    if child == 0:
        try:
            producer.send("orders", b"child", key="k")
        except inturn.errors.Closed:
            sys.exit(7)  # through atexit, as most programs end
        os._exit(1)
    children.append(child)
codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
stopping.set()
sender.join()
producer.flush(60)
mq.close()
print(sent, *codes)
"""
# Fork while a thread is closing or opening a connection. Then print whether the folder is free while the child lives.
MEANWHILE = """
import os, sys, threading
import inturn
from inturn.server.folder import Folder
from inturn.server.folder import OpenedFolder
from inturn.store.database import Database

reached, go_on = threading.Event(), threading.Event()

def slowly(function):
    def wait_first(*arguments):
        reached.set()
        go_on.wait()
        return function(*arguments)
    return wait_first

path, when = sys.argv[1:]
if when == "closing":
    OpenedFolder.close = slowly(OpenedFolder.close)
    mq = inturn.connect(path)
    thread = threading.Thread(target=mq.close)
else:
    Database.open = slowly(Database.open)
    thread = threading.Thread(target=lambda: inturn.connect(path).close())
thread.start()
reached.wait()
alive, end = os.pipe()
child = os.fork()
if child == 0:
    os.close(end)
    os.read(alive, 1)
    os._exit(0)
go_on.set()
thread.join()
try:
    Folder(path).close()
    print("free")
except inturn.errors.FolderInUse as error:
    print(error)
os.close(end)
os.waitpid(child, 0)
"""
# The file number of the parent's lock file names a different file in the child. The exit code proves this.
FOREIGN = """
import os, sys
from inturn.server.folder import Folder

folder = Folder(sys.argv[1])
number = folder._lock_file
child = os.fork()
if child == 0:
    own = os.open(os.devnull, os.O_RDONLY)
    folder.close()
    os.fstat(own)
    os._exit(7 if own == number else 1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    Folder(sys.argv[1])
except Exception as error:
    print(type(error).__name__)
"""


class Forked:
    """The output of child and parent up to the end of the parent. The child still lives."""

    def __init__(self, folder: Path, end: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", FORK, str(folder), end],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.said: dict[str, tuple[str, str]] = {}
        while "parent" not in self.said:
            line = self.process.stdout.readline()
            assert line, f"it ended after {self.said}"
            name, outcome, when = line.strip().split(":")
            self.said[name] = outcome, when
        self.process.wait(60)

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.read()  # ends with the child
        self.process.stdout.close()


@pytest.fixture(params=["killed", "closed"])
def forked(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Forked]:
    made = Forked(tmp_path / "data", request.param)
    yield made
    made.close()


def test_everything_of_the_parents_says_closed_in_a_forked_child_and_the_folder_is_free_after_the_parent(
    tmp_path: Path, forked: Forked
) -> None:
    said = dict(forked.said)
    assert said.pop("producer.close") == ("returned", "soon")
    assert said.pop("close") == ("returned", "soon")
    assert said.pop("connect") == ("returned", "soon"), "as a client of its parent"
    assert said.pop("parent") == ("acknowledged", "soon")
    assert said == dict.fromkeys(said, ("Closed", "soon"))
    with inturn.connect(tmp_path / "data") as mq:  # the child still lives
        assert forked.process.returncode is not None
        assert [message.body for message in mq.reader("orders")] == [b"before", b"after"]
        with mq.producer() as producer:
            assert producer.send_sync("orders", b"new", timeout_s=60).offset == 2


def test_forking_while_threads_send_hurts_neither_parent_nor_child(tmp_path: Path) -> None:
    """At the fork, threads that the child does not have may hold locks."""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BUSY, str(tmp_path)], capture_output=True, text=True, timeout=90
    )
    assert ran.returncode == 0, ran.stderr
    sent, *codes = map(int, ran.stdout.split())
    assert codes == [7] * 10
    with inturn.connect(tmp_path) as mq:
        assert [message.body for message in mq.reader("orders")] == [b"%d" % number for number in range(sent)]


def _said(script: str, *arguments: str) -> list[str]:
    command = [sys.executable, "-W", "ignore", "-c", script, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout.splitlines()


@pytest.mark.parametrize("when", ["closing", "opening"])
def test_a_child_forked_while_a_connection_is_closed_or_opened_does_not_keep_the_lock(
    tmp_path: Path, when: str
) -> None:
    assert _said(MEANWHILE, str(tmp_path), when) == ["free"]


def test_closing_a_folder_of_the_parents_in_a_forked_child_harms_neither(tmp_path: Path) -> None:
    assert _said(FOREIGN, str(tmp_path)) == ["7", "FolderInUse"]
