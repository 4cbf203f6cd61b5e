"""The scanner: sends the rows of an outbox while holding the lease, else waits for the lease."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from inturn.model.errors import Closed, InturnError, OutboxHeld, OutboxLost, ProducerFenced
from inturn.model.logs import get_logger
from inturn.model.time import Clock, SystemClock
from inturn.outbox.scan_core import Hold, LeaseWatch
from inturn.outbox.scan_session import Counts, ScanSession
from inturn.outbox.store import OutboxStore
from inturn.outbox.table import OutboxSettings
from inturn.protocol.commands import Node

_log = get_logger("inturn.outbox")
BACKOFF_S = 0.5
STOP_S = 30.0


class Connected(Protocol):
    """The part of a connection that a scanner needs."""

    @property
    def node(self) -> Node: ...


@dataclass(frozen=True, slots=True)
class ScannerStatistics:
    """Counts of a scanner since the start."""

    is_scanning: bool  # the scanner holds the lease
    sent: int  # rows stored and deleted
    recalled: int  # rows stored by an earlier scanner, only deleted by this scanner
    refused: int  # failed attempts; see `Outbox.status` for the rows
    in_flight: int
    open_transactions: int  # transactions that hold back rows committed behind (PostgreSQL)


class Scanner:
    """Sends the messages of an outbox, in a thread of its own, from `start` (or `with`) until `stop`.

    Any number of scanners may run, in any processes: one scanner has the lease and scans, the other scanners wait to
    take over. Rows of one key are stored in the order of ids, every row once; docs/how-to/outbox.md has the exact
    guarantees.
    """

    def __init__(
        self, store: OutboxStore, node: Node, settings: OutboxSettings | None = None, clock: Clock | None = None
    ) -> None:
        self._store = store
        self._node = node
        self._settings = settings if settings is not None else OutboxSettings()
        self._clock = clock if clock is not None else SystemClock()
        self._owner = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._counts = Counts()
        self._session: ScanSession | None = None
        self._stop = threading.Event()
        self._is_in_hand = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: InturnError | None = None

    @property
    def error(self) -> InturnError | None:
        """Why the scanner ended without `stop`, if so."""
        return self._error

    def start(self) -> None:
        """Begin. InvalidInput if the tables do not exist."""
        if self._thread is not None:
            raise Closed("scanner")
        try:
            self._store.check()
        except BaseException:
            self._store.close()
            raise
        self._thread = threading.Thread(target=self._run, name="inturn-outbox", daemon=True)
        self._thread.start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Wait for messages on the way, write the results, release the lease. False if that took longer than
        `timeout_s`."""
        self._stop.set()
        self.wake()
        if self._thread is None:
            return True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return False
        self._store.close()
        return True

    def wake(self) -> None:
        """Scan now: rows were committed."""
        session = self._session
        if session is not None:
            session.changed.set()

    def run_once(self, wait_s: float = 0.0, advance: Callable[[int], None] | None = None) -> ScannerStatistics:
        """Send all rows that may be sent now, in this thread, and release the lease. `advance` is called with the
        number of rows sent since the last call.

        OutboxHeld if another scanner holds the lease for `wait_s` longer. Refused rows stay, with all rows of the same
        keys, and so do rows behind an open transaction.
        """
        with self._is_in_hand, contextlib.closing(self._store):
            self._store.check()
            hold, name = self._taken(wait_s)
            session = self._begun(hold, name)
            try:
                self._empty(session, advance)
                session.finish()
            finally:
                self._end(session, hold)
        return self.statistics()

    def statistics(self) -> ScannerStatistics:
        session = self._session
        return ScannerStatistics(
            is_scanning=session is not None,
            sent=self._counts.sent,
            recalled=self._counts.recovered,
            refused=self._counts.refused,
            in_flight=session.in_flight if session is not None else 0,
            open_transactions=session.open_count if session is not None else 0,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def _taken(self, wait_s: float) -> tuple[Hold, str]:
        watch, until_s = LeaseWatch(), self._clock.monotonic() + wait_s
        while True:
            taken = self._take(watch)
            if taken is not None:
                return taken
            if self._clock.monotonic() >= until_s:
                found = self._store.find_lease()
                raise OutboxHeld(self._store.name, (found.owner if found is not None else None) or "nobody", wait_s)
            self._stop.wait(min(0.05, self._settings.poll_s))

    def _take(self, watch: LeaseWatch) -> tuple[Hold, str] | None:
        asked_at_s = self._clock.monotonic()
        seen = self._store.read_lease(uuid.uuid4().hex)
        if seen.owner != self._owner and not watch.may_take(seen, asked_at_s):
            return None
        epoch = self._store.take_lease(seen, self._owner, self._settings.lease.life_s)
        if epoch is None:
            return None
        return Hold(epoch, self._settings.lease, asked_at_s), f"outbox-{seen.name}"

    def _begun(self, hold: Hold, name: str) -> ScanSession:
        self._session = ScanSession(self._store, self._node, self._clock, self._settings, hold, name, self._counts)
        return self._session

    def _empty(self, session: ScanSession, advance: Callable[[int], None] | None) -> None:
        told = self._counts.sent
        while session.turn() or session.in_flight:
            if advance is not None and self._counts.sent > told:
                advance(self._counts.sent - told)
                told = self._counts.sent
            if session.in_flight:
                session.wait()

    def _run(self) -> None:
        watch = LeaseWatch()
        while not self._stop.is_set():
            try:
                taken = self._take(watch)
                if taken is None:
                    self._stop.wait(self._settings.poll_s)
                    continue
                watch = LeaseWatch()
                with self._is_in_hand:
                    self._scan(*taken)
            except (OutboxLost, ProducerFenced) as error:
                _log.warning("outbox.taken_over", table=self._store.name, error=str(error))
                self._stop.wait(self._settings.poll_s)
            except Closed as error:
                self._error = error
                _log.warning("outbox.scanner_ended", table=self._store.name, error=str(error))
                return
            except Exception as error:  # a thread must not end without a trace
                _log.warning("outbox.scan_failed", table=self._store.name, error=str(error) or repr(error))
                self._stop.wait(BACKOFF_S)

    def _scan(self, hold: Hold, name: str) -> None:
        _log.info("outbox.scanning", table=self._store.name, epoch=hold.epoch)
        session = self._begun(hold, name)
        try:
            while not self._stop.is_set():
                if session.is_over:
                    session.end()
                    session = self._begun(hold, name)
                self._turn(session)
            session.finish()
        finally:
            self._end(session, hold)

    def _end(self, session: ScanSession, hold: Hold) -> None:
        """Release the lease, also after an error: the next scanner recovers which rows are stored."""
        self._session = None
        session.end()
        with contextlib.suppress(InturnError):
            self._store.release(hold.epoch)

    def _turn(self, session: ScanSession) -> None:
        try:
            if not session.turn():
                session.wait()
        except InturnError as error:
            if not error.retriable:
                raise
            _log.warning("outbox.waiting", table=self._store.name, error=str(error))
            self._stop.wait(BACKOFF_S)
