"""Workers as tasks of an event loop, for `async def` handlers: in a thread of the consumer, or in a given loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from inturn.consumer.run import Run
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.consumer.worker import Worker
from inturn.consumer.worker_threads import Turn
from inturn.model.event_loop import new_event_loop
from inturn.model.logs import get_logger
from inturn.model.result import ResultKind
from inturn.model.time import Clock

_log = get_logger("inturn.consumer")
YIELD_S = 0.002  # handlers that never wait yield to other tasks after this time


class WorkerLoop:
    """See `Workers`. Tasks take the same lock as threads, and hold the lock as briefly."""

    def __init__(
        self,
        name: str,
        count: int,
        lock: threading.Lock,
        turn: Turn,
        worker: Worker,
        clock: Clock,
        given: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.count = count
        self._name = name
        self._lock = lock
        self._turn = turn
        self._worker = worker
        self._monotonic = clock.monotonic
        self._thread = threading.Thread(target=self._run, name=f"inturn-loop-{name}", daemon=True)
        self._given = given
        self._is_over = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._trying: set[asyncio.Task[None]] = set()  # trials; event loops keep no reference to tasks
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._changed: asyncio.Event | None = None
        self._asked = 0  # how many tasks the loop is asked to wake
        self._is_ended = False
        self._yielded_at_s = float("-inf")

    def start(self) -> None:
        if self._given is None:
            self._thread.start()
        else:
            self._given.call_soon_threadsafe(self._begin)

    def resize(self, count: int) -> None:
        self.count = count
        self._tell()

    def end(self) -> None:
        self._is_ended = True
        self._tell()

    def wake(self, wanted: int) -> None:
        if self._loop is None or not wanted or not self._waiting:
            return
        if threading.current_thread() is self._thread:
            self._wake(wanted)
        elif not self._asked:
            self._asked = wanted
            with contextlib.suppress(RuntimeError):  # the loop is closed, and the waiting tasks are gone
                self._loop.call_soon_threadsafe(self._wake_asked)

    def try_out(self, trial: TrialRun, over: Callable[[TrialReport], None]) -> None:
        async def run() -> None:
            report = TrialReport(ResultKind.EXCEPTION, "the event loop of the consumer has ended")
            try:
                report = await self._worker.try_out_async(trial)
            finally:
                over(report)

        def begin() -> None:
            task = asyncio.get_running_loop().create_task(run())
            self._trying.add(task)
            task.add_done_callback(self._trying.discard)

        try:
            if self._loop is None:
                raise RuntimeError("not begun")
            self._loop.call_soon_threadsafe(begin)
        except RuntimeError:
            over(TrialReport(ResultKind.EXCEPTION, "the event loop of the consumer does not run"))

    def join(self) -> None:
        if self._given is None:
            self._thread.join()
            return
        while not self._is_over.wait(0.5) and self._given.is_running():
            pass

    def has_current_thread(self) -> bool:
        """Once a given loop has ended, its thread is an ordinary thread."""
        is_ours = threading.current_thread() is self._thread
        return is_ours and (self._given is None or self._given.is_running())

    def _tell(self) -> None:
        if self._loop is not None and self._changed is not None and not self._loop.is_closed():
            with contextlib.suppress(RuntimeError):  # the loop was closed just now
                self._loop.call_soon_threadsafe(self._changed.set)

    def _wake_asked(self) -> None:
        wanted, self._asked = self._asked, 0
        self._wake(wanted)

    def _wake(self, wanted: int) -> None:
        while wanted and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                wanted -= 1

    def _begin(self) -> None:
        """Runs in the given loop."""
        self._thread = threading.current_thread()
        assert self._given is not None
        keeping = self._given.create_task(self._keep_count())
        keeping.add_done_callback(lambda _: self._is_over.set())
        self._keeping = keeping  # event loops keep no reference to tasks

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._keep_count())

    async def _keep_count(self) -> None:
        """Keep `count` tasks running until the end, or until cancelled, as when a given loop ends."""
        with self._lock:
            self._loop = asyncio.get_running_loop()
            self._changed = asyncio.Event()
        try:
            while not self._is_ended:
                self._changed.clear()
                self._wake(len(self._waiting))  # surplus tasks leave
                while len(self._tasks) < self.count:
                    task = self._loop.create_task(self._work())
                    self._tasks.add(task)
                    task.add_done_callback(self._left)
                await self._changed.wait()
        except asyncio.CancelledError:
            _log.warning("consumer.loop_ended", consumer=self._name, next_step="stop it before its event loop ends")
            for task in self._tasks:
                if not task.cancelling():  # a second cancel would hit handlers that clean up
                    task.cancel()
        self._wake(len(self._waiting))
        if self._tasks or self._trying:
            await asyncio.wait(self._tasks | self._trying)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelling() and self._changed is not None:
            self._changed.set()  # a single cancelled task is replaced

    async def _work(self) -> None:
        assert self._loop is not None
        task = asyncio.current_task()
        assert task is not None
        run: Run | None = None
        while True:
            leaves = len(self._tasks) > self.count or task.cancelling() > 0
            waiter = None
            with self._lock:
                run = self._turn(run, not leaves)
                if run is None and not self._is_ended and not leaves:
                    waiter = self._loop.create_future()
                    self._waiting.append(waiter)  # under the lock, so that no offer is missed
            if waiter is not None:
                await waiter
                continue
            if run is None:
                self._tasks.discard(task)
                return
            try:
                await self._worker.work_async(run)
            except BaseException as error:
                self._worker.broke(run, error)
            now_s = self._monotonic()
            if now_s - self._yielded_at_s > YIELD_S:
                with contextlib.suppress(asyncio.CancelledError):  # finish the run first
                    await asyncio.sleep(0)
                self._yielded_at_s = self._monotonic()
