"""The real producer core under simulation: a shell with virtual time in place of threads."""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TypeAlias

from inturn.model.errors import InturnError
from inturn.model.settings import ProducerSettings
from inturn.model.subject import Subject
from inturn.producer.core import ProducerCore, SendAttempt
from inturn.producer.send_batch import SendBatch
from inturn.protocol.commands import Answer, FindSubject, OpenProducer, ProducerOpened
from inturn.testing.recorder import Recorder
from simulator.network import SimNetwork
from simulator.world import SimClient, World

_OPEN_TIMEOUT_S = 0.5
_Sent: TypeAlias = tuple[SendBatch, int, bytes, str, tuple[str, ...]]  # place in the send batch; key, message id, tags


class SimProducer(SimClient):
    """Numbers its messages: the message id is `<name>:<number>` and shows order and duplicates in the log."""

    def __init__(
        self,
        world: World,
        network: SimNetwork,
        recorder: Recorder,
        subject: Subject,
        name: str,
        settings: ProducerSettings,
        *,
        writer: str | None = None,
    ) -> None:
        super().__init__(world, name)
        self._network = network
        self._recorder = recorder
        self._subject = subject
        self._settings = settings
        self._writer = writer
        self._core: ProducerCore | None = None
        self._number = 0
        self._tracked: deque[_Sent] = deque()
        self._next_tick_s = float("inf")
        self.error: InturnError | None = None
        self._open()

    @property
    def is_idle(self) -> bool:
        return self.is_dead or self.error is not None or (self._core is not None and self._core.is_idle)

    def send(self, key: bytes, tags: tuple[str, ...] = ()) -> bool:
        """False if the producer is not open yet, or has ended."""
        if self._core is None or self.error is not None or self.is_dead:
            return False
        message_id = f"{self.name}:{self._number}"
        try:
            now_ms = self.world.time_ms()
            batch = self._core.add(self._subject.name, b"x" * 20, key, now_ms, tags, message_id=message_id)
        except InturnError as error:
            self._end(error)
            return False
        self._number += 1
        self._tracked.append((batch, len(batch.messages) - 1, key, message_id, tags))
        self.later(self.world.spread(0.0, 0.004), self._tick)
        return True

    def _open(self) -> None:
        if self._core is None:
            self._network.send(self, OpenProducer(self._writer), self._opened)
            self.later(_OPEN_TIMEOUT_S, self._open)

    def _opened(self, answer: Answer | InturnError) -> None:
        if self._core is None and isinstance(answer, ProducerOpened):
            self._core = ProducerCore(answer.producer_id, answer.epoch, self._settings, self.world.rng)
            self._core.learn(self._subject)

    def _tick(self) -> None:
        core = self._core
        assert core is not None
        for attempt in core.poll(self.world.now_s):
            self._network.send(self, attempt.command, partial(self._answered, attempt))
        due_s = core.next_due_s()
        if due_s is not None and not self.world.now_s < self._next_tick_s <= due_s:
            self._next_tick_s = max(due_s, self.world.now_s)
            self.later(self._next_tick_s - self.world.now_s, self._tick)

    def _answered(self, attempt: SendAttempt, answer: Answer | InturnError) -> None:
        core = self._core
        assert core is not None
        core.answered(attempt, answer, self.world.now_s)
        for subject in core.take_outdated():
            self._network.send(self, FindSubject(subject), self._found)
        self._record()
        if core.failed and core.failed[0].error is not None:
            self._end(core.failed[0].error)
        else:
            self._tick()

    def _found(self, answer: Answer | InturnError) -> None:
        if isinstance(answer, Subject) and self._core is not None:
            self._core.learn(answer)
            self._tick()

    def _end(self, error: InturnError) -> None:
        """A failed message closes the producer: the producer must not continue with other partitions."""
        self.error = error
        self.is_dead = True

    def _record(self) -> None:
        waiting = deque[_Sent]()
        for sent in self._tracked:
            batch, index, key, message_id, tags = sent
            if not batch.done:
                waiting.append(sent)
                continue
            while batch.parts is not None:
                batch, index = batch.parts[index]
            if batch.error is None:
                offset = batch.base_offset + index
                self._recorder.sent(self._subject.name, batch.partition, offset, key, message_id, tags)
        self._tracked = waiting
