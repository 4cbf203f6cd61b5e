"""A server in a separate process, a hostile client, and a healthy client."""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

import inturn
from inturn import ConsumerSettings
from inturn.model.errors import InturnError
from inturn.model.settings import LeaseSettings
from inturn.model.time import SystemClock
from inturn.protocol.codec import VERSIONS, pack, unpack
from inturn.protocol.commands import Answer, Command, Done, Hello, Ping
from inturn.protocol.frames import FrameReader, frame_of
from inturn.protocol.request import ask
from inturn.testing.checker import check
from inturn.testing.recorder import Recorder
from simulator.processes.child import ServerSpec
from simulator.processes.cluster import free_port
from tests.contract.bed import eventually

LEASE = LeaseSettings(life_s=12.0, renew_s=0.5, margin_s=0.2)
RSS_GROWTH_BYTES_MAX = 150 << 20
PING_S_MAX = 20.0
WAIT_S = 40.0
SENT_MIN = 5


class ServerProcess:
    """The server under attack. `log` is the output."""

    def __init__(self, folder: Path, port: int | None = None) -> None:
        self.port = free_port(random.Random()) if port is None else port
        self.folder = folder
        self.log = folder / "server.log"
        spec = ServerSpec(
            events="", seed=1, folder=str(folder / "server"), port=self.port, flush="os", lease=LEASE, bug=None
        )
        command = [sys.executable, "-m", "simulator.processes.server", msgspec.json.encode(spec).decode()]
        with self.log.open("ab") as said:
            self._process = subprocess.Popen(command, stdout=said, stderr=said)
        with inturn.connect(self.address, wait_s=60.0):
            pass
        self._rss_bytes = self.rss_bytes()

    @property
    def address(self) -> str:
        return f"inturn://127.0.0.1:{self.port}"

    def rss_bytes(self) -> int:
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        line = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return int(line.split()[1]) * 1024

    def assert_unharmed(self) -> None:
        assert self._process.poll() is None, self.log.read_text()[-2000:]
        with Raw(self.port) as raw:
            raw.hello()
            assert isinstance(raw.ask(Ping()), Done)
        growth_bytes = self.rss_bytes() - self._rss_bytes
        assert growth_bytes < RSS_GROWTH_BYTES_MAX, f"it grew by {growth_bytes >> 20} MiB"

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            assert self._process.wait(60) == 0, self.log.read_text()[-2000:]
        finally:
            self._process.kill()


class Raw:
    """Bytes on a socket, and the frames that come back."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), WAIT_S)
        self._reader = FrameReader(1 << 30)
        self._number = 0
        self._answers: dict[int, Answer | InturnError | Command] = {}

    def hello(self) -> Answer | InturnError | Command:
        return self.ask(Hello(VERSIONS, "a stranger"))

    def send(self, data: bytes | bytearray) -> None:
        self.socket.sendall(data)

    def send_frame(self, code: int, body: bytes) -> int:
        self._number += 1
        self.send(frame_of(self._number, code, body))
        return self._number

    def ask(self, command: Command) -> Answer | InturnError | Command:
        self._number += 1
        self.send(pack(self._number, command))
        return self.answer(self._number)

    def answer(self, number: int) -> Answer | InturnError | Command:
        """Raise ConnectionError if the server has ended the stream."""
        while number not in self._answers:
            self._read()
        return self._answers.pop(number)

    def _read(self) -> None:
        data = self.socket.recv(1 << 20)
        if not data:
            raise ConnectionError("hung up on")
        for frame in self._reader.feed(data):
            self._answers[frame.number] = unpack(frame)

    def is_hung_up_on(self) -> bool:
        """Whether the server ends the stream, with or without an answer before."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Healthy:
    """Sends, handles and pings during the attack. The order is checked at the end."""

    def __init__(self, address: str, subject: str) -> None:
        self._mq = inturn.connect(address)
        self._subject = subject
        self._recorder = Recorder(SystemClock())
        self._mq.create_subject(subject, 2)
        self._is_over = threading.Event()
        self.sent_count = 0
        self.ping_s_max = 0.0
        self._failures: list[BaseException] = []
        self._threads = [threading.Thread(target=self._try, args=(what,)) for what in (self._send, self._ping)]
        self._consumer = self._mq.consumer(
            subject, "healthy", self._handle, order="key", settings=ConsumerSettings(commit_interval_s=0.05)
        )

    def _try(self, what: Any) -> None:
        try:
            while not self._is_over.wait(0.01):
                what()
        except BaseException as error:
            self._failures.append(error)

    def _send(self) -> None:
        if self.sent_count == 0:
            self._producer = self._mq.producer()
        key = b"k%d" % (self.sent_count % 5)
        stored = self._producer.send_sync(self._subject, b"healthy", key=key)
        self._recorder.sent(stored.subject, stored.partition, stored.offset, key)
        self.sent_count += 1

    def _ping(self) -> None:
        before_s = time.monotonic()
        ask(self._mq.node, Ping(), Done)
        self.ping_s_max = max(self.ping_s_max, time.monotonic() - before_s)

    def _handle(self, message: inturn.Message, context: inturn.Context) -> None:
        what = (message.subject, context.group, message.partition, message.offset, message.key)
        who = (context.consumer, context.epoch)
        self._recorder.started(*what, *who, attempt=context.attempt)
        self._recorder.ended(*what, *who, result="success")

    def __enter__(self) -> Self:
        self._consumer.start()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        until_s = time.monotonic() + WAIT_S
        while kind is None and self.sent_count < SENT_MIN and not self._failures and time.monotonic() < until_s:
            time.sleep(0.01)
        self._is_over.set()
        for thread in self._threads:
            thread.join()
        if kind is None:
            assert self._failures == []
            assert self.sent_count >= SENT_MIN
            eventually(lambda: self._mq.group(self._subject, "healthy").describe().lag == 0, "all of it is handled")
        self._mq.close()
        if kind is None:
            verdict = check(self._recorder.snapshot(), order="key")
            verdict.raise_if_bad()
            assert verdict.sent == self.sent_count
            assert verdict.duplicates == 0
            assert self.ping_s_max < PING_S_MAX


@contextlib.contextmanager
def unharmed(server: ServerProcess, subject: str) -> Iterator[None]:
    """The block attacks; the server and a healthy client are not affected."""
    with Healthy(server.address, subject):
        yield
    server.assert_unharmed()


def no_trace_of_ours(log: Path) -> list[str]:
    """The server's log of commands that raised an unexpected error."""
    return [line for line in log.read_text().splitlines() if "command_failed" in line]
