"""Workers as processes, for handlers that need a CPU each.

A worker is a thread with a process of its own: the thread takes runs like any worker, and sends the messages to the
process. So lanes, leases, results, hooks and traces work as with threads; only the handler runs in the process. A
process that dies has failed the current attempt, and is replaced.

A process gets several lanes at once, so that a round trip is paid once for about 2 ms of work. Tokens in a pipe decide
who owns a lane: the process reads a token before it begins a lane, and a thread that takes a lane back (a handler
hangs, other workers are idle) reads a token instead. A byte has a single reader, even if processes are killed or frozen
meanwhile, so a lane has a single owner.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from inturn.consumer.context import Context, Hook
from inturn.consumer.lane import Lane
from inturn.consumer.outcome import Next, Outcome, of_exception, of_return
from inturn.consumer.process_child import (
    CALLS_MAX,
    DONE,
    LANES_MAX,
    UNTOUCHED,
    GivenLane,
    Told,
    WorkFrame,
    returned_of,
)
from inturn.consumer.run import Run, TracingRun
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.consumer.worker import Handler, Worker
from inturn.consumer.worker_process import HandlerReference, WorkerProcess
from inturn.consumer.worker_threads import Turn, WorkerThreads
from inturn.model.errors import HandlerRaised, InturnError
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import Result, ResultKind
from inturn.model.settings import ConsumerSettings
from inturn.model.time import Clock

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class ChunkLane:
    lane: Lane
    messages: list[Message]
    attempts: list[int]
    first: int  # the number of the first call

    def given(self) -> GivenLane:
        state = self.lane.state
        where = state.subject, state.group, state.index, state.member, state.lease.epoch, state.lease.deadline_s
        return GivenLane(*where, self.messages, self.attempts)


class OfferedLanes(deque[Lane]):
    """The rest of a run, for other workers to take: `rest`, which is here, and then the lanes that the process has not
    begun.

    Other threads call `pop` under the lock of the consumer; the worker takes no lane from here.
    """

    def __init__(self, rest: deque[Lane], lanes: list[ChunkLane], process: WorkerProcess) -> None:
        super().__init__()
        self.rest = rest
        self.taken_back: set[int] = set()
        self._lanes = lanes
        self._process = process

    def __len__(self) -> int:
        return len(self.rest) + self._process.token_count

    def __bool__(self) -> bool:
        return len(self) > 0

    def pop(self) -> Lane:  # type: ignore[override]
        if self.rest:
            return self.rest.pop()
        token = self._process.take_token()
        if token is None:
            raise IndexError("the process has begun all of it")
        self.taken_back.add(token)
        return self._lanes[token].lane

    def remove(self, lane: Lane) -> None:
        self.rest.remove(lane)  # tokens come in order: the lanes of the process cannot be chosen from

    def close(self) -> set[int]:
        """Stop offering lanes. Called under the lock of the consumer. Returns the numbers of lanes that other threads
        took."""
        while self._process.take_token() is not None:
            pass
        return self.taken_back


def take_chunk(run: Run, now_s: float) -> list[ChunkLane]:
    """Lanes of the run, with the messages that may be begun; lanes without such messages go back at once."""
    lanes: list[ChunkLane] = []
    left, size_bytes, first = min(run.budget, CALLS_MAX), 0, 0
    while left > 0 and len(lanes) < LANES_MAX and size_bytes < CHUNK_BYTES:
        try:
            lane = run.todo.popleft()
        except IndexError:
            break
        state = lane.state
        messages = [] if lane.parks or now_s >= state.lease.deadline_s else lane.messages[lane.at : lane.at + left]
        exhausted = state.progress.exhausted
        if exhausted:
            stop = next((at for at, one in enumerate(messages) if state.mark(one) in exhausted), len(messages))
            messages = messages[:stop]
        if not messages:
            run.over.append(lane)
            continue
        attempts = state.progress.attempts
        tries = [attempts.get(state.mark(one), 0) + 1 for one in messages] if attempts else [1] * len(messages)
        lanes.append(ChunkLane(lane, messages, tries, first))
        first += len(messages)
        left -= len(messages)
        size_bytes += sum(len(one.body) for one in messages)
    return lanes


class Settling:
    """Settles the lanes of a chunk. `fail` settles a call that did not succeed, with the result of the call; None if
    the process died."""

    def __init__(self, run: Run, lanes: list[ChunkLane], fail: Callable[[Run, Message, Told | None], None]) -> None:
        self._run = run
        self._lanes = lanes
        self._fail = fail
        self._settled: set[int] = set()

    def early(self, states: Sequence[int], told: Iterable[Told]) -> None:
        """Lanes that are over while the process is busy with another lane go on without the process. The process has
        begun these lanes, so no other thread can have taken them."""
        told_of = {one.number: one for one in told}
        for index, one in enumerate(self._lanes):
            if index not in self._settled and _is_over(one, states, told_of):
                self._settle(index, one, states, told_of)

    def rest(self, states: Sequence[int], told: Iterable[Told], taken_back: set[int]) -> None:
        """The process has died, or has ended its work: calls that were begun and not reported have failed."""
        told_of = {one.number: one for one in told}
        for index, one in enumerate(self._lanes):
            if index not in self._settled and index not in taken_back:
                self._settle(index, one, states, told_of)

    def _settle(self, index: int, one: ChunkLane, states: Sequence[int], told: Mapping[int, Told]) -> None:
        self._settled.add(index)
        run, lane = self._run, one.lane
        calls = states[one.first : one.first + len(one.messages)]
        tried = next((at for at, state in enumerate(calls) if state == UNTOUCHED), len(calls))
        done = next((at for at in range(tried) if not _is_done(calls[at], told.get(one.first + at))), tried)
        lane.inbox += one.messages[:done]
        lane.at += done
        run.handled += done
        run.done += done
        if done == tried:
            run.over.append(lane)
            return
        lane.at += 1
        run.handled += 1
        run.begin(lane, one.messages[done], one.attempts[done])
        self._fail(run, one.messages[done], told.get(one.first + done))


def _is_over(one: ChunkLane, states: Sequence[int], told: Mapping[int, Told]) -> bool:
    """All calls succeeded, or a call has failed and was reported."""
    for number in range(one.first, one.first + len(one.messages)):
        if not _is_done(states[number], told.get(number)):
            return number in told
    return True


def _is_done(state: int, told: Told | None) -> bool:
    return state == DONE or (told is not None and told.returned in (Result.SUCCESS.value, "none"))


_log = get_logger("inturn.consumer")
_ALWAYS_S = float("inf")
START_AGAIN_S = 1.0  # between two attempts to start a process


class NotBegun(Exception):
    """The lease was over before the process could begin."""


class ProcessWorker(Worker):
    """Calls the handler in the process of the calling thread. All threads share this object."""

    def __init__(
        self, handler: Handler, settings: ConsumerSettings, clock: Clock, hooks: Sequence[Hook], lock: threading.Lock
    ) -> None:
        super().__init__(handler, settings, clock, hooks)
        self._reference = HandlerReference.of(handler)
        self._handler = self._call_directly  # of a trial
        self._lock = lock
        self._own = threading.local()
        self._spare: list[WorkerProcess] = []  # started, and not in use by a thread yet

    def prepare(self, count: int) -> None:
        """Start as many processes, for future threads, and wait until they are ready. Raises InvalidInput."""
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
        """Wraps the life of a worker thread: the process, started on demand, ends with the thread."""
        self._own.process = None
        try:
            yield
        finally:
            self._replace()

    def work(self, run: Run) -> None:
        if self._is_plain and not isinstance(run, TracingRun) and run.budget > 1:
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
            process.run(WorkFrame([lane], self._settings.handler_timeout_s), tellings)
        except InturnError as error:  # the process died, or cannot load the handler
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
            process = self._process()  # before lanes are taken: the start may fail
            lanes = take_chunk(run, now_s)
            if not lanes:
                return
            is_alive = self._work_chunk(run, lanes, process)

    def _work_chunk(self, run: Run, lanes: list[ChunkLane], process: WorkerProcess) -> bool:
        """Returns False if the process died."""
        told = list[Told]()
        count = sum(len(one.messages) for one in lanes)
        process.forget_states(count)
        process.offer(len(lanes))
        offered = OfferedLanes(run.todo, lanes, process)
        run.todo = offered
        settling = Settling(run, lanes, self._fail)
        work = WorkFrame([one.given() for one in lanes], self._settings.handler_timeout_s, True)
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
        except OSError:  # no room for a further lane
            time.sleep(START_AGAIN_S)
            raise

    def _died(self, error: InturnError) -> None:
        _log.warning("consumer.process_died", handler=self._name, error=str(error))
        self._replace()

    def _replace(self) -> None:
        """Close the process: the next work starts a new process."""
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
        """Runs in a separate process: the processes of the workers may be busy for long."""
        with self._processes.process_of_thread():
            return super()._try(trial)


def _raised(told: Told) -> HandlerRaised:
    """An exception with the same class name and text; the traceback of the process is added as a note."""
    kind = type(told.kind or "Exception", (HandlerRaised,), {})
    error: HandlerRaised = kind(told.text)
    error.add_note(told.traceback)
    return error
