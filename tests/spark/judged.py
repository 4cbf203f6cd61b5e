"""A served folder with recorded broker decisions, so that the order checker can judge consumers and tasks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import inturn
from inturn import Connection, Consumer, ConsumerSettings, Flush, LeaseSettings, LogSettings
from inturn.model.errors import NotFound
from inturn.server.server import Server
from inturn.testing.checker import check
from inturn.testing.verdict import Verdict
from inturn.transport.address import Address
from simulator.processes.history import Death, FileRecorder, merge
from tests.spark.noting import Noted, Noting
from tests.spark.waiting import wait_until

SUBJECT, GROUP = "orders", "billing"
LOG = LogSettings(flush=Flush.OS)


@dataclass
class Judged:
    """Handlers write notes to `folder`; `mq` is a connection to the server."""

    path: Path
    folder: Path
    lease: LeaseSettings
    log: LogSettings
    service: Server
    mq: Connection

    @property
    def address(self) -> str:
        return str(self.service.address)

    @property
    def noted(self) -> Noted:
        return Noted(self.folder)

    @property
    def lag(self) -> int:
        return self.mq.group(SUBJECT, GROUP).describe().lag

    def make_group(self, order: str = "key", **options: Any) -> None:
        """Create the group at the first message."""
        settings = ConsumerSettings(**options)
        with self.mq.consumer(SUBJECT, GROUP, Noting(self.folder), order=order, settings=settings):
            wait_until(self.has_group, "the group is there")

    def has_group(self) -> bool:
        try:
            self.mq.group(SUBJECT, GROUP).describe()
        except NotFound:
            return False
        return True

    def send(
        self, count: int, keys: int = 10, *, first: int = 0, key: str | None = None, keyless: bool = False
    ) -> None:
        """Send messages; the body and the message id are the same number."""
        with self.mq.producer() as producer:
            for number in range(first, first + count):
                name = None if keyless else (key or f"k{number % keys}")
                producer.send(SUBJECT, b"%d" % number, key=name, message_id=str(number))

    def online(self, handler: Noting, order: str = "key", **options: Any) -> Consumer:
        chosen = {"concurrency": 4, "commit_interval_s": 0.05, "heartbeat_s": 0.5, **options}
        settings = ConsumerSettings(**chosen)
        return self.mq.consumer(SUBJECT, GROUP, handler, order=order, settings=settings, name="online")

    def damage(self, partition: int = 0) -> None:
        """Flip a bit near the middle of the stored data of a partition."""
        (path,) = (self.path / "log" / f"p{partition + 1}").glob("*.log")
        content = path.read_bytes()
        at = content.index(b"k", len(content) // 2)
        with path.open("r+b") as file:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))

    def stop_server(self) -> None:
        self.service.close(grace_s=0.0)

    def start_server(self) -> None:
        """Start the server again at the same address."""
        self.service = _service(self.path, self.folder, self.lease, self.log, self.service.address.port)

    def judge(self, order: Any = "key", deaths: Iterable[Death] = (), *, complete: bool = True) -> Verdict:
        """Judge all notes; raise on a violation."""
        merged = merge(self.noted.files(), [_server_events(self.folder)], deaths, margin_s=self.lease.margin_s)
        stored = {(one.subject, one.partition, one.offset): one.message_id for one in self.mq.reader(SUBJECT)}
        verdict = check(merged.history, subject=SUBJECT, group=GROUP, order=order, complete=complete, stored=stored)
        verdict.raise_if_bad()
        return verdict


@contextlib.contextmanager
def judging(
    path: Path, partitions: int = 2, *, lease: LeaseSettings | None = None, log: LogSettings = LOG, **subject: Any
) -> Iterator[Judged]:
    """Serve a folder, with a connection and a subject."""
    folder = path / "noted"
    folder.mkdir()
    lease = lease if lease is not None else LeaseSettings()
    service = _service(path / "data", folder, lease, log)
    with inturn.connect(str(service.address)) as mq:
        judged = Judged(path / "data", folder, lease, log, service, mq)
        mq.create_subject(SUBJECT, partitions, **subject)
        try:
            yield judged
        finally:
            mq.close()
            judged.service.close(grace_s=0.0)


def _service(path: Path, folder: Path, lease: LeaseSettings, log: LogSettings, port: int = 0) -> Server:
    recorder = FileRecorder(_server_events(folder))
    return Server(path, log=log, lease=lease, address=Address("127.0.0.1", port), observer=recorder)


def _server_events(folder: Path) -> Path:
    return folder / "server.decisions"
