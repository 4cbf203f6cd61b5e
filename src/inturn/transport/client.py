"""The client: a socket, a thread and a lock around `Link`. It looks like a node to producers and consumers.

Whoever submits a command sends it, if the socket takes it at once; the thread reads answers, sends what was left over,
and connects again when the stream is lost.
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
    Delivery,
    Link,
    LinkSettings,
    LinkState,
    NotLetIn,
    TlsStream,
    deliver,
    hung_up_text,
)

_log = get_logger("inturn.wire")
READ_BYTES = 256 * 1024
MANY = 64  # unanswered: then nobody waits for a single one, and those that come are sent together


class RemoteNode:
    """`dial` gives a connected socket, raises OSError, or returns None when there is nothing to be connected to any
    more: then this is over. It is called from the client's own thread. `tls` with the name of the server (or what gives
    it, after each dial): each stream begins with a TLS handshake. What is submitted before the first try is over waits
    for it."""

    def __init__(
        self,
        dial: Callable[[float], socket.socket | None],
        address: str,
        software: str,
        clock: Clock,
        settings: LinkSettings | None = None,
        token: str = "",
        tls: tuple[ssl.SSLContext, str] | Callable[[], tuple[ssl.SSLContext, str] | None] | None = None,
    ) -> None:
        self._dial = dial
        self._tls_settings = tls
        self._tls: TlsStream | None = None
        self._address = address
        self._clock = clock
        self._settings = settings if settings is not None else LinkSettings()
        self._link = Link(address, software, self._settings, random.Random(), self._send, token)
        self._lock = threading.Lock()
        self._tried = threading.Condition(self._lock)
        self._tries = 0
        self._early: list[tuple[Command, Reply]] = []  # submitted before anybody could know whether the server is there
        self._out: list[bytes] = []  # frames
        self._rest = b""  # bytes that the socket did not take
        self._socket: socket.socket | None = None
        self._is_closed = False
        self._is_over = False  # there is nothing to be connected to any more
        self._has_pipe = True
        self._wake_in, self._wake_out = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name=f"inturn-client-{address}", daemon=True)
        self._thread.start()

    @property
    def lease(self) -> LeaseSettings | None:
        """As the server told; None before it was first reached."""
        return self._link.lease

    @property
    def role(self) -> Role:
        """What the server is, as it told."""
        return self._link.role

    @property
    def is_refused(self) -> bool:
        """The server did not let us in; this is over."""
        return self._link.refusal is not None

    def wait_until_up(self, timeout_s: float) -> None:
        """Return when the server has answered. Raises what is in the way: after the first try, or `timeout_s` later."""
        until_s = self._clock.monotonic() + timeout_s
        with self._tried:
            while self._link.state is not LinkState.UP and not self._is_over:
                if self._link.refusal is not None:
                    raise self._link.refusal
                left_s = until_s - self._clock.monotonic()
                if self._is_closed:
                    raise Closed("connection")
                if self._tries and left_s <= 0:
                    raise ConnectionLost(self._address, self._link.why)
                self._tried.wait(left_s if self._tries else None)

    def submit(self, command: Command, reply: Reply) -> None:
        """See `inturn.protocol.commands.Node`."""
        with self._lock:
            if not self._tries and not self._is_ended and self._link.state in (LinkState.DOWN, LinkState.GREETING):
                self._early.append((command, reply))
                return
            instead = (reply, Closed("connection")) if self._is_closed else self._link.submit(command, reply)
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
        """In a forked child: the thread is not here, and the socket is the parent's."""
        self._lock = threading.Lock()
        self._is_closed = True
        self._close_pipe()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _close_pipe(self) -> None:
        """Once: then the numbers may be somebody else's."""
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
            while not self._is_ended and self._link.refusal is None:
                why = self._connect_and_talk()
                with self._tried:
                    deliveries = self._link.lost(why, self._clock.monotonic())
                    self._out.clear()
                    self._rest = b""
                    self._tries += 1
                    deliveries += self._submit_early()
                    self._tried.notify_all()
                deliver(deliveries)
                if not self._is_ended:
                    _log.info("wire.lost", address=self._address, why=why)
                    self._sleep_until(self._link.retry_at_s)
            with self._lock:
                early = self._submit_early()  # it was closed before it could be tried
            deliver(early)
        except BaseException:  # a thread that dies in silence would be waited for
            _log.exception("wire.failed", address=self._address)
            with self._tried:
                self._is_closed = True
                deliveries = self._link.lost("the client failed", self._clock.monotonic())
                deliveries += self._submit_early()
                self._tried.notify_all()
            deliver([(reply, Closed("connection")) for reply, _ in deliveries])

    def _connect_and_talk(self) -> str:
        """Returns why that is over."""
        try:
            dialed = self._dial(self._settings.dial_timeout_s)
        except UnicodeError as error:  # a host that cannot be one
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
            self._link.opened(self._clock.monotonic())

    def _talk(self, dialed: socket.socket) -> str:
        poll = select.poll()
        poll.register(self._wake_in, select.POLLIN)
        poll.register(dialed, select.POLLIN)
        number = dialed.fileno()
        is_up = False
        while not self._is_closed:
            now_s = self._clock.monotonic()
            with self._lock:
                wait_s = self._link.next_due_s() - now_s
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
                        deliveries = self._link.received(data, self._clock.monotonic())
                        if not is_up and self._link.state is LinkState.UP:
                            is_up = True
                            deliveries += self._submit_early()
                            self._tried.notify_all()
                    deliver(deliveries)
                    if self._link.refusal is not None:
                        return str(self._link.refusal)
                    if self._tls is not None and self._tls.is_ended:
                        return self._hung_up()
            # By the time before the look: whoever was frozen since then has not read yet what came meanwhile.
            with self._lock:
                if self._link.is_silent(now_s):
                    return f"no answer for {self._settings.silence_s:g} s"
        return "the connection is closed"

    def _submit_early(self) -> list[Delivery]:
        """What waited for the first try; under the lock. Returns what cannot be sent."""
        early, self._early = self._early, []
        instead = [self._link.submit(command, reply) for command, reply in early]
        return [one for one in instead if one is not None]

    def _hung_up(self) -> str:
        if self._link.refusal is not None:
            return str(self._link.refusal)
        return hung_up_text(self._link.state, self._address)

    def _unseal(self, tls: TlsStream, data: bytes) -> bytes:
        said = tls.unseal(data)
        to_send = tls.to_send()
        if to_send:  # TLS has its own business, now and then
            self._rest += to_send
            self._wake()
        return said

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
        if self._out or self._rest or self._link.unanswered_count > MANY:
            self._out.append(frame)
            if len(self._out) == 1:
                self._wake()
            return
        self._put(frame)
        if self._rest:
            self._wake()

    def _write_rest(self, dialed: socket.socket) -> bool:
        """Whether everything is sent."""
        with self._lock:
            if self._rest:
                self._rest = self._rest[self._send_some(self._rest) :]
            if self._out and not self._rest:
                data = b"".join(self._out)
                self._out.clear()
                self._put(data)
            return not self._rest

    def _put(self, data: bytes) -> None:
        """Nothing may be left over from before."""
        if self._tls is not None:
            data = self._tls.seal(data)
        self._rest = data[self._send_some(data) :]

    def _send_some(self, data: bytes) -> int:
        """How much the socket took."""
        if self._socket is None:
            return 0
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)  # it is lost, as the thread will see

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is awake
            os.write(self._wake_out, b"\0")

    def __repr__(self) -> str:
        return f"RemoteNode({self._address!r})"
