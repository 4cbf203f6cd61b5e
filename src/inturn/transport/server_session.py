"""What a server asks of a guard, if it has one; `inturn.security` has the one that there is.

The server's end of a stream, without I/O: frames in, commands to the node, answers out.

A body that cannot be understood is answered with an error; bytes that are no frame end the stream, since nobody knows
where the next frame would begin. What a client may make us keep is bounded: while its answers are not taken
(`pause`), or too much of it is unanswered, nothing more of it is looked at, and nothing more is to be read.
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
from inturn.protocol.reply import SessionReply


class Guard(Protocol):
    """Who is let in, and what they may do. Called in the server's event loop."""

    @property
    def tls(self) -> ssl.SSLContext | None:
        """For addresses that are reached over a network; another one when certificates have changed."""
        ...

    def visitor(self, address: str, certificate: Mapping[str, Any] | None, *, is_local: bool) -> Pass:
        """What a new client may do. `is_local`: it came through a socket that only the folder's user can open."""
        ...

    def refused(self, address: str, command: str, why: str) -> None:
        """A client was not let in before it could be a visitor."""
        ...

    def reload(self, *, always: bool = False) -> None:
        """Read again what was changed by its operator, or `always`."""
        ...


class Metered(Protocol):
    """What a principal may do per second. What it used beyond that makes it wait."""

    def take_command(self) -> None: ...

    def take_received(self, size_bytes: int) -> None: ...

    def take_answer(self, size_bytes: int) -> None: ...

    @property
    def bytes_per_s(self) -> float | None:
        """None: as many as it likes."""
        ...

    def wait_s(self) -> float:
        """Until it is within its rate: so long nothing is done for it that could bring it further beyond."""
        ...

    def deaf_s(self) -> float:
        """Of that, how long nothing more of it is looked at: it has sent too much itself. Never more than `wait_s`."""
        ...


class Pass(Protocol):
    """What one client may do, as a guard sees it."""

    @property
    def metered(self) -> Metered | None:
        """Known after `greet`; None: nothing is counted."""
        ...

    @property
    def is_valid(self) -> bool:
        """False: it is to be hung up on."""
        ...

    def greet(self, hello: Hello) -> None:
        """Called once. Raises AuthenticationFailed or QuotaExceeded."""
        ...

    def admitted(self, command: Command, reply: Reply) -> Reply | None:
        """The reply to hand to the node; None if the command was refused, and answered."""
        ...

    def gone(self) -> None:
        """The stream is."""
        ...


_log = get_logger("inturn.wire")
MIB = 1 << 20
HELLO_BYTES_MAX = 1024
UNWRITTEN_BYTES_MAX = 4 * MIB
_U32_MAX, _I64_MAX = 2**32 - 1, 2**63 - 1


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What clients may ask of a server."""

    frame_bytes: int = 64 * MIB  # of one frame
    pull_bytes: int = 16 * MIB  # of what one answer brings of messages; a single batch may be larger
    unanswered_bytes: int = 128 * MIB  # of commands of one client
    unanswered_count: int = 65_536
    connections: int = 4096
    connections_per_address: int = 2048  # of one host
    silence_s: float = 60.0  # a client that says nothing for so long is hung up on
    # Before a client has said who it is:
    greeting_s: float = 10.0  # how long it may take, TLS included
    ungreeted: int = 256  # how many there may be; then the oldest of the host with the most is hung up on


class ServedNode(Node, Protocol):
    def submit_remote(self, command: Command, reply: Reply) -> None:
        """As `submit`, for somebody in another process."""
        ...

    def hung_up(self, session: object) -> None:
        """Answers to a session (see `SessionReply`) are of no use any more, and its members may be gone."""
        ...


class NumberedReply(SessionReply):
    """Sends the answer in a frame with the number of the command."""

    __slots__ = ("_number", "_size_bytes")

    session: Session

    def __init__(self, session: Session, number: int, size_bytes: int) -> None:
        self.session = session
        self._number = number
        self._size_bytes = size_bytes

    def __call__(self, answer: Answer | InturnError) -> None:
        self.session.answer(self._number, self._size_bytes, answer)


class Session:
    """Called by one thread at a time, but for `answer`, which any thread may call, as `send` may be then.

    `send` gets the frames, `hang_up` is called when the stream is to be ended after what was sent; `full` says whether
    reading is to stop, and is to be looked at after each call. `on_error` is told of answers that are errors.
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
        visitor: Pass | None = None,
        role: Role = Role.NODE,
    ) -> None:
        """`visitor` None: whoever comes may do everything."""
        self.is_closed = False
        self.is_greeted = False
        self._node = node
        self._settings = settings
        self._lease = lease
        self._software = software
        self._send = send
        self._hang_up = hang_up
        self._on_error = on_error
        self._pass = visitor
        self._role = role
        self._reader = FrameReader(HELLO_BYTES_MAX)
        self._next_number = 0  # the lowest number that was not seen yet
        self._is_paused = False
        self._inbox: deque[Frame] = deque()
        self._aside: deque[tuple[Command, NumberedReply]] = deque()  # in their order; they count as unanswered
        self._answered: deque[int] = deque()  # sizes; any thread may add to it without a lock
        self._unanswered_bytes = 0
        self._unanswered_count = 0
        self._given: deque[int] = deque()  # the same for the sizes of answers
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
            or (self._pass is not None and self.deaf_s > 0)
        )

    @property
    def _is_backed_up(self) -> bool:
        """Answers are not taken."""
        given = self._given
        while given:
            self._unwritten_bytes += given.popleft()
        # One read can bring thousands of commands, each with a large answer: not even those are done all at once.
        return self._is_paused or self._unwritten_bytes > UNWRITTEN_BYTES_MAX

    @property
    def unanswered_count(self) -> int:
        """Commands of this client that wait for their answers."""
        return self._unanswered_count - len(self._answered)

    @property
    def unwritten_bytes(self) -> int:
        """Of answers that are not with the socket yet."""
        return self._unwritten_bytes + sum(self._given)

    @property
    def quota_wait_s(self) -> float:
        """How long commands wait, but for those that keep what the client has, since its quota is used up."""
        metered = None if self._pass is None else self._pass.metered
        return 0.0 if metered is None else metered.wait_s()

    @property
    def deaf_s(self) -> float:
        """How long nothing more is looked at, since the client itself has sent more than it may per second."""
        metered = None if self._pass is None else self._pass.metered
        return 0.0 if metered is None else metered.deaf_s()

    @property
    def _answer_bytes_max(self) -> int:
        """Of one answer. All that are on their way share what the client may have in a second."""
        metered = None if self._pass is None else self._pass.metered
        if metered is None or metered.bytes_per_s is None:
            return self._settings.pull_bytes
        share = int(metered.bytes_per_s / max(1, self.unanswered_count))
        return max(1, min(self._settings.pull_bytes, share))

    @property
    def is_valid(self) -> bool:
        return self._pass is None or self._pass.is_valid

    @property
    def has_waiting(self) -> bool:
        """Something has come that was not looked at, for want of room, or that waits for the quota."""
        return bool(self._inbox or self._aside)

    def received(self, data: bytes) -> None:
        if self.is_closed:
            return
        if self._pass is not None and self._pass.metered is not None:
            self._pass.metered.take_received(len(data))
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
        """Look at what has come, as far as there is room for it."""
        # What is aside is unanswered: it must not wait for room that only it can make.
        while self._aside and not self._is_backed_up and not self.is_closed and not self.quota_wait_s:
            self._submit(*self._aside.popleft())
        while self._inbox and not self.is_full and not self.is_closed:
            self._handle(self._inbox.popleft())

    def pause(self, is_paused: bool) -> None:
        """Answers are not taken by the client as fast as they come, or are again."""
        self._is_paused = is_paused
        self.go_on()

    def written(self, size_bytes: int) -> None:
        """So much of what was sent is with the socket now, which tells by `pause` when it has too much."""
        self._unwritten_bytes -= size_bytes
        metered = None if self._pass is None else self._pass.metered
        if metered is not None:
            metered.take_answer(size_bytes)

    def keep_alive(self) -> None:
        """Tell a client that has to wait that somebody is there: else it would give the stream up, and come again."""
        if self.is_greeted and not self.is_closed:
            self._give(pack(0, Done()))  # no command has this number, so it answers none

    def lost(self) -> None:
        """The stream is gone."""
        self.is_closed = True
        self._inbox.clear()
        self._aside.clear()
        if self._pass is not None:
            self._pass.gone()
        self._node.hung_up(self)

    def answer(self, number: int, size_bytes: int, answer: Answer | InturnError) -> None:
        self._answered.append(size_bytes)
        if self.is_closed:
            return
        if self._on_error is not None and isinstance(answer, InturnError):
            self._on_error(answer)
        try:
            frame = pack(number, answer)
        except (TypeError, ValueError, OverflowError) as error:  # nobody else may suffer: logs answer in a row
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
        self._give(frame)

    def _give(self, frame: bytes) -> None:
        self._given.append(len(frame))
        self._send(frame)

    def _greet(self, frames: list[Frame]) -> list[Frame]:
        """The first frame is a Hello. Until we know whom we talk to, frames have to be small."""
        number = frames[0].number
        hello = unpack(frames[0])
        if not isinstance(hello, Hello):
            raise ProtocolError(f"the first frame is a {type(hello).__name__}, not Hello")
        lowest, highest = hello.versions
        if highest < VERSIONS[0] or lowest > VERSIONS[1]:
            self._refuse(number, VersionMismatch(hello.versions, VERSIONS, self._software))
            return []
        if self._pass is not None:
            try:
                self._pass.greet(hello)
            except (AuthenticationFailed, QuotaExceeded) as error:
                self._refuse(number, error)
                return []
        self.is_greeted = True
        self._next_number = number + 1  # a client goes on counting from stream to stream
        self._reader.bytes_max = self._settings.frame_bytes
        version = min(highest, VERSIONS[1])
        role = self._role.value
        self._give(pack(number, Welcome(version, self._software, self._settings.frame_bytes, self._lease, role)))
        return frames[1:]

    def _refuse(self, number: int, error: InturnError) -> None:
        _log.warning("wire.hung_up", error=str(error))
        self.is_closed = True
        self._give(pack(number, error))
        self._hang_up()

    def _handle(self, frame: Frame) -> None:
        if self._pass is not None and self._pass.metered is not None:
            self._pass.metered.take_command()  # whatever becomes of it
        if (frame.number - self._next_number) % (NUMBER_MAX + 1) > NUMBER_MAX // 2:
            return  # numbers count up, round and round: this is a second copy of what was done already
        self._next_number = (frame.number + 1) % (NUMBER_MAX + 1)
        size_bytes = len(frame.body)
        self._unanswered_bytes += size_bytes
        self._unanswered_count += 1
        reply = NumberedReply(self, frame.number, size_bytes)
        try:
            command = self._checked(unpack(frame))
        except ProtocolError as error:  # the frame is whole: only this command cannot be understood
            reply(InvalidInput(error.why))
            return
        except InvalidInput as error:
            reply(error)
            return
        if type(command) is Ping:
            reply(Done())
        elif self._pass is not None and self._waits(command):
            self._aside.append((command, reply))
        else:
            self._submit(command, reply)

    def _waits(self, command: Command) -> bool:
        """Answers can take a client far beyond its quota, all at once. Whatever could bring more waits until that is
        paid, in its order. What keeps leases and commits work does not: else they were lost, and all was done again."""
        return type(command) not in _KEEPING and (bool(self._aside) or self.quota_wait_s > 0)

    def _submit(self, command: Command, reply: NumberedReply) -> None:
        try:
            if self._pass is None:
                self._node.submit_remote(command, reply)
            else:
                self._submit_if_admitted(self._pass, command, reply)
        except Exception as error:  # of ours, or made by a command that no client of ours would send
            _log.exception("wire.command_failed", command=type(command).__name__)
            reply(InturnError(f"{type(command).__name__} failed: {error!r}"))

    def _submit_if_admitted(self, visitor: Pass, command: Command, reply: NumberedReply) -> None:
        admitted = visitor.admitted(command, reply)
        if admitted is not None:
            self._node.submit_remote(command, admitted)

    def _checked(self, command: object) -> Command:
        """What our own clients take care of, nobody else has to."""
        check_names(command)
        if type(command) in _UNCHECKED:  # which is quicker than to ask for everything else
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
    """A log stores what it gets: what does not fit into a header, or says that it has no messages, would damage it."""
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
    # The upper bytes of the slots tell, which is quicker than to look at the slots themselves.
    if max(batch.payload[1 : 2 * batch.count : 2]) >= SLOT_COUNT >> 8:
        raise InvalidInput(f"a slot of the batch is none: slots are 0 to {SLOT_COUNT - 1}; nothing was stored")


def _has_count(batch: Batch) -> bool:
    """Whether the messages behind the slot vector say that they are as many; what is compressed cannot be asked, but it
    has to say its size, and one that readers take."""
    body = batch.payload[2 * batch.count : 2 * batch.count + 5]
    if batch.compression == ZSTD:
        size_bytes = content_bytes(batch.payload[2 * batch.count : 2 * batch.count + HEADER_BYTES_MAX])
        return size_bytes is not None and size_bytes <= DECOMPRESSED_BYTES_MAX
    for mark, size in ((b"\xdc", 2), (b"\xdd", 4)):
        if body.startswith(mark):
            return int.from_bytes(body[1 : 1 + size], "big") == batch.count
    return bool(body) and body[0] == 0x90 | batch.count & 0x0F and batch.count < 16
