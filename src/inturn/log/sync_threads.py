"""A few threads that run the syncs of all logs of an engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from inturn.model.logs import get_logger

_log = get_logger("inturn.log")


class SyncThreads:
    """Runs jobs in the order they come, as many at once as there are threads.

    A bare SimpleQueue: handing a job over costs a few µs, with concurrent.futures several times that.
    """

    def __init__(self, count: int = 4) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"inturn-sync-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def close(self) -> None:
        """Run what was submitted, then end. Blocks."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _log.exception("log.sync_job_failed")
