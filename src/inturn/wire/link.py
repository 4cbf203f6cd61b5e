"""The client's end of a stream, without I/O: what to send, which answer belongs to what, and when to give it up.

    DOWN ─ opened ─► GREETING ─ Welcome ─► UP ─ lost ─► DOWN, until the back-off is over
                         └─ VersionMismatch, or AuthenticationFailed at the first time ─► REFUSED

Once a client was let in, a server that does not know it any more is like one that is not there: tokens are renewed by
people, who make mistakes, and what waits to be sent is not to be lost for it.

Whatever is unanswered when the stream is lost is answered with ConnectionLost: it may have been done or not, and
whoever asked repeats it, which every command allows. Nothing is kept for later, so nothing is sent when it is stale.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from inturn.model.commands import Answer, Command, Hello, Ping, Reply, Welcome
from inturn.model.errors import (
    AuthenticationFailed,
    ConnectionLost,
    InturnError,
    InvalidInput,
    ProtocolError,
    QuotaExceeded,
    VersionMismatch,
    WireError,
)
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, Role
from inturn.wire.codec import VERSIONS, pack, unpack
from inturn.wire.frames import NUMBER_MAX, FrameReader

_log = get_logger("inturn.wire")
HELLO_BYTES_MAX = 64 * 1024  # of the answer to Hello


@dataclass(frozen=True, slots=True)
class LinkSettings:
    dial_timeout_s: float = 5.0
    backoff_min_s: float = 0.02
    backoff_max_s: float = 1.0
    ping_s: float = 4.0  # if nothing came for so long, ask whether anybody is there
    silence_s: float = 8.0  # and if nothing comes for so long, the stream is given up


class LinkState(enum.Enum):
    DOWN = enum.auto()
    GREETING = enum.auto()
    UP = enum.auto()
    REFUSED = enum.auto()


Delivery = tuple[Reply, Answer | InturnError]


class NotLetIn(Exception):
    """The server answered the greeting with an error that may be gone later."""

    @property
    def why(self) -> str:
        return str(self)


def hung_up_text(state: LinkState, address: str) -> str:
    """Why a stream is over that the server has ended."""
    if state is LinkState.GREETING and address.startswith("inturn://"):
        return "the server hung up without a word; does it talk TLS? Then use inturns://"
    return "the server hung up"


def deliver(deliveries: list[Delivery]) -> None:
    """Call the replies; one that fails is not to cost the others theirs."""
    for reply, answer in deliveries:
        try:
            reply(answer)
        except Exception:
            _log.exception("wire.reply_failed")


class Link:
    """Called by one thread at a time. Replies are returned, not called: whoever holds a lock lets go of it first.

    `send` gets the frames in their order.
    """

    def __init__(
        self,
        address: str,
        software: str,
        settings: LinkSettings,
        rng: random.Random,
        send: Callable[[bytes], None],
        token: str = "",
    ) -> None:
        self._token = token
        self.state = LinkState.DOWN
        self.why = "not connected yet"
        self.refusal: WireError | None = None
        self.lease: LeaseSettings | None = None
        self.role = Role.NODE
        self.retry_at_s = float("-inf")
        self._address = address
        self._software = software
        self._settings = settings
        self._random = rng.random
        self._send = send
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._frame_bytes = 0
        self._pending: dict[int, Reply] = {}
        self._number = 0
        self._failures = 0
        self._heard_at_s = 0.0
        self._pinged_at_s = 0.0

    @property
    def unanswered_count(self) -> int:
        return len(self._pending)

    def opened(self, now_s: float) -> None:
        """A stream is there."""
        self.state = LinkState.GREETING
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._heard_at_s = self._pinged_at_s = now_s
        self._ask(Hello(VERSIONS, self._software, self._token), lambda _: None)

    def submit(self, command: Command, reply: Reply) -> Delivery | None:
        """Send it. If that cannot be, what to answer instead is returned."""
        if self.state is not LinkState.UP:
            return reply, self._lost()
        return self._ask(command, reply)

    def received(self, data: bytes, now_s: float) -> list[Delivery]:
        """Bytes came. Raises ProtocolError if they make no sense, NotLetIn if the server wants nothing of us now: then
        the stream is to be given up (`lost`)."""
        self._heard_at_s = now_s
        answered: dict[int, Delivery] = {}
        try:
            for frame in self._reader.feed(data):
                answer = unpack(frame)
                if isinstance(answer, Command):
                    raise ProtocolError(f"the server sent a {type(answer).__name__}")
                reply = self._pending.pop(frame.number, None)
                if self.state is LinkState.GREETING:
                    self._greeted(answer)
                elif reply is not None:  # else a second copy of an answer
                    answered[frame.number] = reply, answer
                elif frame.number == 0 and isinstance(answer, InturnError):
                    raise ProtocolError(f"the server hung up: {answer}")
        except (ProtocolError, NotLetIn):
            # What came before the nonsense is not returned, so `lost` has to answer it.
            self._pending.update((number, reply) for number, (reply, _) in answered.items())
            raise
        if answered:  # a Welcome alone is no success: what follows may be nonsense every time
            self._failures = 0
        return list(answered.values())

    def lost(self, why: str, now_s: float) -> list[Delivery]:
        """The stream is gone, or could not be opened."""
        if self.state is not LinkState.REFUSED:
            self.state = LinkState.DOWN
        self.why = why
        wait_s = min(self._settings.backoff_max_s, self._settings.backoff_min_s * 2 ** min(self._failures, 20))
        self._failures += 1
        self.retry_at_s = now_s + wait_s * (0.5 + self._random() / 2)
        replies = list(self._pending.values())
        self._pending.clear()
        return [(reply, self._lost()) for reply in replies]

    def is_silent(self, now_s: float) -> bool:
        """Whether the stream is to be given up since nobody answers; asks from time to time."""
        if self.state not in (LinkState.UP, LinkState.GREETING):
            return False
        if now_s >= self._heard_at_s + self._settings.silence_s:
            return True
        since_s = max(self._heard_at_s, self._pinged_at_s)
        if self.state is LinkState.UP and now_s >= since_s + self._settings.ping_s:
            self._pinged_at_s = now_s
            self._ask(Ping(), lambda _: None)
        return False

    def next_due_s(self) -> float:
        """When `is_silent` is to be asked next."""
        silent_s = self._heard_at_s + self._settings.silence_s
        if self.state is not LinkState.UP:
            return silent_s  # before the greeting nothing is asked
        return min(silent_s, max(self._heard_at_s, self._pinged_at_s) + self._settings.ping_s)

    def _greeted(self, answer: Any) -> None:
        if isinstance(answer, Welcome):
            self.state = LinkState.UP
            self.lease = answer.lease
            self.role = Role(answer.role) if answer.role in set(Role) else Role.NODE
            self._frame_bytes = answer.frame_bytes
            self._reader.bytes_max = answer.frame_bytes
        elif isinstance(answer, VersionMismatch) or (isinstance(answer, AuthenticationFailed) and self.lease is None):
            self.state, self.refusal = LinkState.REFUSED, answer
        elif isinstance(answer, AuthenticationFailed | QuotaExceeded):
            raise NotLetIn(str(answer))
        else:
            raise ProtocolError(f"the server greeted with {answer!r}")

    def _ask(self, command: Command, reply: Reply) -> Delivery | None:
        # Numbers come round after 4 billion; by then the old ones are answered.
        self._number = self._number % NUMBER_MAX + 1
        try:
            frame = pack(self._number, command)
        except (TypeError, ValueError, OverflowError) as error:
            return reply, InvalidInput(f"{command!r} cannot be sent: {error}")
        if self.state is LinkState.UP and len(frame) > self._frame_bytes:
            return reply, InvalidInput(
                f"{type(command).__name__} has {len(frame)} bytes, the server takes frames of {self._frame_bytes} at "
                "the most; send less at once"
            )
        self._pending[self._number] = reply
        self._send(frame)
        return None

    def _lost(self) -> InturnError:
        return self.refusal if self.refusal is not None else ConnectionLost(self._address, self.why)
