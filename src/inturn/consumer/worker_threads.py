"""Workers as threads, for handlers that are plain functions."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Protocol, TypeAlias

from inturn.consumer.outcome import text_of
from inturn.consumer.run import Run
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.consumer.worker import Worker
from inturn.model.result import ResultKind

# Called with the lock held: ends the last run, and returns the next run if wanted. None: no work.
Turn: TypeAlias = Callable[[Run | None, bool], Run | None]


class Workers(Protocol):
    """Run handlers: `count` workers, a number that may change. Call `resize`, `wake` and `end` with the lock held."""

    count: int

    def start(self) -> None: ...

    def resize(self, count: int) -> None: ...

    def wake(self, wanted: int) -> None:
        """There is work for `wanted` more workers."""
        ...

    def end(self) -> None:
        """Workers leave when their run is over."""
        ...

    def try_out(self, trial: TrialRun, over: Callable[[TrialReport], None]) -> None:
        """Run a trial beside all other work; `over` is called at the end, from any thread. Call without the lock."""
        ...

    def join(self) -> None: ...

    def has_current_thread(self) -> bool: ...


SATURATED_SHARE = 0.85
WINDOW_S = 0.02


class WorkerThreads:
    """While the process saturates a core, quick handlers run in only as many threads as can compute at once: more
    threads would compete for the interpreter, which costs more than it brings. A hanging thread does not count."""

    def __init__(
        self,
        name: str,
        count: int,
        lock: threading.Lock,
        turn: Turn,
        worker: Worker,
        room: Callable[[float, int], int | None],
    ) -> None:
        """`room`: see `Scheduler.room`."""
        self.count = count
        self._name = name
        self._lock = lock
        self._work = threading.Condition(lock)
        self._turn = turn
        self._room = room
        self._worker = worker
        self._threads: set[threading.Thread] = set()
        self._trying: set[threading.Thread] = set()  # trials
        self._waiting = 0
        self._woken = 0  # waiting threads that were notified, and will look for work soon
        self._is_started = False
        self._is_ended = False
        self._cores = os.cpu_count() or 1
        self._is_saturated = False
        self._looked_at_s = time.monotonic()
        self._cpu_s = time.process_time()

    def start(self) -> None:
        with self._lock:
            self._is_started = True
            self.resize(self.count)

    def resize(self, count: int) -> None:
        self.count = count
        while self._is_started and len(self._threads) < count and not self._is_ended:
            thread = threading.Thread(
                target=self._run, name=f"inturn-worker-{self._name}-{len(self._threads)}", daemon=True
            )
            self._threads.add(thread)
            thread.start()
        self._work.notify_all()

    def wake(self, wanted: int) -> None:
        more = min(wanted, self._waiting) - self._woken
        if more > 0 and (room := self._room_left()) is not None:
            more = min(more, room - self._woken)
        if more > 0:
            self._woken += more
            self._work.notify(more)

    def _room_left(self) -> int | None:
        room = self._room(time.monotonic(), self._cores)
        return room if room is not None and self._saturated() else None

    def _saturated(self) -> bool:
        now_s = time.monotonic()
        if now_s - self._looked_at_s >= WINDOW_S:
            cpu_s = time.process_time()
            self._is_saturated = cpu_s - self._cpu_s > SATURATED_SHARE * (now_s - self._looked_at_s)
            self._looked_at_s, self._cpu_s = now_s, cpu_s
        return self._is_saturated

    def end(self) -> None:
        self._is_ended = True
        self._work.notify_all()

    def try_out(self, trial: TrialRun, over: Callable[[TrialReport], None]) -> None:
        def run() -> None:
            try:
                report = self._try(trial)
            except BaseException as error:  # an internal fault: report it to the operator
                report = TrialReport(ResultKind.EXCEPTION, text_of(error))
            over(report)
            self._trying.discard(threading.current_thread())

        thread = threading.Thread(target=run, name=f"inturn-trial-{self._name}", daemon=True)
        self._trying.add(thread)
        thread.start()

    def _try(self, trial: TrialRun) -> TrialReport:
        return self._worker.try_out(trial)

    def join(self) -> None:
        for thread in list(self._threads):
            thread.join()

    def has_current_thread(self) -> bool:
        return threading.current_thread() in self._threads | self._trying

    def _is_too_many(self) -> bool:
        return len(self._threads) > self.count

    def _is_crowded(self) -> bool:
        """Called by a thread whose run has just ended, but still counts."""
        room = self._room_left()
        return room is not None and room < 0

    def _run(self) -> None:
        run: Run | None = None
        while True:
            with self._work:
                run = self._turn(run, not self._is_too_many() and not self._is_crowded())
                while run is None:
                    if self._is_ended or self._is_too_many():
                        self._threads.discard(threading.current_thread())
                        return
                    self._waiting += 1
                    self._work.wait()
                    self._waiting -= 1
                    self._woken = max(0, self._woken - 1)
                    run = self._turn(None, not self._is_too_many())
            try:
                self._worker.work(run)
            except BaseException as error:
                self._worker.broke(run, error)
