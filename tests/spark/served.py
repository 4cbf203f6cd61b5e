"""A folder served on loopback, for tests with readers in other processes (Spark's workers)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import inturn
from inturn import Connection, Flush, LeaseSettings, LogSettings
from inturn.server.server import Server
from inturn.transport.address import Address


class Served(NamedTuple):
    address: str
    connection: Connection


@contextlib.contextmanager
def serving(path: Path, lease: LeaseSettings | None = None) -> Iterator[Served]:
    """Serve the folder and connect; server and connection are closed at the end."""
    service = Server(path, log=LogSettings(flush=Flush.OS), lease=lease, address=Address("127.0.0.1"))
    try:
        with inturn.connect(str(service.address)) as connection:
            yield Served(str(service.address), connection)
    finally:
        service.close(grace_s=0.0)
