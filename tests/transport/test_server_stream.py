"""The server's end of a closed socket."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import cast

from inturn.model.time import SystemClock
from inturn.transport.server import StreamServer
from inturn.transport.server_stream import ServerStream


class ClosedTransport(asyncio.Transport):
    """Like the event loop's transport after the socket is gone."""

    def is_closing(self) -> bool:
        return True

    def write(self, data: object) -> None:
        raise RuntimeError("the handler is closed")


class OneServer:
    """The parts of a server that a stream needs, with `flush`."""

    clock = SystemClock()
    _is_woken = True

    def __init__(self) -> None:
        self._dirty: deque[ServerStream] = deque()

    flush = StreamServer._flush


class Flushed(ServerStream):
    is_flushed = False

    def flush(self) -> None:
        self.is_flushed = True


def test_an_answer_to_somebody_who_is_gone_does_not_hold_up_those_to_others() -> None:
    server = OneServer()
    gone, other = ServerStream(cast(StreamServer, server)), Flushed(cast(StreamServer, server))
    gone._transport = ClosedTransport()
    gone._out.append(b"too late")
    server._dirty.extend((gone, other))
    server.flush()  # type: ignore[misc]
    assert other.is_flushed
    assert not gone._out, "nobody will take it"
