"""The server's end of a stream, without I/O: frames in, commands to the node, answers out.

A body that cannot be decoded is answered with an error. Bytes that are no frame end the stream, since the start of the
next frame is unknown. The memory of a client is bounded: while the client does not take its answers (`pause`), or too
many of its commands are unanswered, the session handles no further frame, and the server reads no further bytes.

The protocols of guards state when a session calls a guard; `inturn.security` has the implementation.
"""

from __future__ import annotations

import math
import ssl
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from inturn.model.batch import (
    DECOMPRESSED_BYTES_MAX,
    HEADER_BYTES_MAX,
    NO_COMPRESSION,
    ZSTD,
    Batch,
    content_bytes,
    payload_checksum,
)
from inturn.model.errors import (
    AuthenticationFailed,
    InturnError,
    InvalidInput,
    ProtocolError,
    QuotaExceeded,
    VersionMismatch,
)
from inturn.model.logs import get_logger
from inturn.model.routing import SLOT_COUNT
from inturn.model.settings import LeaseSettings, Role
from inturn.protocol.codec import VERSIONS, check_names, pack, unpack
from inturn.protocol.commands import (
    Acknowledge,
    Answer,
    Append,
    Command,
    Commit,
    DescribeKey,
    Done,
    Fetch,
    Heartbeat,
    Hello,
    Move,
    Node,
    Ping,
    Pull,
    Read,
    ReadLot,
    Release,
    Renew,
    Reply,
    Welcome,
)
from inturn.protocol.frames import NUMBER_MAX, Frame, FrameReader
from inturn.protocol.request import SessionReply


class GuardProtocol(Protocol):
    """Authenticates clients and authorizes commands. Called in the server's event loop."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For listeners on a network. A new context after a change of the certificates."""
        ...

    def session_guard(
        self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool
    ) -> SessionGuardProtocol:
        """The guard of a new session. `is_local`: the client uses a socket that only the folder's user can open."""
        ...

    def refused(self, address: str, command: str, why: str) -> None:
        """A client was refused before its session began."""
        ...

    def reload(self, *, always: bool = False) -> None:
        """Read changed files again; with `always`, all files."""
        ...


class Meter(Protocol):
    """Counts commands and bytes of a principal. A principal above its rate waits."""

    def take_command(self) -> None: ...

    def take_received(self, size_bytes: int) -> None: ...

    def take_answer(self, size_bytes: int) -> None: ...

    @property
    def bytes_per_s(self) -> float | None:
        """None: no limit."""
        ...

    def wait_s(self) -> float:
        """Time until the principal is within its rate. Until then, no command runs that could add to the excess."""
        ...

    def deaf_s(self) -> float:
        """Time for which no further frame is handled: the principal has sent too much. At most `wait_s`."""
        ...


class SessionGuardProtocol(Protocol):
    """The guard of a session."""

    @property
    def metered(self) -> Meter | None:
        """Set after `greet`; None: no quota."""
        ...

    @property
    def is_valid(self) -> bool:
        """False: the server hangs up."""
        ...

    def greet(self, hello: Hello) -> None:
        """Called once. Raise AuthenticationFailed or QuotaExceeded."""
        ...

    def admitted(self, command: Command, reply: Reply) -> Reply | None:
        """The reply to pass to the node; None if the command was refused and answered."""
        ...

    def gone(self) -> None:
        """The stream is gone."""
        ...


_log = get_logger("inturn.wire")
MIB = 1 << 20
HELLO_BYTES_MAX = 1024
UNWRITTEN_BYTES_MAX = 4 * MIB
_U32_MAX, _I64_MAX = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Limits of clients."""

    frame_bytes: int = 64 * MIB  # of one frame
    pull_bytes: int = 16 * MIB  # of messages in one answer; a single batch may be larger
    unanswered_bytes: int = 128 * MIB  # of commands of one client
    unanswered_count: int = 65_536
    connections: int = 4096
    connections_per_address: int = 2048  # of one host
    silence_s: float = 60.0  # the server hangs up on a client without a frame for this time
    # Before the greeting of a client:
    greeting_s: float = 10.0  # time for the greeting, TLS included
    ungreeted: int = 256  # number of ungreeted clients; above, the oldest of the host with the most is dropped


class ServedNode(Node, Protocol):
    def submit_remote(self, command: Command, reply: Reply) -> None:
        """As `submit`, for a client in another process."""
        ...

    def hung_up(self, session: object) -> None:
        """The stream of a session (see `SessionReply`) is gone: drop the waiting commands; members may be gone."""
        ...


class NumberedReply(SessionReply):
    """Sends the answer in a frame with the number of the command."""

    __slots__ = ("_number", "_size_bytes")

    session: ServerSession

    def __init__(self, session: ServerSession, number: int, size_bytes: int) -> None:
        self.session = session
        self._number = number
        self._size_bytes = size_bytes

    def __call__(self, answer: Answer | InturnError) -> None:
        self.session.answer(self._number, self._size_bytes, answer)


class ServerSession:
    """Called by one thread at a time. Only `answer` may be called by any thread, so any thread may call `send`.

    `send` gets the frames. `hang_up` is called to end the stream after the frames sent so far. The caller checks
    `is_full` after each call, and reads only while the session is not full. `on_error` gets answers that are errors.
    """

    def __init__(
        self,
        node: ServedNode,
        settings: ServerSettings,
        lease: LeaseSettings,
        software: str,
        send: Callable[[bytes], None],
        hang_up: Callable[[], None],
        on_error: Callable[[InturnError], None] | None = None,
        guard: SessionGuardProtocol | None = None,
        role: Role = Role.NODE,
    ) -> None:
        """`guard` None: every client may send every command."""
        self.is_closed = False
        self.is_greeted = False
        self._node = node
        self._settings = settings
        self._lease = lease
        self._software = software
        self._send = send
        self._hang_up = hang_up
        self._on_error = on_error
        self._guard = guard
        self._role = role
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._next_number = 0  # the lowest number not seen yet
        self._is_paused = False
        self._inbox: deque[Frame] = deque()
        self._delayed: deque[tuple[Command, NumberedReply]] = deque()  # by the quota, in order; count as unanswered
        self._answered: deque[int] = deque()  # sizes of answered commands; any thread may append without a lock
        self._unanswered_bytes = 0
        self._unanswered_count = 0
        self._sent: deque[int] = deque()  # the same for the sizes of answers
        self._unwritten_bytes = 0

    @property
    def is_full(self) -> bool:
        answered = self._answered
        while answered:
            self._unanswered_bytes -= answered.popleft()
            self._unanswered_count -= 1
        return (
            self._is_backed_up
            or self._unanswered_bytes > self._settings.unanswered_bytes
            or self._unanswered_count > self._settings.unanswered_count
            or (self._guard is not None and self.deaf_s > 0)
        )

    @property
    def _is_backed_up(self) -> bool:
        """The client does not take its answers."""
        sent = self._sent
        while sent:
            self._unwritten_bytes += sent.popleft()
        # One read may bring thousands of commands with large answers: they do not run all at once.
        return self._is_paused or self._unwritten_bytes > UNWRITTEN_BYTES_MAX

    @property
    def unanswered_count(self) -> int:
        """The number of commands of this client without an answer yet."""
        return self._unanswered_count - len(self._answered)

    @property
    def unwritten_bytes(self) -> int:
        """Bytes of answers that the socket has not taken yet."""
        return self._unwritten_bytes + sum(self._sent)

    @property
    def quota_wait_s(self) -> float:
        """How long commands wait because the quota is used up. Commands that keep leases and commit do not wait."""
        metered = None if self._guard is None else self._guard.metered
        return 0.0 if metered is None else metered.wait_s()

    @property
    def deaf_s(self) -> float:
        """How long no further frame is handled because the client has sent more than its quota."""
        metered = None if self._guard is None else self._guard.metered
        return 0.0 if metered is None else metered.deaf_s()

    @property
    def _answer_bytes_max(self) -> int:
        """The limit of one answer. All unanswered commands share the quota of one second."""
        metered = None if self._guard is None else self._guard.metered
        if metered is None or metered.bytes_per_s is None:
            return self._settings.pull_bytes
        share = int(metered.bytes_per_s / max(1, self.unanswered_count))
        return max(1, min(self._settings.pull_bytes, share))

    @property
    def is_valid(self) -> bool:
        return self._guard is None or self._guard.is_valid

    @property
    def has_waiting(self) -> bool:
        """Frames wait for answers to be taken, or commands wait for the quota."""
        return bool(self._inbox or self._delayed)

    def received(self, data: bytes) -> None:
        if self.is_closed:
            return
        if self._guard is not None and self._guard.metered is not None:
            self._guard.metered.take_received(len(data))
        try:
            frames = self._reader.feed(data)
            if frames and not self.is_greeted:
                frames = self._greet(frames)
            self._inbox.extend(frames)
        except ProtocolError as error:
            self._refuse(0, error)
            return
        self.go_on()

    def go_on(self) -> None:
        """Handle the received frames until the session is full."""
        # Delayed commands count as unanswered: they must not wait until the session is less full.
        while self._delayed and not self._is_backed_up and not self.is_closed and not self.quota_wait_s:
            self._submit(*self._delayed.popleft())
        while self._inbox and not self.is_full and not self.is_closed:
            self._handle(self._inbox.popleft())

    def pause(self, is_paused: bool) -> None:
        """`is_paused`: the client does not take answers as fast as they arrive."""
        self._is_paused = is_paused
        self.go_on()

    def written(self, size_bytes: int) -> None:
        """The socket has taken these bytes. The socket calls `pause` when its buffer is full."""
        self._unwritten_bytes -= size_bytes
        metered = None if self._guard is None else self._guard.metered
        if metered is not None:
            metered.take_answer(size_bytes)

    def keep_alive(self) -> None:
        """Send a frame to a waiting client, so that the client does not drop the silent stream and reconnect."""
        if self.is_greeted and not self.is_closed:
            self._send_frame(pack(0, Done()))  # no command has this number, so the frame answers none

    def lost(self) -> None:
        """The stream is gone."""
        self.is_closed = True
        self._inbox.clear()
        self._delayed.clear()
        if self._guard is not None:
            self._guard.gone()
        self._node.hung_up(self)

    def answer(self, number: int, size_bytes: int, answer: Answer | InturnError) -> None:
        self._answered.append(size_bytes)
        if self.is_closed:
            return
        if self._on_error is not None and isinstance(answer, InturnError):
            self._on_error(answer)
        try:
            frame = pack(number, answer)
        except (TypeError, ValueError, OverflowError) as error:  # a log calls replies in a row: the others must run
            _log.exception("wire.answer_failed", answer=type(answer).__name__)
            frame = pack(number, InturnError(f"the answer cannot be sent: {error}"))
        if len(frame) > self._settings.frame_bytes:
            frame = pack(
                number,
                InvalidInput(
                    f"the answer has {len(frame)} bytes, more than a frame may have ({self._settings.frame_bytes}); "
                    "ask for less at once"
                ),
            )
        self._send_frame(frame)

    def _send_frame(self, frame: bytes) -> None:
        self._sent.append(len(frame))
        self._send(frame)

    def _greet(self, frames: list[Frame]) -> list[Frame]:
        """The first frame is a Hello. Before the greeting, frames have to be small."""
        number = frames[0].number
        hello = unpack(frames[0])
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame is a {type(hello).__name__}, not Hello")
        lowest, highest = hello.versions
        if highest < VERSIONS[0] or lowest > VERSIONS[1]:
            self._refuse(number, VersionMismatch(hello.versions, VERSIONS, self._software))
            return []
        if self._guard is not None:
            try:
                self._guard.greet(hello)
            except (AuthenticationFailed, QuotaExceeded) as error:
                self._refuse(number, error)
                return []
        self.is_greeted = True
        self._next_number = number + 1  # a client continues its numbers from stream to stream
        self._reader.bytes_max = self._settings.frame_bytes
        version = min(highest, VERSIONS[1])
        role = self._role.value
        self._send_frame(pack(number, Welcome(version, self._software, self._settings.frame_bytes, self._lease, role)))
        return frames[1:]

    def _refuse(self, number: int, error: InturnError) -> None:
        _log.warning("wire.hung_up", error=str(error))
        self.is_closed = True
        self._send_frame(pack(number, error))
        self._hang_up()

    def _handle(self, frame: Frame) -> None:
        if self._guard is not None and self._guard.metered is not None:
            self._guard.metered.take_command()  # also if the command is refused
        if (frame.number - self._next_number) % (NUMBER_MAX + 1) > NUMBER_MAX // 2:
            return  # numbers rise and wrap around: this is a second copy of a handled command
        self._next_number = (frame.number + 1) % (NUMBER_MAX + 1)
        size_bytes = len(frame.body)
        self._unanswered_bytes += size_bytes
        self._unanswered_count += 1
        reply = NumberedReply(self, frame.number, size_bytes)
        try:
            command = self._checked(unpack(frame))
        except ProtocolError as error:  # the frame is whole: only this command cannot be decoded
            reply(InvalidInput(error.why))
            return
        except InvalidInput as error:
            reply(error)
            return
        if type(command) is Ping:
            reply(Done())
        elif self._guard is not None and self._waits(command):
            self._delayed.append((command, reply))
        else:
            self._submit(command, reply)

    def _waits(self, command: Command) -> bool:
        """Answers can take a client far above its quota at once. Then commands wait, in order, until the client is
        within the quota. Commands that keep leases and commit do not wait: otherwise leases would expire, and the work
        would be repeated."""
        return type(command) not in _KEEPING and (bool(self._delayed) or self.quota_wait_s > 0)

    def _submit(self, command: Command, reply: NumberedReply) -> None:
        try:
            if self._guard is None:
                self._node.submit_remote(command, reply)
            else:
                self._submit_if_admitted(self._guard, command, reply)
        except Exception as error:  # an error of the node, or a command that no inturn client sends
            _log.exception("wire.command_failed", command=type(command).__name__)
            reply(InturnError(f"{type(command).__name__} failed: {error!r}"))

    def _submit_if_admitted(self, guard: SessionGuardProtocol, command: Command, reply: NumberedReply) -> None:
        admitted = guard.admitted(command, reply)
        if admitted is not None:
            self._node.submit_remote(command, admitted)

    def _checked(self, command: object) -> Command:
        """Validate what inturn clients ensure but other clients may not."""
        check_names(command)
        if type(command) in _UNCHECKED:  # quicker than the checks below
            return command  # type: ignore[return-value]
        if not isinstance(command, Command) or isinstance(command, Hello):
            raise ProtocolError(f"{type(command).__name__} is no command")
        wait_s = getattr(command, "wait_s", 0.0)
        if not 0 <= wait_s < math.inf:
            raise InvalidInput(f"wait_s={wait_s!r}: give a number of seconds, 0 or more")
        if isinstance(command, _SIZED) and command.max_bytes > (bytes_max := self._answer_bytes_max):
            return msgspec.structs.replace(command, max_bytes=bytes_max)
        if isinstance(command, Append | Move):
            _check_batch(command.batch)
        return command


_SIZED = Pull | Read | ReadLot | Fetch | DescribeKey
_KEEPING = frozenset((Heartbeat, Renew, Commit, Acknowledge))
_UNCHECKED = frozenset((Ping, Commit, Renew, Release))


def _check_batch(batch: Batch) -> None:
    """A log stores each batch unchanged: a batch whose numbers do not fit a header, or an empty batch, would damage the
    log. Raise InvalidInput."""
    fits = (
        0 < batch.count <= _U32_MAX
        and batch.compression in (NO_COMPRESSION, ZSTD)
        and 0 <= batch.producer_epoch <= _U32_MAX
        and 0 <= batch.route_version <= _U32_MAX
        and 0 <= batch.producer_id <= _I64_MAX
        and 0 <= batch.first_sequence <= _I64_MAX - batch.count
    )
    if not fits or not _has_count(batch) or payload_checksum(batch.payload) != batch.checksum:
        raise InvalidInput("the batch is damaged: its numbers are absurd, or do not fit its payload")
    # The upper bytes of the slots suffice, and are quicker to check than the slots.
    if max(batch.payload[1 : 2 * batch.count : 2]) >= SLOT_COUNT >> 8:
        raise InvalidInput(f"a slot of the batch is none: slots are 0 to {SLOT_COUNT - 1}; nothing was stored")


def _has_count(batch: Batch) -> bool:
    """Whether the messages after the slot vector are as many as the header states. A compressed payload is not opened,
    but has to state a decompressed size within the limit of readers."""
    body = batch.payload[2 * batch.count : 2 * batch.count + 5]
    if batch.compression == ZSTD:
        size_bytes = content_bytes(batch.payload[2 * batch.count : 2 * batch.count + HEADER_BYTES_MAX])
        return size_bytes is not None and size_bytes <= DECOMPRESSED_BYTES_MAX
    for mark, size in ((b"\xdc", 2), (b"\xdd", 4)):
        if body.startswith(mark):
            return int.from_bytes(body[1 : 1 + size], "big") == batch.count
    return bool(body) and body[0] == 0x90 | batch.count & 0x0F and batch.count < 16
