"""The thread that writes what a producer could not send to its outbox, and notices when it was sent from there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from inturn.model.errors import SendFailed
from inturn.model.logs import get_logger
from inturn.producer.core import ProducerCore
from inturn.producer.flight import Flight
from inturn.producer.keeping import Keeper

_log = get_logger("inturn.producer")
LOOK_S = 0.1  # how often is looked for rows that are gone, while some key waits for that
# Closing: while rows are being sent from the outbox, what comes behind them waits so long for the last of them. If that
# is gone by then, it needs not go through the outbox; a key that is always busy would else never leave it.
CLOSING_S = 0.1
CLOSING_LOOK_S = 0.005
MOVING_S = 1.0  # rows are being sent, if one was within this time


class KeeperThread:
    """Shares the producer's lock. A handle is answered when its row is durable, not before."""

    def __init__(
        self,
        keeper: Keeper,
        core: ProducerCore,
        lock: threading.Lock,
        roomier: threading.Condition,
        wake_sender: Callable[[], None],
    ) -> None:
        """`wake_sender` is called under the lock when the producer has something to send again."""
        self._keeper = keeper
        self._core = core
        self._lock = lock
        self._roomier = roomier
        self._wake_sender = wake_sender
        self._work = threading.Condition(lock)
        self._moved_at_s = -MOVING_S
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name=f"inturn-keeper-{core.producer_id}", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Called under the lock."""
        self._work.notify()

    def close(self) -> None:
        """Write what is left, then end."""
        with self._lock:
            self._is_closed = True
            self._work.notify()
        self._thread.join()
        self._keeper.close()

    def _run(self) -> None:
        keeping = self._core.keeping
        assert keeping is not None
        while True:
            with self._lock:
                if not keeping.has_work:
                    if self._is_closed:
                        return
                    self._work.wait(LOOK_S if keeping.has_keys else None)
                flights = keeping.take()
                last_rows = keeping.last_rows()
            if flights:
                self._keep(self._not_released(flights))
            elif last_rows:
                self._look(last_rows)

    def _not_released(self, flights: list[Flight]) -> list[Flight]:
        """Those that have to be written; the others are sent after all, since all before them was."""
        if self._is_closed:
            return flights
        left = self._release(flights)
        until_s = time.monotonic() + CLOSING_S
        while left and time.monotonic() < until_s and self._is_closing(left):
            time.sleep(CLOSING_LOOK_S)
            left = self._release(left)
        return left

    def _is_closing(self, flights: Sequence[Flight]) -> bool:
        is_moving = time.monotonic() < self._moved_at_s + MOVING_S
        return is_moving and not self._is_closed and all(flight.is_diverted for flight in flights)

    def _release(self, flights: Sequence[Flight]) -> list[Flight]:
        keeping = self._core.keeping
        assert keeping is not None
        with self._lock:
            last_rows = keeping.last_rows_of(flights)
        self._look(last_rows)
        left: list[Flight] = []
        blocked: set[tuple[str, bytes]] = set()
        with self._lock:
            for flight in flights:
                places = keeping.places(flight)
                is_free = flight.is_diverted and places.isdisjoint(blocked) and not keeping.has_rows(places)
                if not is_free or not self._core.release(flight):
                    left.append(flight)
                    blocked |= places
            if len(left) < len(flights):
                self._wake_sender()
        return left

    def _keep(self, flights: list[Flight]) -> None:
        if not flights:
            return
        rows = [row for flight in flights for row in self._core.to_keep(flight)]
        try:
            row_ids = self._keeper.keep(rows)
        except Exception as error:  # whatever it is, those who wait are told, and the thread lives on
            self._not_kept(flights, error)
            return
        _log.warning("producer.kept_in_outbox", messages=len(rows), subject=rows[0].subject)
        with self._lock:
            start = 0
            for flight in flights:
                end = start + len(flight.messages)
                self._core.kept(flight, row_ids[start:end])
                start = end
            self._roomier.notify_all()

    def _not_kept(self, flights: list[Flight], error: Exception) -> None:
        _log.error("producer.outbox_failed", messages=sum(len(one.messages) for one in flights), error=str(error))
        with self._lock:
            for flight in flights:
                cause = f"the outbox could not keep it either: {error}"
                self._core.not_kept(flight, SendFailed(flight.subject, str(flight.home), cause))
            self._roomier.notify_all()

    def _look(self, last_rows: list[int]) -> None:
        try:
            gone = self._keeper.gone(last_rows) if last_rows else set()
        except Exception as error:  # then the keys stay where they are
            _log.warning("producer.outbox_not_read", error=str(error))
            return
        if gone:
            self._moved_at_s = time.monotonic()
            with self._lock:
                assert self._core.keeping is not None
                self._core.keeping.forget(gone)
