"""A proxy on loopback between clients and a server that acts as a bad network on their streams.

    with Proxies() as proxies:
        proxy = proxies.add(server_port, seed=7)
        ...  # clients connect to proxy.port
        proxy.set(Behaviour(piece_bytes=3), Behaviour(delay_s=0.05))
        proxy.cut()

A network loses bytes of a stream only together with the stream. A stream with dropped or changed bytes never recovers:
the stream stays damaged until a cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Self, TypeVar

HOST = "127.0.0.1"
READ_BYTES = 64 * 1024
CHUNKS_MAX = 1000  # that wait to be passed on
_LENGTH = struct.Struct("<I")
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends a reset only
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The behaviour of one direction of all streams. The default passes bytes on unchanged."""

    delay_s: float = 0.0
    piece_bytes: int = 0  # above 0: written in pieces of 1 to so many bytes
    duplicate_share: float = 0.0  # of the frames: sent twice
    is_held: bool = False  # bytes are held, and delivered later
    is_dropped: bool = False  # bytes are lost
    garble_share: float = 0.0  # share of the frames with a wrong bit


HEALTHY = Behaviour()


class FrameCutter:
    """Splits a stream into frames; see `inturn.protocol.frames`."""

    def __init__(self) -> None:
        self.rest = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        self.rest += data
        while len(self.rest) >= _LENGTH.size:
            size = _LENGTH.size + _LENGTH.unpack_from(self.rest)[0]
            if len(self.rest) < size:
                return
            yield bytes(self.rest[:size])
            del self.rest[:size]


class Proxies:
    """Several proxies on an event loop in a thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._proxies: list[Proxy] = []
        self._thread = threading.Thread(target=self._loop.run_forever, name="inturn-proxies", daemon=True)
        self._thread.start()

    def add(self, server_port: int, seed: int = 0) -> Proxy:
        proxy = Proxy(self.call, server_port, seed)
        asyncio.run_coroutine_threadsafe(proxy.listen(), self._loop).result()
        self._proxies.append(proxy)
        return proxy

    def call(self, function: Callable[[], _T]) -> _T:
        """Run in the event loop: only the event loop touches the streams."""
        done: Future[_T] = Future()

        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(run)
        return done.result()

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _close(self) -> None:
        for proxy in self._proxies:
            proxy.stop()
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Proxy:
    """Listens on `port`. `set`, `cut` and `half_open` may be called from any thread."""

    def __init__(self, call: Callable[[Callable[[], None]], None], server_port: int, seed: int) -> None:
        self.port = 0
        self.counts: Counter[str] = Counter()  # frames passed, duplicated, dropped, garbled; streams cut
        self._call = call
        self._server_port = server_port
        self._random = random.Random(seed)
        self._up = self._down = HEALTHY
        self._healed = asyncio.Event()
        self._streams: set[_Stream] = set()
        self._left: list[asyncio.StreamWriter] = []  # ends that stay silent

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._accept, HOST, 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def set(self, up: Behaviour = HEALTHY, down: Behaviour = HEALTHY) -> None:
        """The behaviour for bytes to the server (`up`) and from the server (`down`) from now on. Streams that lost
        bytes are cut at the end of the behaviour."""
        self._call(lambda: self._set(up, down))

    def cut(self, *, reset: bool = True) -> None:
        """End all streams, with a reset or in the polite way."""
        self._call(lambda: self._cut(reset))

    def half_open(self, *, client_stays: bool = True) -> None:
        """One end of every stream is gone, and the other end does not notice."""
        self._call(lambda: self._half_open(client_stays))

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    def stop(self) -> None:
        self._server.close()
        for stream in list(self._streams):
            stream.cut(True)
        for writer in self._left:
            writer.transport.abort()

    def _set(self, up: Behaviour, down: Behaviour) -> None:
        self._up, self._down = up, down
        self._healed.set()
        self._healed = asyncio.Event()
        for stream in list(self._streams):
            if stream.is_broken and not (up.is_dropped or down.is_dropped):
                stream.cut(True)

    def _cut(self, reset: bool) -> None:
        for stream in list(self._streams):
            stream.cut(reset)
            self.counts["streams cut"] += 1

    def _half_open(self, client_stays: bool) -> None:
        for stream in list(self._streams):
            self._left.append(stream.client if client_stays else stream.server)
            stream.leave(stream.server if client_stays else stream.client)
            self.counts["streams half open"] += 1

    async def _accept(self, reader: asyncio.StreamReader, client: asyncio.StreamWriter) -> None:
        try:
            server_reader, server = await asyncio.open_connection(HOST, self._server_port)
        except OSError:
            client.transport.abort()
            return
        stream = _Stream(client, server)
        self._streams.add(stream)
        try:
            await asyncio.gather(
                self._pump(stream, reader, server, lambda: self._up),
                self._pump(stream, server_reader, client, lambda: self._down),
            )
        finally:
            self._streams.discard(stream)
            self.counts["streams"] += 1
            if not stream.is_left:
                stream.cut(False)

    async def _pump(
        self,
        stream: _Stream,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        behaviour: Callable[[], Behaviour],
    ) -> None:
        cutter = FrameCutter()
        chunks: asyncio.Queue[bytes] = asyncio.Queue(CHUNKS_MAX)
        reading = asyncio.create_task(_read_all(reader, chunks))
        try:
            with contextlib.suppress(OSError):
                while data := await chunks.get():
                    if stream.is_left:
                        continue
                    for frame in cutter.feed(data):
                        await self._pass(stream, frame, writer, behaviour)
                if not stream.is_left and not stream.is_broken and not writer.is_closing():
                    writer.write(bytes(cutter.rest))
                    writer.write_eof()
        finally:
            reading.cancel()

    async def _pass(
        self, stream: _Stream, frame: bytes, writer: asyncio.StreamWriter, behaviour: Callable[[], Behaviour]
    ) -> None:
        while (now := behaviour()).is_held:
            await self._healed.wait()
        if now.is_dropped or stream.is_broken:
            stream.is_broken = True
            self.counts["dropped"] += 1
            return
        if now.delay_s:
            await asyncio.sleep(now.delay_s * self._random.random())
        copies = 1
        if self._random.random() < now.duplicate_share:
            copies = 2
            self.counts["duplicated"] += 1
        if self._random.random() < now.garble_share:
            frame = self._garbled(frame)
            self.counts["garbled"] += 1
        for _ in range(copies):
            await self._write(frame, writer, now.piece_bytes)
        self.counts["passed"] += 1

    async def _write(self, frame: bytes, writer: asyncio.StreamWriter, piece_bytes: int) -> None:
        if not piece_bytes:
            if not writer.is_closing():
                writer.write(frame)
                await writer.drain()
            return
        at = 0
        while at < len(frame) and not writer.is_closing():
            # Large frames are cut into a limited number of pieces.
            size = self._random.randint(1, max(piece_bytes, len(frame) // 500))
            writer.write(frame[at : at + size])
            at += size
            await asyncio.sleep(0)

    def _garbled(self, frame: bytes) -> bytes:
        """Not in the length: then the stream would only stand still."""
        at = self._random.randrange(_LENGTH.size, len(frame))
        return frame[:at] + bytes([frame[at] ^ 1 << self._random.randrange(8)]) + frame[at + 1 :]


async def _read_all(reader: asyncio.StreamReader, chunks: asyncio.Queue[bytes]) -> None:
    """Pass on all bytes before the end, also if the sender is gone by then."""
    with contextlib.suppress(OSError):
        while data := await reader.read(READ_BYTES):
            await chunks.put(data)
    await chunks.put(b"")


class _Stream:
    """The connection of a client, and its connection to the server."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.is_broken = False  # bytes were lost
        self.is_left = False  # an end is gone, and no bytes are passed on

    def cut(self, reset: bool) -> None:
        for writer in (self.client, self.server):
            _end(writer, reset)

    def leave(self, gone: asyncio.StreamWriter) -> None:
        self.is_left = True
        _end(gone, True)


def _end(writer: asyncio.StreamWriter, reset: bool) -> None:
    transport = writer.transport
    if not reset:
        transport.close()
        return
    with contextlib.suppress(OSError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    transport.abort()
