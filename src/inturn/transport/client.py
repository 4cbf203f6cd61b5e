"""A remote node for threads: a socket, a thread and a lock around `ClientStream`.

The caller of `submit` sends the command if the socket takes the frame at once. The thread reads answers, sends the
remaining bytes, and reconnects when the stream is lost.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import socket
import ssl
import threading
from collections.abc import Callable

from inturn.model.errors import Closed, ConnectionLost, ProtocolError
from inturn.model.logs import get_logger
from inturn.model.settings import LeaseSettings, Role
from inturn.model.time import Clock
from inturn.protocol.commands import Command, Reply
from inturn.transport.client_stream import (
    ClientStream,
    Delivery,
    NotLetIn,
    StreamSettings,
    StreamState,
    TlsStream,
    deliver,
    hung_up_text,
)

_log = get_logger("inturn.wire")
READ_BYTES = 256 * 1024
MANY = 64  # unanswered commands: above, latency matters less, and the thread sends new frames together


class RemoteNode:
    """See `inturn.protocol.commands.Node`. Any thread may call.

    `dial` returns a connected socket, raises OSError, or returns None when the server is gone for good: then the node
    ends. `dial` is called in the client's own thread. `tls` is a context with the name of the server, or a function
    that returns both after each dial: each stream then begins with a TLS handshake. Commands that are submitted before
    the end of the first try wait for that end.
    """

    def __init__(
        self,
        dial: Callable[[float], socket.socket | None],
        address: str,
        software: str,
        clock: Clock,
        settings: StreamSettings | None = None,
        token: str = "",
        tls: tuple[ssl.SSLContext, str] | Callable[[], tuple[ssl.SSLContext, str] | None] | None = None,
    ) -> None:
        self._dial = dial
        self._tls_settings = tls
        self._tls: TlsStream | None = None
        self._address = address
        self._clock = clock
        self._settings = settings if settings is not None else StreamSettings()
        self._stream = ClientStream(address, software, self._settings, random.Random(), self._send, token)
        self._lock = threading.Lock()
        self._tried = threading.Condition(self._lock)
        self._tries = 0
        self._early: list[tuple[Command, Reply]] = []  # submitted before the end of the first try
        self._out: list[bytes] = []  # frames
        self._rest = b""  # bytes that the socket has not taken
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._is_over = False  # the server is gone for good
        self._has_pipe = True
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"inturn-client-{address}", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> LeaseSettings | None:
        """The lease settings of the server; None before the first greeting."""
        return self._stream.lease

    @property
    def role(self) -> Role:
        """The role of the server."""
        return self._stream.role

    @property
    def is_refused(self) -> bool:
        """The server refused the client; the node has ended."""
        return self._stream.refusal is not None

    def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server has greeted. Otherwise raise the error after the first try, or after `timeout_s`."""
        until_s = self._clock.monotonic() + timeout_s
        with self._tried:
            while self._stream.state is not StreamState.UP and not self._is_over:
                if self._stream.refusal is not None:
                    raise self._stream.refusal
                left_s = until_s - self._clock.monotonic()
                if self._is_closed:
                    raise Closed("connection")
                if self._tries and left_s <= 0:
                    raise ConnectionLost(self._address, self._stream.why)
                self._tried.wait(left_s if self._tries else None)

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        with self._lock:
            if (
                not self._tries
                and not self._is_ended
                and self._stream.state in (StreamState.DOWN, StreamState.GREETING)
            ):
                self._early.append((command, reply))
                return
            instead = (reply, Closed("connection")) if self._is_closed else self._stream.submit(command, reply)
        if instead is not None:
            reply(instead[1])

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            if self._has_pipe:
                self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        with self._lock:
            self._close_pipe()

    def disown(self) -> None:
        """In a forked child: the thread does not run here, and the socket is the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        self._close_pipe()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _close_pipe(self) -> None:
        """Close once: later, other files may have the numbers."""
        if self._has_pipe:
            self._has_pipe = False
            os.close(self._wake_in)
            os.close(self._wake_out)

    # The thread

    @property
    def _is_ended(self) -> bool:
        return self._is_closed or self._is_over

    def _run(self) -> None:
        try:
            while not self._is_ended and self._stream.refusal is None:
                why = self._connect_and_talk()
                with self._tried:
                    deliveries = self._stream.lost(why, self._clock.monotonic())
                    self._out.clear()
                    self._rest = b""
                    self._tries += 1
                    deliveries += self._submit_early()
                    self._tried.notify_all()
                deliver(deliveries)
                if not self._is_ended:
                    _log.info("wire.lost", address=self._address, why=why)
                    self._sleep_until(self._stream.retry_at_s)
            with self._lock:
                early = self._submit_early()  # closed before the first try
            deliver(early)
        except BaseException:  # callers would wait forever for a dead thread
            _log.exception("wire.failed", address=self._address)
            with self._tried:
                self._is_closed = True
                deliveries = self._stream.lost("the client failed", self._clock.monotonic())
                deliveries += self._submit_early()
                self._tried.notify_all()
            deliver([(reply, Closed("connection")) for reply, _ in deliveries])

    def _connect_and_talk(self) -> str:
        """Returns why the stream ended."""
        try:
            dialed = self._dial(self._settings.dial_timeout_s)
        except UnicodeError as error:  # an invalid host name
            return str(error)
        except OSError as error:
            return error.strerror or str(error)
        if dialed is None:
            self._is_over = True
            return "there is nothing to be connected to any more"
        with dialed:
            try:
                self._begin(dialed)
                return self._talk(dialed)
            except OSError as error:
                return error.strerror or str(error)
            except ProtocolError as error:
                _log.warning("wire.protocol_error", address=self._address, error=str(error))
                return error.why
            except NotLetIn as error:
                _log.warning("wire.not_let_in", address=self._address, error=str(error))
                return error.why
            finally:
                with self._lock:
                    self._socket = None

    def _begin(self, dialed: socket.socket) -> None:
        tls = None
        settings = self._tls_settings() if callable(self._tls_settings) else self._tls_settings
        if settings is not None:
            tls = TlsStream(*settings)
            tls.shake_hands(dialed)
        dialed.setblocking(False)
        with self._lock:
            self._tls = tls
            self._socket = dialed
            self._stream.opened(self._clock.monotonic())

    def _talk(self, dialed: socket.socket) -> str:
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        poll.register(dialed, select.POLLIN)
        number = dialed.fileno()
        is_up = False
        while not self._is_closed:
            now_s = self._clock.monotonic()
            with self._lock:
                wait_s = self._stream.next_due_s() - now_s
            for ready, event in poll.poll(max(0.0, wait_s) * 1000 + 1):
                if ready != number:
                    os.read(self._wake_in, 4096)
                if ready != number or event & select.POLLOUT:
                    is_written = self._write_rest(dialed)
                    poll.modify(dialed, select.POLLIN if is_written else select.POLLIN | select.POLLOUT)
                if ready == number and event & ~select.POLLOUT:
                    data = dialed.recv(READ_BYTES)
                    if not data:
                        return self._hung_up()
                    with self._lock:
                        if self._tls is not None:
                            data = self._unseal(self._tls, data)
                        deliveries = self._stream.received(data, self._clock.monotonic())
                        if not is_up and self._stream.state is StreamState.UP:
                            is_up = True
                            deliveries += self._submit_early()
                            self._tried.notify_all()
                    deliver(deliveries)
                    if self._stream.refusal is not None:
                        return str(self._stream.refusal)
                    if self._tls is not None and self._tls.is_ended:
                        return self._hung_up()
            # By the time before the poll: after a freeze of this process, received bytes are not read yet.
            with self._lock:
                if self._stream.is_silent(now_s):
                    return f"no answer for {self._settings.silence_s:g} s"
        return "the connection is closed"

    def _submit_early(self) -> list[Delivery]:
        """Submit the commands that waited for the first try. Call under the lock. Returns unsent commands' replies."""
        early, self._early = self._early, []
        instead = [self._stream.submit(command, reply) for command, reply in early]
        return [one for one in instead if one is not None]

    def _hung_up(self) -> str:
        if self._stream.refusal is not None:
            return str(self._stream.refusal)
        return hung_up_text(self._stream.state, self._address)

    def _unseal(self, tls: TlsStream, data: bytes) -> bytes:
        decrypted = tls.unseal(data)
        to_send = tls.to_send()
        if to_send:  # TLS sends messages of its own
            self._rest += to_send
            self._wake()
        return decrypted

    def _sleep_until(self, at_s: float) -> None:
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        while not self._is_closed:
            left_s = at_s - self._clock.monotonic()
            if left_s <= 0:
                return
            if poll.poll(left_s * 1000 + 1):
                os.read(self._wake_in, 4096)

    # Sending, under the lock

    def _send(self, frame: bytes) -> None:
        if self._out or self._rest or self._stream.unanswered_count > MANY:
            self._out.append(frame)
            if len(self._out) == 1:
                self._wake()
            return
        self._put(frame)
        if self._rest:
            self._wake()

    def _write_rest(self, dialed: socket.socket) -> bool:
        """Whether all bytes are sent."""
        with self._lock:
            if self._rest:
                self._rest = self._rest[self._send_some(self._rest) :]
            if self._out and not self._rest:
                data = b"".join(self._out)
                self._out.clear()
                self._put(data)
            return not self._rest

    def _put(self, data: bytes) -> None:
        """Only without remaining bytes."""
        if self._tls is not None:
            data = self._tls.seal(data)
        self._rest = data[self._send_some(data) :]

    def _send_some(self, data: bytes) -> int:
        """The number of bytes that the socket took."""
        if self._socket is None:
            return 0
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # the stream is lost, as the thread will find

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # the thread is awake
            os.write(self._wake_out, b"\0")

    def __repr__(self) -> str:
        return f"RemoteNode({self._address!r})"
