"""The client's end of TLS, without a socket: what to send for what is said, and what is said in what came.

Sockets that `ssl` wraps may not be read and written by two threads at once; bytes may.

The client's end of a stream, without I/O: what to send, which answer belongs to what, and when to give it up.

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
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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
from inturn.protocol.codec import VERSIONS, pack, unpack
from inturn.protocol.commands import Answer, Command, Hello, Ping, Reply, Welcome
from inturn.protocol.frames import NUMBER_MAX, FrameReader

_READ_BYTES = 256 * 1024
_WRONG_VERSION = "WRONG_VERSION_NUMBER"  # what came is no TLS at all


class TlsStream:
    """Called by one thread at a time."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self.is_ended = False  # the server said that nothing more will come
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=server_name)

    def shake_hands(self, dialed: socket.socket) -> None:
        """On a socket that blocks, for its timeout at the most. Raises OSError, also if the server is not trusted."""
        while True:
            try:
                self._tls.do_handshake()
            except ssl.SSLWantReadError:
                self._send_all(dialed)
                data = dialed.recv(_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the server hung up during the TLS handshake") from None
                self._in.write(data)
            except ssl.SSLError as error:
                self._send_all(dialed)  # the other end is to know why
                raise OSError(tls_error_text(error)) from error
            else:
                self._send_all(dialed)
                return

    def seal(self, data: bytes) -> bytes:
        """What to send for it."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._out.read()

    def unseal(self, data: bytes) -> bytes:
        """What is said in what came, as far as it is whole. There may be something to send: `to_send`."""
        self._in.write(data)
        said = []
        try:
            while piece := self._tls.read(_READ_BYTES):
                said.append(piece)
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        except ssl.SSLError as error:
            raise OSError(tls_error_text(error)) from error
        return b"".join(said)

    def to_send(self) -> bytes:
        return self._out.read()

    def _send_all(self, dialed: socket.socket) -> None:
        data = self._out.read()
        if data:
            dialed.sendall(data)


def tls_error_text(error: Exception) -> str:
    """With what to do about it, where that is known."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its TLS certificate is not trusted: {error.verify_message}; give its CA: TlsSettings(ca_file=…)"
    if isinstance(error, ssl.SSLError) and error.reason == _WRONG_VERSION:
        return "it does not talk TLS; use inturn:// instead of inturns://"
    if isinstance(error, ssl.SSLError) and error.reason and "CERTIFICATE" in error.reason:
        return f"TLS: {error.reason}; does it ask for a client certificate? TlsSettings(cert_file=…, key_file=…)"
    return f"TLS: {error}" if isinstance(error, ssl.SSLError) else str(error)


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
