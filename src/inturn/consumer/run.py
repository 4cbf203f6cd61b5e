"""A run: some messages of one partition, handled one after the other by one worker.

The worker calls `next` before every message; that is where the lease is looked at. Between `take` and `finish` of
the core only its worker changes a run, without a lock; it reads the partition's deadline, and others may read how many
messages are over: a number that only grows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inturn.consumer.context import Context
from inturn.consumer.moving import past_attempts
from inturn.consumer.outcome import Next, Outcome
from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.errors import LogDamaged
from inturn.model.message import Message, Origin

if TYPE_CHECKING:
    from inturn.consumer.held import Chunk, HeldPartition


class Run:
    """`done` counts the messages that are over, from the first on."""

    __slots__ = (
        "_attempts",
        "_batch_size",
        "_committed",
        "_last_started_s",
        "_started",
        "chunks",
        "context",
        "done",
        "error",
        "failures",
        "held",
        "is_move",
        "is_rollback",
        "messages",
        "slow_count",
        "slow_s",
        "started_at_s",
        "suspend_s",
        "until_s",
    )

    def __init__(
        self,
        held: HeldPartition,
        chunks: list[Chunk],
        context: Context,
        now_s: float,
        until_s: float,
        batch_size: int,
        slow_s: float,
    ) -> None:
        self.held = held
        self.chunks = chunks
        self.context = context
        self.messages: list[Message] = []
        self.started_at_s = now_s
        self.until_s = until_s
        self.slow_s = slow_s
        self.done = 0
        self._committed = 0  # manual: how many are committed, from the first on
        self.suspend_s: float | None = None
        self.is_rollback = False
        self.is_move = False
        self.failures = 0
        self.slow_count = 0
        self.error: LogDamaged | None = None
        self._attempts = held.attempts
        self._started = 0
        self._batch_size = batch_size
        self._last_started_s = now_s

    def open(self) -> None:
        """Decode the messages. Damage leaves those before it to be handled and is kept in `error`."""
        origin = Origin(self.context.subject, self.context.partition)
        for chunk in self.chunks:
            if isinstance(chunk.content, list):
                self.messages += chunk.content
                continue
            try:
                messages = _decoded(chunk.content, origin)
            except LogDamaged as error:
                self.error = error
                break
            self.messages += messages[len(messages) - chunk.count :]
        if self.held.is_delayed:
            for message in self.messages:
                self._attempts.setdefault(message.offset, past_attempts(message) + 1)

    def next(self, now_s: float) -> Message | None:
        """The next message to handle, or None to stop. Calling it again says that the last one succeeded."""
        if now_s - self._last_started_s > self.slow_s:
            self.slow_count += 1
        self._last_started_s = now_s
        started = self.done = self._started
        if started == len(self.messages) or now_s >= self.held.deadline_s or now_s >= self.until_s:
            return None
        self._started = started + 1
        message = self.messages[started]
        if self._attempts:
            self.context.attempt = self._attempts.get(message.offset, 1)
        return message

    def next_batch(self, now_s: float) -> list[Message] | None:
        """The same for handlers that take several at once."""
        first = self.next(now_s)
        if first is None:
            return None
        messages = self.messages[self.done : self.done + self._batch_size]
        self._started = self.done + len(messages)
        return messages

    def settle(self, outcome: Outcome) -> bool:
        """What became of the message given out last; False: the run is over."""
        if outcome.next in (Next.DONE, Next.PASS, Next.KEEP):
            is_done = outcome.next is Next.DONE or (outcome.next is Next.PASS and not self._has_kept())
            if is_done:
                self._committed = self._started
            self.context.is_acknowledged = False
            return True
        self.failures += 1
        self.suspend_s = outcome.wait_s
        self.is_rollback = outcome.next is Next.ROLLBACK
        self.is_move = outcome.next is Next.MOVE
        return False

    def _has_kept(self) -> bool:
        return bool(self.held.kept) or self.done > self._committed

    def safe_count(self, ack: str) -> int:
        """How many may be committed, from the first on. May be asked at any time, by any thread."""
        return self.done if ack == "auto" else self._committed

    def end(self, now_s: float) -> None:
        """A call that failed may have been slow, too."""
        if self.suspend_s is not None and now_s - self._last_started_s > self.slow_s:
            self.slow_count += 1

    @property
    def failed(self) -> list[Message]:
        """What was given to the handler and is to be repeated."""
        return self.messages[self.done : self._started] if self.suspend_s is not None else []


def _decoded(batch: StoredBatch, origin: Origin) -> list[Message]:
    place = f"{origin.subject}/{origin.partition}"
    if not is_intact(batch):
        raise LogDamaged(place, batch.header.base_offset, "the checksum of a batch does not fit its content")
    try:
        return decode(batch, origin)
    except Exception as error:  # whatever a decoder or decompressor says of content that it cannot read
        raise LogDamaged(place, batch.header.base_offset, f"a batch cannot be decoded: {error}") from error
