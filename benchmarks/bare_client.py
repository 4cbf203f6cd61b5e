"""Clients of the bare echo server: the plainest code, in the shapes of the measured clients of inturn."""

from __future__ import annotations

import asyncio
import socket
import struct
import time
from collections.abc import Callable
from typing import cast

from benchmarks.window import BURST, BURSTS
from inturn.protocol.codec import pack
from inturn.protocol.commands import Ping

_LENGTH = struct.Struct("<I")
_HEAD = struct.Struct("<II")  # length and number
FRAME_BYTES = len(pack(1, Ping()))  # there; the answer, Done, has as many
FRAME = _LENGTH.pack(FRAME_BYTES - _LENGTH.size) + bytes(FRAME_BYTES - _LENGTH.size)
_REST = bytes(FRAME_BYTES - _HEAD.size)


def dial(port: int) -> socket.socket:
    dialed = socket.create_connection(("127.0.0.1", port), 30.0)
    dialed.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return dialed


def round_trip(dialed: socket.socket, data: bytes) -> None:
    dialed.sendall(data)
    left = len(data)
    while left:
        left -= len(dialed.recv(left))


class AsyncClient(asyncio.Protocol):
    """A request at a time, on an event loop."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._answered: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self._answered is not None:
            self._answered.set_result(None)

    def round_trip(self) -> asyncio.Future[None]:
        self._answered = asyncio.get_running_loop().create_future()
        self._transport.write(FRAME)
        return self._answered

    async def round_trips_ms(self, count: int) -> list[float]:
        times_ms = []
        for _ in range(count):
            began = time.perf_counter()
            await self.round_trip()
            times_ms.append((time.perf_counter() - began) * 1000)
        return times_ms

    def close(self) -> None:
        self._transport.abort()


class PipelinedClient(asyncio.Protocol):
    """Many requests on their way, on an event loop: requests are encoded and written singly, and an answer finds its
    request by the number. No checks, no other threads."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._waiting: dict[int, Callable[[], None]] = {}
        self._rest = b""

    def data_received(self, data: bytes) -> None:
        data = self._rest + data
        at, size = 0, len(data)
        while size - at >= FRAME_BYTES:
            length, number = _HEAD.unpack_from(data, at)
            self._waiting.pop(number)()
            at += 4 + length
        self._rest = data[at:]

    async def run_s(self, count: int) -> float:
        """How long so many requests take."""
        self._left, self._to_send, self._back = count, count, 0
        self._done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        for _ in range(BURSTS):
            self._send_burst()
        await self._done
        return time.perf_counter() - began

    def _send_burst(self) -> None:
        for _ in range(min(BURST, self._to_send)):
            number = self._to_send
            self._to_send -= 1
            self._waiting[number] = self._answered
            self._transport.write(_HEAD.pack(FRAME_BYTES - 4, number) + _REST)

    def _answered(self) -> None:
        self._left -= 1
        self._back += 1
        if self._back == BURST:
            self._back = 0
            self._send_burst()
        if not self._left:
            self._done.set_result(None)

    def close(self) -> None:
        self._transport.abort()
