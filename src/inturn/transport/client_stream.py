"""The client's end of a stream, without I/O: frames to send, replies for answers, and when to drop the stream.

    DOWN ─ opened ─► GREETING ─ Welcome ─► UP ─ lost ─► DOWN, until the back-off is over
                         └─ VersionMismatch, or AuthenticationFailed at the first time ─► REFUSED

A client that was accepted once treats a later AuthenticationFailed like an unreachable server: operators renew tokens
and make mistakes, and messages that wait to be sent must not be lost by that.

Commands without an answer when the stream is lost are answered with ConnectionLost. The server may have executed such a
command or not; the caller repeats the command, which every command allows. The stream keeps no command for later, so no
stale command is ever sent.

`TlsStream` is the client's end of TLS on bytes: two threads must not read and write a socket of `ssl` at once.
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
_WRONG_VERSION = "WRONG_VERSION_NUMBER"  # the server does not speak TLS


class TlsStream:
    """Called by one thread at a time."""

    def __init__(self, context: ssl.SSLContext, server_name: str) -> None:
        self.is_ended = False  # the server has closed the TLS stream
        self._in = ssl.MemoryBIO()
        self._out = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_hostname=server_name)

    def shake_hands(self, dialed: socket.socket) -> None:
        """On a blocking socket, for at most its timeout. Raise OSError, also if the server is not trusted."""
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
                self._send_all(dialed)  # sends the alert to the server
                raise OSError(tls_error_text(error)) from error
            else:
                self._send_all(dialed)
                return

    def seal(self, data: bytes) -> bytes:
        """The encrypted bytes to send."""
        view = memoryview(data)
        while view:
            view = view[self._tls.write(view) :]
        return self._out.read()

    def unseal(self, data: bytes) -> bytes:
        """Decrypt received bytes, as far as complete. TLS may want to send bytes: see `to_send`."""
        self._in.write(data)
        pieces = []
        try:
            while piece := self._tls.read(_READ_BYTES):
                pieces.append(piece)
            self.is_ended = True
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLZeroReturnError:
            self.is_ended = True
        except ssl.SSLError as error:
            raise OSError(tls_error_text(error)) from error
        return b"".join(pieces)

    def to_send(self) -> bytes:
        return self._out.read()

    def _send_all(self, dialed: socket.socket) -> None:
        data = self._out.read()
        if data:
            dialed.sendall(data)


def tls_error_text(error: Exception) -> str:
    """The error, with a next step if known."""
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
class StreamSettings:
    dial_timeout_s: float = 5.0
    backoff_min_s: float = 0.02
    backoff_max_s: float = 1.0
    ping_s: float = 4.0  # after this time without bytes from the server, send a Ping
    silence_s: float = 8.0  # after this time without bytes from the server, drop the stream


class StreamState(enum.Enum):
    DOWN = enum.auto()
    GREETING = enum.auto()
    UP = enum.auto()
    REFUSED = enum.auto()


Delivery = tuple[Reply, Answer | InturnError]


class NotLetIn(Exception):
    """The server answered the greeting with an error that may pass."""

    @property
    def why(self) -> str:
        return str(self)


def hung_up_text(state: StreamState, address: str) -> str:
    """Why the server ended the stream."""
    if state is StreamState.GREETING and address.startswith("inturn://"):
        return "the server hung up without a word; does it talk TLS? Then use inturns://"
    return "the server hung up"


def deliver(deliveries: list[Delivery]) -> None:
    """Call the replies. A reply that raises does not stop other replies."""
    for reply, answer in deliveries:
        try:
            reply(answer)
        except Exception:
            _log.exception("wire.reply_failed")


class ClientStream:
    """Called by one thread at a time. Methods return replies without calling any, so the caller can release a lock
    first. `send` gets the frames in order.
    """

    def __init__(
        self,
        address: str,
        software: str,
        settings: StreamSettings,
        rng: random.Random,
        send: Callable[[bytes], None],
        token: str = "",
    ) -> None:
        self._token = token
        self.state = StreamState.DOWN
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
        """The connection is open: send the greeting."""
        self.state = StreamState.GREETING
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._heard_at_s = self._pinged_at_s = now_s
        self._ask(Hello(VERSIONS, self._software, self._token), lambda _: None)

    def submit(self, command: Command, reply: Reply) -> Delivery | None:
        """Send the command. If that is impossible, return the reply with its error."""
        if self.state is not StreamState.UP:
            return reply, self._lost()
        return self._ask(command, reply)

    def received(self, data: bytes, now_s: float) -> list[Delivery]:
        """Handle received bytes. Raise ProtocolError for invalid bytes, NotLetIn if the server refuses the client for
        now: then the caller drops the stream (`lost`)."""
        self._heard_at_s = now_s
        answered: dict[int, Delivery] = {}
        try:
            for frame in self._reader.feed(data):
                answer = unpack(frame)
                if isinstance(answer, Command):
                    raise ProtocolError(f"the server sent a {type(answer).__name__}")
                reply = self._pending.pop(frame.number, None)
                if self.state is StreamState.GREETING:
                    self._greeted(answer)
                elif reply is not None:  # else a second copy of an answer
                    answered[frame.number] = reply, answer
                elif frame.number == 0 and isinstance(answer, InturnError):
                    raise ProtocolError(f"the server hung up: {answer}")
        except (ProtocolError, NotLetIn):
            # Answers before the invalid frame are not returned, so `lost` has to answer their commands.
            self._pending.update((number, reply) for number, (reply, _) in answered.items())
            raise
        if answered:  # a Welcome alone does not reset the back-off: invalid bytes may follow each time
            self._failures = 0
        return list(answered.values())

    def lost(self, why: str, now_s: float) -> list[Delivery]:
        """The stream is lost, or could not be opened."""
        if self.state is not StreamState.REFUSED:
            self.state = StreamState.DOWN
        self.why = why
        wait_s = min(self._settings.backoff_max_s, self._settings.backoff_min_s * 2 ** min(self._failures, 20))
        self._failures += 1
        self.retry_at_s = now_s + wait_s * (0.5 + self._random() / 2)
        replies = list(self._pending.values())
        self._pending.clear()
        return [(reply, self._lost()) for reply in replies]

    def is_silent(self, now_s: float) -> bool:
        """Whether to drop the stream because the server is silent. Sends Pings."""
        if self.state not in (StreamState.UP, StreamState.GREETING):
            return False
        if now_s >= self._heard_at_s + self._settings.silence_s:
            return True
        since_s = max(self._heard_at_s, self._pinged_at_s)
        if self.state is StreamState.UP and now_s >= since_s + self._settings.ping_s:
            self._pinged_at_s = now_s
            self._ask(Ping(), lambda _: None)
        return False

    def next_due_s(self) -> float:
        """When to call `is_silent` next."""
        silent_s = self._heard_at_s + self._settings.silence_s
        if self.state is not StreamState.UP:
            return silent_s  # no Pings before the greeting
        return min(silent_s, max(self._heard_at_s, self._pinged_at_s) + self._settings.ping_s)

    def _greeted(self, answer: Any) -> None:
        if isinstance(answer, Welcome):
            self.state = StreamState.UP
            self.lease = answer.lease
            self.role = Role(answer.role) if answer.role in set(Role) else Role.NODE
            self._frame_bytes = answer.frame_bytes
            self._reader.bytes_max = answer.frame_bytes
        elif isinstance(answer, VersionMismatch) or (isinstance(answer, AuthenticationFailed) and self.lease is None):
            self.state, self.refusal = StreamState.REFUSED, answer
        elif isinstance(answer, AuthenticationFailed | QuotaExceeded):
            raise NotLetIn(str(answer))
        else:
            raise ProtocolError(f"the server greeted with {answer!r}")

    def _ask(self, command: Command, reply: Reply) -> Delivery | None:
        # Numbers repeat after 4 billion commands; by then the old ones are answered.
        self._number = self._number % NUMBER_MAX + 1
        try:
            frame = pack(self._number, command)
        except (TypeError, ValueError, OverflowError) as error:
            return reply, InvalidInput(f"{command!r} cannot be sent: {error}")
        if self.state is StreamState.UP and len(frame) > self._frame_bytes:
            return reply, InvalidInput(
                f"{type(command).__name__} has {len(frame)} bytes, the server takes frames of {self._frame_bytes} at "
                "the most; send less at once"
            )
        self._pending[self._number] = reply
        self._send(frame)
        return None

    def _lost(self) -> InturnError:
        return self.refusal if self.refusal is not None else ConnectionLost(self._address, self.why)
