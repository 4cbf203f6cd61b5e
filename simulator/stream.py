"""A stream between a client and the node: bytes arrive in order, late, and in different pieces than written.

A stream may be cut at any moment, also in the middle of a frame, and an end may notice or not. A blocked network loses
no bytes: written bytes arrive later, even if the writer is gone by then.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from simulator.world import World


@dataclass(slots=True)
class Weather:
    """What all streams have to endure at the moment. Shares are of the frames."""

    delay_s_max: float = 0.003
    split: float = 0.02  # arrive in two pieces
    duplicate: float = 0.0  # arrive twice, as from a proxy that sends again

    def clear(self) -> None:
        self.delay_s_max, self.split, self.duplicate = 0.003, 0.02, 0.0


class SimPipe:
    """One direction. `arrived` gets the bytes; `ended` is called once if the reader notices the end."""

    def __init__(
        self,
        world: World,
        weather: Weather,
        coverage: Counter[str],
        arrived: Callable[[bytes], None],
        ended: Callable[[], None],
    ) -> None:
        self._world = world
        self._weather = weather
        self._coverage = coverage
        self._arrived = arrived
        self._ended = ended
        self._chunks: deque[tuple[float, bytes | None]] = deque()  # with the time of arrival; None is the end
        self._until_s = 0.0
        self._is_scheduled = False
        self._is_blocked = False
        self._is_open = True
        self._flips = False
        self._room_bytes: int | None = None  # so much is carried yet, then `_on_cut` is called
        self._on_cut: Callable[[], None] | None = None

    def write(self, frame: bytes) -> None:
        self._put(frame)
        if self._weather.duplicate and self._world.happens(self._weather.duplicate):
            self._coverage["stream.frame twice"] += 1
            self._world.after(self._world.spread(0.0, 0.5), lambda: self._put(frame))

    def close(self) -> None:
        """The writer closes: the reader notices the end after the bytes on their way."""
        if self._is_open:
            self._is_open = False
            self._add(None)

    def break_off(self, *, tells: bool) -> None:
        """The bytes on their way are lost. With `tells` the reader notices the end."""
        self._is_open = False
        self._chunks.clear()
        if tells:
            self._add(None)

    def leave_open(self) -> None:
        """The writer is gone; the bytes on their way arrive, but no end."""
        self._is_open = False

    def cut_after(self, size_bytes: int, on_cut: Callable[[], None]) -> None:
        """Carry this number of bytes, then call `on_cut` when the last byte has arrived."""
        self._room_bytes, self._on_cut = size_bytes, on_cut

    def flip_a_byte(self) -> None:
        """Of what arrives next."""
        self._flips = True

    def block(self, is_blocked: bool) -> None:
        """Block the pipe. Bytes written meanwhile arrive at the end of the block."""
        self._is_blocked = is_blocked
        self._schedule()

    def _put(self, data: bytes) -> None:
        if not self._is_open:
            return
        if self._room_bytes is not None:
            if len(data) > self._room_bytes:
                self._coverage["stream.cut in the middle of a frame"] += bool(self._room_bytes)
                self._add(data[: self._room_bytes])
                self._is_open = False
                return
            self._room_bytes -= len(data)
        if self._world.happens(self._weather.split):
            self._coverage["stream.frame in pieces"] += 1
            place = self._world.rng.randrange(1, len(data))
            self._add(data[:place])
            data = data[place:]
        self._add(data)

    def _add(self, data: bytes | None) -> None:
        at_s = self._world.now_s + self._world.spread(0.0002, self._weather.delay_s_max)
        self._until_s = max(self._until_s, at_s)
        self._chunks.append((self._until_s, data))
        self._schedule()

    def _schedule(self) -> None:
        if self._chunks and not self._is_scheduled and not self._is_blocked:
            self._is_scheduled = True
            self._world.after(max(0.0, self._chunks[0][0] - self._world.now_s), self._arrive)

    def _arrive(self) -> None:
        """Deliver all due bytes at once."""
        self._is_scheduled = False
        if self._is_blocked or not self._chunks:
            return
        data = bytearray()
        ends = False
        due_s = max(self._world.now_s, self._chunks[0][0])
        while self._chunks and self._chunks[0][0] <= due_s:
            chunk = self._chunks.popleft()[1]
            if chunk is None:
                ends = True
            else:
                data += chunk
        if data and self._flips:
            self._flips = False
            self._flip_a_bit_of(data)
        if data:
            self._arrived(bytes(data))
        if ends:
            self._ended()
        if self._on_cut is not None and not self._is_open and not self._chunks:
            on_cut, self._on_cut = self._on_cut, None
            on_cut()
        self._schedule()

    def _flip_a_bit_of(self, data: bytearray) -> None:
        """Often of a length, which most of what arrives begins with."""
        self._coverage["stream.byte flipped"] += 1
        rng = self._world.rng
        size_bytes = min(4, len(data)) if rng.random() < 0.5 else len(data)
        data[rng.randrange(size_bytes)] ^= 1 << rng.randrange(8)


class SimStream:
    """Two pipes. An end may be gone, and the other end may notice or not."""

    def __init__(self, to_node: SimPipe, to_client: SimPipe) -> None:
        self.to_node = to_node
        self.to_client = to_client
        self.is_damaged = False  # an end may read damaged bytes
        self.is_left = False  # by the client; the client may be back on a new stream

    def damage(self, pipe: SimPipe) -> None:
        self.is_damaged = True
        pipe.flip_a_byte()

    def cut(self, *, node_learns: bool, client_learns: bool) -> None:
        """The network breaks the stream; the bytes on their way are lost."""
        self.to_node.break_off(tells=node_learns)
        self.to_client.break_off(tells=client_learns)

    def closed_by_client(self, *, resets: bool) -> None:
        """The client reads no more. Written bytes arrive, unless the client resets the stream."""
        self.is_left = True
        self.to_client.break_off(tells=False)
        if resets:
            self.to_node.break_off(tells=True)
        else:
            self.to_node.close()

    def closed_by_node(self, *, resets: bool) -> None:
        self.to_node.break_off(tells=False)
        if resets:
            self.to_client.break_off(tells=True)
        else:
            self.to_client.close()

    def left_by_client(self) -> None:
        """The machine of the writer is gone, without an end of the stream."""
        self.is_left = True
        self.to_client.break_off(tells=False)
        self.to_node.leave_open()

    def left_by_node(self) -> None:
        self.to_node.break_off(tells=False)
        self.to_client.leave_open()
