"""Workers as processes, for handlers that need a CPU each.

Each worker is a thread with a process of its own: the thread takes runs as any worker does, and gives what is to be
handled to its process. So lanes, leases, results, hooks and traces are those of threads; only the handler is elsewhere.
A process that dies has failed the attempt that it was at, and is replaced.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from inturn.consumer.chunk import ChunkLane, OfferedLanes, Settling, take_chunk
from inturn.consumer.context import Context
from inturn.consumer.hook import Hook
from inturn.consumer.outcome import Next, Outcome, of_exception, of_return
from inturn.consumer.process_frames import UNTOUCHED, GivenLane, Told, Work, returned_of
from inturn.consumer.run import Run
from inturn.consumer.threads import Turn, WorkerThreads
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.consumer.worker import Handler, Worker
from inturn.consumer.worker_process import HandlerReference, WorkerProcess
from inturn.model.clock import Clock
from inturn.model.errors import HandlerRaised, InturnError
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings

_log = get_logger("inturn.consumer")
_ALWAYS_S = float("inf")
START_AGAIN_S = 1.0  # before a process is started again, when that failed


class NotBegun(Exception):
    """The lease was over before the process could begin."""


class ProcessWorker(Worker):
    """Calls the handler in the process of the thread that it is called by. One serves all threads."""

    def __init__(
        self, handler: Handler, settings: ConsumerSettings, clock: Clock, hooks: Sequence[Hook], lock: threading.Lock
    ) -> None:
        super().__init__(handler, settings, clock, hooks)
        self._reference = HandlerReference.of(handler)
        self._handler = self._call_directly  # of a trial
        self._lock = lock
        self._own = threading.local()
        self._spare: list[WorkerProcess] = []  # started, and not taken by a thread yet

    def prepare(self, count: int) -> None:
        """Start so many processes, for threads to come, and wait until they can work. Raises InvalidInput."""
        self._spare += [WorkerProcess(self._reference, self._name) for _ in range(count)]
        try:
            for process in self._spare:
                process.wait_until_ready()
        except BaseException:
            self.close_spare()
            raise

    def close_spare(self) -> None:
        while self._spare:
            self._spare.pop().close()

    @contextmanager
    def process_of_thread(self) -> Iterator[None]:
        """Around all that this thread does: its process, which is started when it is needed, ends with it."""
        self._own.process = None
        try:
            yield
        finally:
            self._replace()

    def work(self, run: Run) -> None:
        if self._is_plain and run.notes is None and run.budget > 1:
            self._work_chunks(run)
            return
        for given in run.calls(self._monotonic, self._batch):
            self._before(given, run.context)
            try:
                returned = self._call(given, run.context, run.deadline_s)
            except NotBegun:
                self._after(given, run.context, Outcome(Next.REPEAT, ResultKind.FAILED))
                run.not_begun()
            except BaseException as error:
                self._settle(run, given, of_exception(error, self._settings))
            else:
                if returned is not None or not self._is_plain:
                    self._settle(run, given, of_return(returned, run.context, self._settings, self._name))

    def _call_directly(self, given: Message | list[Message], context: Context) -> object:
        return self._call(given if isinstance(given, list) else [given], context, _ALWAYS_S)

    def _call(self, given: list[Message], context: Context, deadline_s: float) -> object:
        where = context.subject, context.group, context.partition, context.consumer, context.epoch, deadline_s
        lane = GivenLane(*where, given, [context.attempt], self._is_batch, context.is_direct)
        process = self._process()
        process.forget_states(1)
        tellings: list[Told] = []
        try:
            process.run(Work([lane], self._settings.handler_timeout_s), tellings)
        except InturnError as error:  # it died, or cannot load the handler
            self._died(error)
            raise
        if process.states[0] == UNTOUCHED:
            raise NotBegun
        if not tellings:
            return None
        (told,) = tellings
        context.is_acknowledged = told.is_acknowledged
        if told.returned == "raised":
            raise _raised(told)
        return returned_of(told)

    # Several lanes at once

    def _work_chunks(self, run: Run) -> None:
        is_alive = True
        while is_alive:
            now_s = run.asked_at_s = self._monotonic()
            if run.handled and now_s >= run.until_s:
                return
            process = self._process()  # before anything is taken: it may be that none can be started
            lanes = take_chunk(run, now_s)
            if not lanes:
                return
            is_alive = self._work_chunk(run, lanes, process)

    def _work_chunk(self, run: Run, lanes: list[ChunkLane], process: WorkerProcess) -> bool:
        """False if the process died over it."""
        told = list[Told]()
        count = sum(len(one.messages) for one in lanes)
        process.forget_states(count)
        process.offer(len(lanes))
        offered = OfferedLanes(run.todo, lanes, process)
        run.todo = offered
        settling = Settling(run, lanes, self._fail)
        work = Work([one.given() for one in lanes], self._settings.handler_timeout_s, True)
        died: InturnError | None = None
        try:
            over = process.run(work, told, lambda: settling.early(bytes(process.states[:count]), told))
            run.slow_count += over.slow_count
        except InturnError as error:
            died = self._own.why_died = error
        with self._lock:
            taken_back = offered.close()
            run.todo = offered.rest
        settling.rest(bytes(process.states[:count]), told, taken_back)
        if died is not None:
            self._died(died)
        return died is None

    def _fail(self, run: Run, message: Message, told: Told | None) -> None:
        if told is None:
            outcome = of_exception(self._own.why_died, self._settings)
        elif told.returned == "raised":
            outcome = of_exception(_raised(told), self._settings)
        else:
            outcome = of_return(returned_of(told), run.context, self._settings, self._name)
        self._settle(run, [message], outcome)

    # The process of a thread

    def _process(self) -> WorkerProcess:
        process: WorkerProcess | None = self._own.process
        if process is None:
            try:
                process = self._spare.pop()
            except IndexError:
                process = self._start()
            self._own.process = process
        return process

    def _start(self) -> WorkerProcess:
        try:
            return WorkerProcess(self._reference, self._name)
        except OSError:  # no room for another one
            time.sleep(START_AGAIN_S)
            raise

    def _died(self, error: InturnError) -> None:
        _log.warning("consumer.process_died", handler=self._name, error=str(error))
        self._replace()

    def _replace(self) -> None:
        """The next work gets another one."""
        process, self._own.process = self._own.process, None
        if process is not None:
            process.close()


class WorkerProcesses(WorkerThreads):
    """See `Workers`: as many threads as processes."""

    def __init__(
        self,
        name: str,
        count: int,
        lock: threading.Lock,
        turn: Turn,
        worker: ProcessWorker,
        room: Callable[[float, int], int | None],
        *,
        is_prepared: bool = True,
    ) -> None:
        """`is_prepared`: the processes are there, and have loaded the handler, when `start` returns."""
        super().__init__(name, count, lock, turn, worker, room)
        self._processes = worker
        self._is_prepared = is_prepared

    def start(self) -> None:
        if self._is_prepared:
            self._processes.prepare(self.count)
        super().start()

    def join(self) -> None:
        super().join()
        self._processes.close_spare()

    def _run(self) -> None:
        with self._processes.process_of_thread():
            super()._run()

    def _try(self, trial: TrialRun) -> TrialReport:
        """In a process of its own: those of the workers may be busy for long."""
        with self._processes.process_of_thread():
            return super()._try(trial)


def _raised(told: Told) -> HandlerRaised:
    """An exception of the same name and text; where it was raised is told in a note."""
    kind = type(told.kind or "Exception", (HandlerRaised,), {})
    error: HandlerRaised = kind(told.text)
    error.add_note(told.traceback)
    return error
