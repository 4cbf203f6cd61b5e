"""The common parts of the processes of a fault run: specification, clock, and end."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TypeVar

import msgspec

from inturn.model.settings import LeaseSettings
from inturn.transport.address import parse_address
from inturn.transport.client import RemoteNode
from inturn.transport.client_stream import StreamSettings
from inturn.version import SOFTWARE

JUMP_MS_MAX = 48 * 3600 * 1000
LOOK_S = 0.02
CONNECT_S = 60.0
# A silent stream is given up quickly, since leases are short here, too.
LINK = StreamSettings(dial_timeout_s=1.0, backoff_max_s=0.2, ping_s=0.5, silence_s=1.5)


class ServerSpec(msgspec.Struct, frozen=True, kw_only=True):
    events: str  # the file; empty: none are written
    seed: int
    folder: str
    port: int
    flush: str
    lease: LeaseSettings
    bug: str | None = None


class ClientSpec(msgspec.Struct, frozen=True, kw_only=True):
    """`name` and `seed` belong to a process: the successor has different values."""

    events: str
    seed: int
    address: str
    subject: str
    name: str
    bug: str | None = None


class ConsumerSpec(ClientSpec, frozen=True, kw_only=True):
    group: str
    order: str
    failing_share: float = 0.02
    handling_s_max: float = 0.005
    slow_share: float = 0.02  # of the messages: handlers run when a fault hits their process
    slow_s_max: float = 0.3


class ProducerSpec(ClientSpec, frozen=True, kw_only=True):
    keys: int
    writer: str | None = None  # the name of a named producer
    pause_s_max: float = 0.05


_Spec = TypeVar("_Spec", bound=msgspec.Struct)


class JumpingClock:
    """The wall clock jumps on request; the monotonic clock goes on. The clock knows when every thread last read the
    time: a worker reads the time to check its lease before a handler."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._jump_ms = 0
        self._looks = threading.local()

    def monotonic(self) -> float:
        self._looks.at_s = now_s = time.monotonic()
        return now_s

    def time_ms(self) -> int:
        return time.time_ns() // 1_000_000 + self._jump_ms

    def jump(self) -> None:
        self._jump_ms = self._random.randint(-JUMP_MS_MAX, JUMP_MS_MAX)

    def looked_at_s(self) -> float:
        """The last reading of this thread; 0 if the thread has not read the time since `forget_look`."""
        at_s: float = getattr(self._looks, "at_s", 0.0)
        return at_s

    def forget_look(self) -> None:
        self._looks.at_s = 0.0


class Stop:
    """Set by SIGTERM. SIGUSR1 makes the clock jump."""

    def __init__(self, clock: JumpingClock) -> None:
        self.is_asked = False
        self._parent = os.getppid()

        def stop(number: int, frame: FrameType | None) -> None:
            self.is_asked = True

        def jump(number: int, frame: FrameType | None) -> None:
            clock.jump()

        signal.signal(signal.SIGTERM, stop)
        signal.signal(signal.SIGUSR1, jump)

    def wait(self, look: Callable[[], None] = lambda: None) -> None:
        """Run until a request to stop; an orphan ends at once. `look` may raise."""
        while not self.is_asked:
            self.end_if_orphan()
            look()
            time.sleep(LOOK_S)

    def end_if_orphan(self) -> None:
        if os.getppid() != self._parent:
            os._exit(3)


def told(kind: type[_Spec]) -> _Spec:
    return msgspec.json.decode(sys.argv[1].encode(), type=kind)


def connected(spec: ClientSpec, clock: JumpingClock) -> RemoteNode:
    address = parse_address(spec.address)
    node = RemoteNode(address.dial, spec.address, SOFTWARE, clock, LINK)
    node.wait_until_up(CONNECT_S)
    return node


@contextlib.contextmanager
def seeded(bugs: str | None) -> Iterator[None]:
    """The product has these bugs, see `seeded_bugs`; several are joined by "+"."""
    with contextlib.ExitStack() as injected:
        if bugs is not None:
            from simulator.seeded_bugs import BUGS  # imports the whole product: slow

            for bug in bugs.split("+"):
                injected.enter_context(BUGS[bug].injected())
        yield
