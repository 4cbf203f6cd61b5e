"""A producer process of a fault run: `python -m simulator.processes.producer SPEC`."""

from __future__ import annotations

import random
import time
from collections import deque

from inturn.model.errors import ProducerError
from inturn.model.settings import ProducerSettings
from inturn.producer.producer import Producer
from inturn.producer.send_batch import SendHandle
from inturn.transport.client import RemoteNode
from simulator.processes.child import JumpingClock, ProducerSpec, Stop, connected, seeded, told
from simulator.processes.history import FileRecorder

SETTINGS = ProducerSettings(backoff_max_s=0.2, answer_timeout_s=2.0, batch_count=8)
KEYLESS_SHARE = 0.1
SYNC_SHARE = 0.3
BURST_MAX = 12
STOP_S = 20.0


class Sender:
    """Sends until a stop, in bursts or single messages, and records acknowledgements.

    A message id is `sender:number`; messages of a sender and key have rising numbers. A fenced producer continues as a
    new sender.
    """

    def __init__(self, spec: ProducerSpec, recorder: FileRecorder, node: RemoteNode, clock: JumpingClock) -> None:
        self._spec = spec
        self._recorder = recorder
        self._node = node
        self._clock = clock
        self._random = random.Random(spec.seed)
        self._sent: deque[tuple[SendHandle, bytes | None, str]] = deque()
        self._opened = 0
        self._open()

    def send_some(self) -> None:
        try:
            is_sync = self._random.random() < SYNC_SHARE
            for _ in range(self._random.randint(1, 2 if is_sync else BURST_MAX)):
                self._send(is_sync)
            self._note()
        except ProducerError:  # a second producer of the same name was opened
            self._sent.clear()
            self._open()
        time.sleep(self._random.random() * self._spec.pause_s_max)

    def finish(self) -> None:
        try:
            self._producer.close(STOP_S)
        except ProducerError:
            return
        self._note()

    def _open(self) -> None:
        self._producer = Producer(self._node, self._clock, SETTINGS, name=self._spec.writer)
        self._opened += 1
        self._number = 0

    def _send(self, is_sync: bool) -> None:
        self._number += 1
        is_keyless = self._random.random() < KEYLESS_SHARE
        key = None if is_keyless else b"key-%d" % self._random.randrange(self._spec.keys)
        message_id = f"{self._spec.name}.{self._opened}:{self._number}"
        body = bytes(self._random.randrange(200))
        if is_sync:
            subject = self._spec.subject
            stored = self._producer.send_sync(subject, body, key=key, message_id=message_id, timeout_s=None)
            self._recorder.sent(stored.subject, stored.partition, stored.offset, key, message_id)
        else:
            handle = self._producer.send(self._spec.subject, body, key=key, message_id=message_id)
            self._sent.append((handle, key, message_id))

    def _note(self) -> None:
        while self._sent and self._sent[0][0].done:
            handle, key, message_id = self._sent.popleft()
            stored = handle.result()
            self._recorder.sent(stored.subject, stored.partition, stored.offset, key, message_id)


def main() -> None:
    spec = told(ProducerSpec)
    clock = JumpingClock(spec.seed)
    stop = Stop(clock)
    with seeded(spec.bug):
        recorder = FileRecorder(spec.events)
        node = connected(spec, clock)
        sender = Sender(spec, recorder, node, clock)
        while not stop.is_asked:
            stop.end_if_orphan()
            sender.send_some()
        sender.finish()
        node.close()


if __name__ == "__main__":
    main()
