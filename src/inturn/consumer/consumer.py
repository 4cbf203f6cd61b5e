"""The consumer: threads and a lock around `ConsumerCore` or `SharedCore`.

A thread sends commands to the node. Workers run handlers: `concurrency` threads, or as many tasks of an event loop. The
lock guards the core; no thread holds the lock while it submits a command or runs a handler. The file is longer than
usual because it holds all steps under the lock.
"""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from inturn.consumer.broadcast import BroadcastNode
from inturn.consumer.context import Hook
from inturn.consumer.core import ConsumerCore
from inturn.consumer.decoder import DecodedFetch, DecodedPull, decode_fetch, decode_pull
from inturn.consumer.lane import Lane
from inturn.consumer.options import EVERYTHING, Scope
from inturn.consumer.partition_lease import Stage
from inturn.consumer.run import Run, TracingRun
from inturn.consumer.shared_core import SharedCore
from inturn.consumer.statistics import Blocking, ConsumerStatistics, HeldLease, KeptLease
from inturn.consumer.trace import Trace
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.consumer.validation import check_handler, check_mode, fit, is_async, order_in
from inturn.consumer.worker import Handler, Worker
from inturn.consumer.worker_processes import ProcessWorker, WorkerProcesses
from inturn.consumer.worker_tasks import WorkerLoop
from inturn.consumer.worker_threads import Workers, WorkerThreads
from inturn.model.errors import Closed, InturnError, InvalidInput
from inturn.model.logs import get_logger
from inturn.model.message import tag_filter
from inturn.model.offsets import Position, parse_position, position_text
from inturn.model.result import ResultKind
from inturn.model.settings import (
    ConsumerSettings,
    GroupMode,
    LeaseSettings,
    OnExhausted,
    Order,
    Strategy,
    checked,
    one_of,
)
from inturn.model.subject import Subject, check_name, retry_subject
from inturn.model.time import Clock
from inturn.protocol.commands import (
    Answer,
    Command,
    Fetch,
    Fetched,
    Node,
    OpenDeadLetters,
    OpenRetry,
    Pull,
    Pulled,
    Read,
)
from inturn.protocol.request import ask

LOOK_S = 0.01  # between two checks of `wait_until_through`

_log = get_logger("inturn.consumer")


class Consumer:
    """A member of a group. Handles messages from `start` (or `with`) until `stop`.

    Plain functions run in threads, `async def` handlers as tasks of an event loop. Two messages of a lane (a partition
    or a key, according to `order`) never run at the same time. A second consumer of the group, inside this consumer,
    handles messages that failed under best effort, and dead letters that are driven again. `name` is the first part of
    the name of the consumer; a suffix makes the name unique, since a lease belongs to a single consumer. A shared group
    has receipts instead of leases, a broadcast group has no leases: see `GroupMode`.
    """

    def __init__(
        self,
        node: Node,
        clock: Clock,
        subject: str,
        group: str,
        handler: Handler,
        *,
        order: Order | str | None = None,
        mode: GroupMode | str = GroupMode.EXCLUSIVE,
        offsets: str | os.PathLike[str] | None = None,
        start: str | int | datetime | Position = "first",
        settings: ConsumerSettings | None = None,
        lease: LeaseSettings | None = None,
        hooks: Sequence[Hook] = (),
        name: str | None = None,
        loop: asyncio.AbstractEventLoop | None = None,
        retries_of: str | None = None,
        duty: Scope = EVERYTHING,
    ) -> None:
        check_name("subject", subject, reserved=True)
        check_name("group", group)
        check_handler(handler)
        if not isinstance(hooks, Sequence) or not all(isinstance(hook, Hook) for hook in hooks):
            raise InvalidInput(f"hooks={hooks!r}: give a list of Hook")
        mode = one_of(GroupMode, "mode", mode)
        order = order_in(mode, order)
        check_mode(mode, offsets, duty)
        lease = checked(lease, LeaseSettings, "lease") or LeaseSettings()
        self._settings = fit(checked(settings, ConsumerSettings, "settings") or ConsumerSettings(), order, mode)
        self.subject = subject
        self._origin = subject if retries_of is None else retries_of
        self.group = group
        self.name = _unique_name() if name is None else f"{check_name('consumer', name)}-{uuid.uuid4().hex[:8]}"
        self._node = node
        self._clock = clock
        self._keeps_only = duty.keeps_only
        self._tags = tag_filter(self._settings.tags or "")
        self._start_text = position_text(parse_position(start))
        self._broadcast: BroadcastNode | None = None
        if mode is GroupMode.BROADCAST and offsets is not None:
            self._node = self._broadcast = BroadcastNode(node, os.fspath(offsets), subject, group, name or "consumer")
        self._trace: Trace | None = None
        self._core = self._new_core(mode, order, lease, retries_of, duty)
        self._has_dead_letters = self._settings.max_attempts is not None
        self._retries: Consumer | None = None
        self._make_retries: Callable[[], Consumer] | None = None
        if retries_of is None and self._has_retries(mode, duty):
            where = node, clock, retry_subject(group, subject), group, handler
            again = partial(Consumer, *where, order=order, settings=self._settings, lease=lease, retries_of=subject)
            self._make_retries = partial(again, hooks=hooks, name=name, loop=loop)
        self._lock = threading.Lock()
        self._talk = threading.Condition(self._lock)
        self._talker = threading.Thread(target=self._talk_to_node, name=f"inturn-consumer-{self.name}", daemon=True)
        # Retries are few: the processes for them are started with the first retry.
        is_prepared = retries_of is None and not duty.keeps_only
        self._workers = self._new_workers(handler, hooks, mode, loop, is_prepared)
        self._answers: deque[tuple[Command, Answer | InturnError]] = deque()
        self._is_dirty = False
        self._is_killed = False
        self._is_over = threading.Event()
        self._is_started = False
        self._blocking: tuple[Blocking, ...] = ()
        self._refused_count = 0

    def _new_core(
        self, mode: GroupMode, order: Order, lease: LeaseSettings, retries_of: str | None, scope: Scope
    ) -> ConsumerCore | SharedCore:
        who = self.subject, self.group, self.name
        if mode is GroupMode.SHARED:
            return SharedCore(*who, self._start_text, self._settings, lease)
        core = ConsumerCore(*who, order, self._start_text, self._settings, lease, retries_of=retries_of, scope=scope)
        if self._settings.trace is not None:
            self._trace = Trace(Path(self._settings.trace), *who, order, self._clock)
            core.key_requests.acted = self._trace.acted
            core.scheduler.new_run = partial(_tracing_run, self._trace)
        return core

    def _has_retries(self, mode: GroupMode, scope: Scope) -> bool:
        is_part = bool(scope.until)  # other members of the group handle the retries
        is_shared = mode is GroupMode.SHARED  # there no message waits behind a failed message
        gives_up = self._has_dead_letters and (is_shared or self._settings.on_exhausted is not OnExhausted.BLOCK)
        return not is_part and (self._settings.strategy is Strategy.BEST_EFFORT or gives_up)

    def _new_workers(
        self,
        handler: Handler,
        hooks: Sequence[Hook],
        mode: GroupMode,
        loop: asyncio.AbstractEventLoop | None,
        is_prepared: bool,
    ) -> Workers:
        settings, clock = self._settings, self._clock
        if mode is GroupMode.SHARED:  # there the core decides how to go on after a failure
            settings = replace(settings, strategy=Strategy.STRICT)
        common = self.name, settings.concurrency, self._lock, self._turn
        room = self._core.scheduler.room
        if settings.workers == "processes":
            in_processes = ProcessWorker(handler, settings, clock, hooks, self._lock)
            return WorkerProcesses(*common, in_processes, room, is_prepared=is_prepared)
        worker = Worker(handler, settings, clock, hooks)
        if is_async(handler):
            return WorkerLoop(*common, worker, clock, loop)
        return WorkerThreads(*common, worker, room)

    @property
    def is_running(self) -> bool:
        return self._is_started and not self._is_over.is_set()

    @property
    def is_over(self) -> bool:
        return self._is_over.is_set()

    @property
    def concurrency(self) -> int:
        """How many handlers run at once. May be changed while running; a lower number takes effect as running handlers
        end."""
        return self._workers.count

    @concurrency.setter
    def concurrency(self, count: int) -> None:
        count = replace(self._settings, concurrency=count).concurrency  # validates the number
        for part in self._parts():
            with part._lock:
                part._workers.resize(count)
                if isinstance(part._core, SharedCore):
                    part._core.concurrency = count

    @property
    def error(self) -> InturnError | None:
        """The error that stopped the consumer, if any."""
        return self._core.error

    def start(self) -> None:
        """Join the group and begin. Does not block. A stopped consumer cannot be started again."""
        if self._is_killed:
            raise Closed("consumer")
        if self._is_started:
            return
        if self._broadcast is not None:
            self._broadcast.open(self._start_text)
        if self._has_dead_letters:
            ask(self._node, OpenDeadLetters(self._origin, self.group), Subject)
        if self._make_retries is not None:
            ask(self._node, OpenRetry(self.subject, self.group, len(self._settings.retry.levels_s)), Subject)
            self._retries = self._make_retries()
            self._retries._workers.count = self._workers.count
            self._retries.start()
        try:
            self._workers.start()
        except BaseException:
            if self._retries is not None:
                self._retries.stop()
            raise
        self._is_started = True  # not before: a consumer that was refused has nothing to stop
        self._talker.start()

    def stop(self, timeout_s: float | None = 30.0) -> bool:
        """Let running handlers end, commit, release the leases, leave.

        Returns False if a handler still ran after `timeout_s`: then the partition stays leased until the lease ends. A
        call from a handler does not wait and returns False; the consumer stops when the handler has returned.
        """
        if not self._is_started:
            return True
        parts = self._parts()
        for part in parts:
            part._ask_to_stop()
        if any(part._workers.has_current_thread() for part in parts):
            return False  # called by a handler: waiting would never end
        until_s = None if timeout_s is None else self._clock.monotonic() + timeout_s
        over = all(part._wait_until_over(until_s) for part in parts)
        if not over:
            _log.warning("consumer.stop_timeout", consumer=self.name, group=self.group, timeout_s=timeout_s)
        self.kill()
        if over:
            for part in parts:
                part._talker.join()
                part._workers.join()
        return over

    def _parts(self) -> list[Consumer]:
        return [self] if self._retries is None else [self, self._retries]

    def _ask_to_stop(self) -> None:
        with self._lock:
            self._core.stop(self._clock.monotonic())
            self._wake()

    def _wait_until_over(self, until_s: float | None) -> bool:
        return self._is_over.wait(None if until_s is None else max(0.0, until_s - self._clock.monotonic()))

    def kill(self) -> None:
        """Vanish like a crashed process: no commit, no release. For tests and demonstrations."""
        if self._retries is not None:
            self._retries.kill()
        self._kill_own()

    def disown(self) -> None:
        """In a forked child: the threads are not here, and never were."""
        self._lock = threading.Lock()
        self._is_started = False
        self._is_killed = True
        self._trace = None
        if self._broadcast is not None:
            self._broadcast.close()  # the lock stays with the parent
        self._is_over.set()

    def _kill_own(self) -> None:
        with self._lock:
            self._is_killed = True
            self._core.kill()
            self._talk.notify_all()
            self._workers.end()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the consumer has stopped. Raises the error that stopped the consumer, if any."""
        over = self._is_over.wait(timeout_s)
        if self._core.error is not None:
            raise self._core.error
        return over

    def statistics(self) -> ConsumerStatistics:
        now_s = self._clock.monotonic()
        with self._lock:
            core = self._core
            held = [state for state in core.partitions.values() if state.lease.is_holding]
            buffers = [state.buffer for state in held]
            parked = [key for state in held for key in state.progress.parking_lots]
            return ConsumerStatistics(
                partitions=tuple(sorted(state.index for state in held)),
                lag=sum(core.lags().values()),
                ok_count=core.statistics.ok_count,
                failed_count=core.statistics.failed_count,
                slow_count=core.statistics.slow_count,
                ok_per_s=core.statistics.ok_per_s(now_s),
                failed_per_s=core.statistics.failed_per_s(now_s),
                handling_ms_mean=core.statistics.handling_ms_mean,
                waiting_count=sum(buffer.waiting_count for buffer in buffers),
                paused=tuple(sorted(state.index for state in held if state.buffer.is_paused)),
                missing=sum(buffer.missing for buffer in buffers),
                errors=tuple(str(state.lease.error) for state in held if state.lease.error is not None),
                concurrency=self._workers.count,
                failing_count=sum(len(state.progress.failures) for state in held),
                parked=tuple(sorted(key.decode(errors="backslashreplace") for key in parked)),
                blocking=self._find_blocking(),
                handling_s=core.statistics.handling_s,
                refused_count=self._refused_count,
                unwanted_count=sum(buffer.filtered_out_count for buffer in buffers),
            )

    def leases(self) -> dict[int, HeldLease]:
        """The held leases, by partition; none in a shared group. In a broadcast group: the partitions that are read."""
        with self._lock:
            if isinstance(self._core, SharedCore):
                return {}
            active = [state for state in self._core.partitions.values() if state.lease.stage is Stage.ACTIVE]
            return {
                state.index: HeldLease(
                    state.lease.epoch, state.progress.committed_offset, state.buffer.missing, state.lease.error
                )
                for state in active
            }

    def assigned(self) -> frozenset[int]:
        """The partitions that the node has assigned to this consumer, as far as known."""
        with self._lock:
            return self._core.assigned

    def kept(self) -> dict[int, KeptLease]:
        """The leases of a consumer that only holds leases, including leases that are being released."""
        with self._lock:
            found = {}
            for state in self._core.partitions.values():
                lease, progress = state.lease, state.progress
                if lease.stage in (Stage.ACTIVE, Stage.DRAINING, Stage.RELEASING) and not lease.is_claim:
                    failed, parked = tuple(sorted(progress.failures)), tuple(sorted(progress.parking_lots))
                    is_wanted_back = lease.stage is not Stage.ACTIVE
                    place = progress.tracker.snapshot()
                    found[state.index] = KeptLease(lease.epoch, *place, failed, parked, is_wanted_back)
            return found

    def wait_until_through(self, patience_s: float, timeout_s: float) -> bool:
        """Wait until all messages within the scope are over. Returns False if no handler could run for `patience_s`,
        because the remaining messages are held up, or after `timeout_s`."""
        now_s = busy_at_s = self._clock.monotonic()
        until_s = now_s + timeout_s
        while now_s < until_s and now_s - busy_at_s < patience_s and not self._is_over.wait(LOOK_S):
            now_s = self._clock.monotonic()
            with self._lock:
                if self._core.is_through():
                    return True
                if not self._core.is_held_up:
                    busy_at_s = now_s
        return False

    @property
    def left_count(self) -> int:
        """After the stop: how many messages were pulled and not finished."""
        with self._lock:
            return sum(self._core.left.values())

    @property
    def is_held_up(self) -> bool:
        """Whether all remaining messages within the scope wait for the next attempt, for a decision about a key, for a
        log that cannot be read, or for a limit of flow control: `ConsumerStatistics.blocking`."""
        with self._lock:
            return not self._core.is_through() and self._core.is_held_up

    def _find_blocking(self) -> tuple[Blocking, ...]:
        found = []
        for index, head in sorted(self._core.blocking().items()):
            limit = self._core.partitions[index].buffer.limit or "span"
            found.append(Blocking(index, head.offset, head.key_text, limit))
        return tuple(found)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    # The thread that talks to the node

    def _talk_to_node(self) -> None:
        try:
            self._talk_until_over()
        except BaseException as error:  # otherwise `wait` would wait for a dead thread
            _log.exception("consumer.failed", group=self.group, consumer=self.name)
            with self._lock:
                self._core.error = InturnError(f"consumer {self.name} failed: {error!r}")
        self._end()

    def _talk_until_over(self) -> None:
        while True:
            answers = self._take_answers()
            with self._talk:
                self._is_dirty = False
                now_s = self._clock.monotonic()
                for command, answer in answers:
                    self._note(command, answer)
                    if self._trace is not None and isinstance(self._core, ConsumerCore):
                        self._trace.answered(self._core, command, answer, now_s)
                    self._core.answered(command, answer, now_s)
                if self._is_killed or self._core.is_stopped or self._core.error is not None:
                    break
                commands = self._core.poll(now_s)
                trial = self._core.trials.take()
                self._workers.wake(self._core.wanted_workers)
                self._note_state()
                if not commands and not self._answers and not self._is_dirty and trial is None:
                    self._talk.wait(self._core.next_due_s(now_s) - now_s)
            if trial is not None:
                self._try_out(trial)
            if self._trace is not None:
                self._trace.asks(commands)
            for command in commands:
                self._node.submit(command, partial(self._reply, command))

    def _try_out(self, trial: TrialRun) -> None:
        def over(report: TrialReport) -> None:
            with self._lock:
                self._core.trials.over(report)
                self._wake()

        if self._keeps_only:
            over(TrialReport(ResultKind.EXCEPTION, "this member runs no handler: it only holds leases"))
        else:
            self._workers.try_out(trial, over)

    def _take_answers(self) -> list[tuple[Command, Answer | DecodedPull | DecodedFetch | InturnError]]:
        """Decoding takes time, so pulled batches are decoded without the lock."""
        answers: list[tuple[Command, Answer | DecodedPull | DecodedFetch | InturnError]] = []
        while self._answers:
            command, answer = self._answers.popleft()
            if isinstance(answer, Pulled) and isinstance(command, Pull):
                answers.append((command, decode_pull(answer, self.subject, command.partition, self._tags)))
            elif isinstance(answer, Pulled) and isinstance(command, Read):
                answers.append((command, decode_pull(answer, self.subject, command.partition)))
            elif isinstance(answer, Fetched) and isinstance(command, Fetch):
                answers.append((command, decode_fetch(answer, self.subject, command.partition)))
            else:
                answers.append((command, answer))
        return answers

    def _note_state(self) -> None:
        """Log damage, refused receipts and partitions that stand still; each fact once."""
        for error in self._core.damage:
            _log.error("consumer.partition_damaged", group=self.group, consumer=self.name, error=str(error))
        self._core.damage.clear()
        if isinstance(self._core, SharedCore) and self._core.refused:
            self._note_refused(self._core)
        blocking = self._find_blocking()
        for one in blocking:
            if one not in self._blocking:
                _log.warning(
                    "consumer.paused_by_key",
                    subject=self.subject,
                    group=self.group,
                    consumer=self.name,
                    partition=one.partition,
                    key=one.key,
                    offset=one.offset,
                    limit=one.limit,
                    limit_size=getattr(self._settings.flow, one.limit),
                )
        self._blocking = blocking

    def _note_refused(self, core: SharedCore) -> None:
        partition, offset = core.refused[0]
        _log.warning(
            "consumer.receipts_over",
            subject=self.subject,
            group=self.group,
            consumer=self.name,
            count=len(core.refused),
            partition=partition,
            offset=offset,
            visibility_s=self._settings.visibility_s,
            next_step="handled too late, so the messages are delivered again; raise ConsumerSettings.visibility_s",
        )
        self._refused_count += len(core.refused)
        core.refused.clear()

    def _reply(self, command: Command, answer: Answer | InturnError) -> None:
        self._answers.append((command, answer))
        with self._lock:
            self._wake()

    def _wake(self) -> None:
        self._is_dirty = True
        self._talk.notify()

    def _note(self, command: Command, answer: Answer | DecodedPull | DecodedFetch | InturnError) -> None:
        if isinstance(answer, InturnError) and not answer.retriable and self._core.awaits(command):
            partition = getattr(command, "partition", None)
            _log.warning(
                "consumer.refused",
                command=type(command).__name__,
                subject=self.subject,
                partition=partition,
                group=self.group,
                consumer=self.name,
                error=str(answer),
            )

    def _end(self) -> None:
        if self._core.error is not None:
            _log.error("consumer.stopped", group=self.group, consumer=self.name, error=str(self._core.error))
        self._kill_own()
        if self._trace is not None:
            self._trace.end(is_clean=self._core.is_stopped)
        if self._broadcast is not None:
            self._broadcast.close()
        self._is_over.set()

    # Workers, with the lock held

    def _turn(self, run: Run | None, takes: bool) -> Run | None:
        now_s = self._clock.monotonic()
        core = self._core
        if run is not None:
            if self._trace is not None and isinstance(run, TracingRun):
                self._trace.add(run.notes)
            core.finish(run, now_s)
        next_run = core.take(now_s) if takes and not self._is_killed else None
        wanted = core.wanted_workers
        if wanted:
            self._workers.wake(wanted)
        if core.wants_poll and not self._is_dirty:
            self._wake()
        return next_run


def _tracing_run(trace: Trace, lanes: deque[Lane], now_s: float, until_s: float, budget: int) -> Run:
    return TracingRun(trace.notes(), lanes, now_s, until_s, budget)


def _unique_name() -> str:
    return f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
