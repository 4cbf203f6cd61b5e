"""The producer: a thread and a lock around `ProducerCore`."""

from __future__ import annotations

import copy
import dataclasses
import random
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, Unpack

from inturn.model.errors import (
    BufferFull,
    Closed,
    InturnError,
    InvalidInput,
    OutOfSequence,
    RouteChanged,
    SendTimeout,
)
from inturn.model.logs import get_logger
from inturn.model.message import Outgoing
from inturn.model.settings import ProducerSettings, Strategy, checked
from inturn.model.subject import Subject, check_name
from inturn.model.time import Clock
from inturn.producer.core import ProducerCore, SendAttempt
from inturn.producer.fallback import FallbackQueue, FallbackStore, FallbackThread
from inturn.producer.send_batch import SendHandle, Stored
from inturn.producer.send_hook import HookedSends, SendHook, Sending
from inturn.producer.validation import SendOptions
from inturn.protocol.commands import Answer, FindSubject, Node, OpenProducer, ProducerOpened
from inturn.protocol.request import ask

_log = get_logger("inturn.producer")


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """A snapshot of a producer. Counts are since the producer was opened."""

    waiting_count: int  # messages that are not acknowledged yet
    waiting_bytes: int
    acknowledged_count: int
    failed_count: int
    resent_count: int  # batches that were sent again


class Producer:
    """Sends messages; messages of one key are stored in the order of sending.

    Safe to use from several threads; then "sent before" means that the call returned before the other call began.
    Leaving the `with` block waits until all messages are acknowledged, and raises if a message failed.
    """

    def __init__(
        self,
        node: Node,
        clock: Clock,
        settings: ProducerSettings | None = None,
        *,
        name: str | None = None,
        strategy: Strategy | None = None,
        hooks: Sequence[SendHook] = (),
        fallback: FallbackStore | None = None,
    ) -> None:
        """`strategy` overrides the strategy of all subjects. `fallback` stores messages that best effort gives up; the
        producer closes `fallback`."""
        if name is not None:
            check_name("producer", name)
        if not isinstance(hooks, Sequence) or not all(isinstance(hook, SendHook) for hook in hooks):
            raise InvalidInput(f"hooks={hooks!r}: give a list of SendHook")
        self.name = name
        self._node = node
        self._clock = clock
        self._settings = checked(settings, ProducerSettings, "settings") or ProducerSettings()
        self._strategy = strategy
        opened = ask(node, OpenProducer(name, uuid.uuid4().hex), ProducerOpened)
        self._core = ProducerCore(opened.producer_id, opened.epoch, self._settings, random.Random())
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._roomier = threading.Condition(self._lock)
        # Held while commands are taken from the core and submitted, so that the order stays the same.
        self._pumping = threading.Lock()
        self._is_asleep = False
        self._is_dirty = False  # the core changed since the last poll
        self._closed = False
        self._fallback: FallbackThread | None = None
        if fallback is not None:
            self._core.fallback = FallbackQueue(fallback.waiting(), self._settings)
            self._fallback = FallbackThread(fallback, self._core, self._lock, self._roomier, self._wake)
        self._hooked = HookedSends(hooks)
        # Chosen once: without hooks, a message has nothing more to go through.
        self._accept: Callable[[bool, str, bytes, SendOptions], SendHandle] = (
            self._queue_hooked if hooks else self._queue
        )
        self._thread = threading.Thread(target=self._run, name=f"inturn-producer-{opened.producer_id}", daemon=True)
        self._thread.start()

    @property
    def id(self) -> int:
        """The number given by the node; a name always has the same number."""
        return self._core.producer_id

    def send(self, subject: str, body: bytes, **options: Unpack[SendOptions]) -> SendHandle:
        """Queue a message and return at once; `SendHandle.result` waits for the acknowledgement.

        Order holds through failures and resends, without duplicates. The call waits only while the buffer is full, then
        raises BufferFull. Bad input raises InvalidInput before the message is queued, an unknown option TypeError.

        Options, all by keyword:

        - `key`: str or bytes. Messages of one key are stored in the order of sending.
        - `tags`: a tuple of str; consumers and readers can filter by tags.
        - `properties`: a dict of str to str, the headers of the message.
        - `message_id`: your own id of the message.
        - `selector`, `arg`: for subjects with routing "selector". `selector(partitions, message, arg)` returns the
          index of a partition; `arg` is also the key, unless `key` is given.
        """
        return self._accept(True, subject, body, options)

    def pass_on(
        self, subject: str, message: Outgoing, partition: int | None = None, reserved: dict[str, str] | None = None
    ) -> SendHandle:
        """As `send`, for a message accepted earlier by an outbox or another producer.

        The message keeps the time of birth, goes to `partition` if given, and gets the `reserved` properties (names of
        inturn's own, without limits). Only for a producer without hooks.
        """
        options: SendOptions = {
            "key": message.key,
            "tags": message.tags,
            "properties": message.properties,
            "message_id": message.message_id,
        }
        if partition is not None:
            options["selector"] = lambda *_: partition
        return self._queue(True, subject, message.body, options, message.born_at_ms, reserved)

    def send_sync(
        self, subject: str, body: bytes, *, timeout_s: float | None = 30.0, **options: Unpack[SendOptions]
    ) -> Stored:
        """Return when the message is stored. After SendTimeout the message stays queued, in order.

        The other options are those of `send`.
        """
        handle = self._accept(False, subject, body, options)
        try:
            self._pump()  # in this thread: waking another thread takes longer
        except Exception as error:
            self._broke(error)
            raise
        return handle.result(timeout_s)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all messages are acknowledged. Raises the first failure that was not reported to a caller yet."""
        with self._roomier:
            if not self._roomier.wait_for(lambda: self._core.is_idle, timeout_s):
                raise SendTimeout("all subjects", timeout_s or 0.0, None)
            failed, self._core.failed = self._core.failed, []
        for batch in failed:
            if batch.error is not None and not batch.is_seen:
                raise copy.copy(batch.error)

    def would_wait(self, subject: str) -> bool:
        """Whether `send` would have to wait now: for space in the buffer, or for the subject's route."""
        return not self._core.knows(subject) or self._core.waiting_bytes >= self._settings.buffer_bytes

    def statistics(self) -> ProducerStatistics:
        with self._lock:
            core = self._core
            return ProducerStatistics(
                core.waiting_count, core.waiting_bytes, core.acknowledged_count, core.failed_count, core.resent_count
            )

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self, timeout_s: float | None = None) -> None:
        """Flush, then stop. Messages still unacknowledged after `timeout_s` fail with Closed."""
        with self._lock:
            if self._closed:
                return
        try:
            self.flush(timeout_s)
        finally:
            self._stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def disown(self) -> None:
        """In a forked child: the producer's thread does not exist, and a missing thread may hold the lock."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._roomier = threading.Condition(self._lock)
        self._closed = True
        self._core.fallback = None
        self._core.abandon(Closed("producer"))

    def _stop(self) -> None:
        with self._lock:
            self._closed = True
            left = self._core.abandon(Closed("producer"))
            self._changed.notify_all()
            self._roomier.notify_all()
        self._hooked.tell(waits=True)
        if left:
            _log.warning("producer.closed_with_unsent", producer=self.name, messages=left)
        self._thread.join()
        if self._fallback is not None:
            self._fallback.close()

    def _queue(
        self,
        wakes: bool,
        subject: str,
        body: bytes,
        options: SendOptions,
        born_at_ms: int | None = None,
        reserved: dict[str, str] | None = None,
    ) -> SendHandle:
        core = self._core
        if type(subject) is not str or not core.knows(subject):
            self._learn(subject)
        if born_at_ms is None:
            born_at_ms = self._clock.time_ms()
        with self._lock:
            if self._closed:
                raise Closed("producer")
            if core.waiting_bytes >= self._settings.buffer_bytes:
                self._wait_for_room()
            key = options.get("key")
            if len(options) == (0 if key is None else 1) and reserved is None:
                batch = core.add(subject, body, key, born_at_ms)  # no option but the key: 0.2 µs less per message
            else:
                batch = core.add(subject, body, born_at_ms=born_at_ms, reserved=reserved, **options)
            handle = SendHandle(batch, len(batch.messages) - 1)
            if wakes:
                self._wake()
            if self._fallback is not None:
                self._wake_fallback()
        return handle

    def _queue_hooked(self, wakes: bool, subject: str, body: bytes, options: SendOptions) -> SendHandle:
        properties = options.get("properties")
        given = properties if isinstance(properties, dict) else {}
        sending = Sending(
            subject=subject,
            body=body,
            key=options.get("key"),
            tags=options.get("tags", ()),
            properties=dict(given),
            message_id=options.get("message_id"),
            producer=self.name,
        )
        begun = self._hooked.before(sending)
        has_added = sending.properties != given
        try:
            try:
                added: SendOptions = {**options, "properties": sending.properties} if has_added else options
                handle = self._queue(wakes, subject, body, added)
            except InvalidInput:
                if not has_added:
                    raise
                # Perhaps the properties of the hooks cannot be sent: the message does not depend on those.
                handle = self._queue(wakes, subject, body, options)
        except BaseException as error:
            self._hooked.after(begun, None, error)
            raise
        self._hooked.follow(begun, handle)
        return handle

    def _learn(self, subject: str) -> None:
        found = ask(self._node, FindSubject(check_name("subject", subject, reserved=True)), Subject)
        if self._strategy is not None:
            found = dataclasses.replace(found, strategy=self._strategy)
        with self._lock:
            if not self._core.knows(subject):
                self._core.learn(found)

    def _wait_for_room(self) -> None:
        limit_bytes, wait_s = self._settings.buffer_bytes, self._settings.buffer_wait_s
        if not self._roomier.wait_for(lambda: self._core.waiting_bytes < limit_bytes or self._closed, wait_s):
            raise BufferFull(limit_bytes, wait_s)
        if self._closed:
            raise Closed("producer")

    def _pump(self) -> bool:
        with self._pumping:
            with self._lock:
                self._is_dirty = False
                attempts = self._core.poll(self._clock.monotonic())
                if self._fallback is not None:
                    self._wake_fallback()
            for attempt in attempts:
                self._node.submit(attempt.command, partial(self._answered, attempt))
        self._hooked.tell()
        return bool(attempts)

    def _answered(self, attempt: SendAttempt, answer: Answer | InturnError) -> None:
        # Logged at tries 1, 2, 4, 8 …: a disk that stays full must not flood the log. A grown subject is no failure,
        # nor are the batches behind the first batch refused for the old route.
        is_usual = isinstance(answer, RouteChanged | OutOfSequence) and attempt.tries == 1
        if isinstance(answer, InturnError) and attempt.tries & (attempt.tries - 1) == 0 and not is_usual:
            _log.warning(
                "producer.send_failed",
                subject=attempt.command.subject,
                partition=attempt.command.partition,
                tries=attempt.tries,
                error=str(answer),
            )
        with self._lock:
            self._core.answered(attempt, answer, self._clock.monotonic())
            outdated = self._core.take_outdated()
            self._roomier.notify_all()
            if self._fallback is not None:
                self._wake_fallback()
            # The producer's thread calls hooks: this thread belongs to the log, or reads all answers.
            if not self._core.is_idle or self._hooked.has_ended:  # else the thread has no work
                self._wake()
        for subject in outdated:
            self._node.submit(FindSubject(subject), self._found)

    def _found(self, answer: Answer | InturnError) -> None:
        """The route of a subject that has grown. Without an answer, the next refusal asks again."""
        if isinstance(answer, Subject):
            if self._strategy is not None:
                answer = dataclasses.replace(answer, strategy=self._strategy)
            with self._lock:
                self._core.learn(answer)
                self._wake()

    def _wake_fallback(self) -> None:
        """Called under the lock, wherever the core may have queued batches for the outbox."""
        fallback = self._core.fallback
        if self._fallback is not None and fallback is not None and fallback.has_work:
            self._fallback.wake()

    def _wake(self) -> None:
        self._is_dirty = True
        if self._is_asleep:
            self._is_asleep = False
            self._changed.notify()

    def _run(self) -> None:
        try:
            self._run_until_closed()
        except BaseException as error:  # callers would wait for a dead thread
            self._broke(error)

    def _broke(self, error: BaseException) -> None:
        _log.exception("producer.failed", producer=self.name)
        with self._lock:
            self._closed = True
            self._core.abandon(InturnError(f"the producer failed: {error!r}"))
            self._changed.notify_all()
            self._roomier.notify_all()
        self._hooked.tell()

    def _run_until_closed(self) -> None:
        while True:
            if self._pump():
                continue
            with self._changed:
                if self._closed:
                    return
                if self._is_dirty:
                    continue
                self._is_asleep = True
                # No longer than an answer may take: `send_sync` submits without waking this thread.
                due_s = self._core.next_due_s()
                now_s = self._clock.monotonic()
                wait_s = self._settings.answer_timeout_s if due_s is None else max(0.0, due_s - now_s)
                self._changed.wait(min(wait_s, self._settings.answer_timeout_s))
                self._is_asleep = False
