"""A consumer process of a fault run: `python -m simulator.processes.consumer SPEC`."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator

from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.settings import ConsumerSettings
from inturn.testing.history import HandlerStart
from simulator.processes.child import ConsumerSpec, JumpingClock, Stop, connected, seeded, told
from simulator.processes.history import FileRecorder

SETTINGS = ConsumerSettings(
    concurrency=4,
    commit_interval_s=0.05,
    heartbeat_s=0.3,
    pull_wait_s=0.5,
    answer_timeout_s=1.0,
    backoff_max_s=0.1,
    suspend_s=0.01,
)
STOP_S = 20.0


class FailedOnPurpose(Exception):
    pass


class RecordedHandler:
    """The handler: takes a moment, fails now and then, and records start and end."""

    def __init__(self, spec: ConsumerSpec, recorder: FileRecorder, clock: JumpingClock) -> None:
        self._spec = spec
        self._recorder = recorder
        self._clock = clock
        self._random = random.Random(spec.seed)

    def __call__(self, message: Message, context: Context) -> None:
        with self._recorded(message, context):
            is_slow = self._random.random() < self._spec.slow_share
            time.sleep(self._random.random() * (self._spec.slow_s_max if is_slow else self._spec.handling_s_max))
            if self._random.random() < self._spec.failing_share:
                raise FailedOnPurpose

    @contextlib.contextmanager
    def _recorded(self, message: Message, context: Context) -> Iterator[None]:
        what = (message.subject, context.group, message.partition, message.offset, message.key)
        who = (context.consumer, context.epoch, message.message_id)
        under = None if message.partition == context.partition else context.partition
        start = HandlerStart(*what, *who, context.attempt, under)
        self._recorder.let_go(start, self._clock.looked_at_s())
        result = "exception"
        try:
            yield
            result = "success"
        finally:
            self._recorder.ended(*what, *who, result=result)
            self._clock.forget_look()


def main() -> None:
    spec = told(ConsumerSpec)
    clock = JumpingClock(spec.seed)
    stop = Stop(clock)
    with seeded(spec.bug):
        recorder = FileRecorder(spec.events)
        node = connected(spec, clock)
        consumer = Consumer(
            node,
            clock,
            spec.subject,
            spec.group,
            RecordedHandler(spec, recorder, clock),
            order=spec.order,
            settings=SETTINGS,
            lease=node.lease,
            name=spec.name,
        )

        def look() -> None:
            if consumer.error is not None:
                raise consumer.error

        consumer.start()
        stop.wait(look)
        consumer.stop(STOP_S)
        node.close()


if __name__ == "__main__":
    main()
