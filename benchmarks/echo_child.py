"""The bare peer: an echo server on the same kind of event loop.

`python -m benchmarks.echo_child KIND [FILE]` prints its port. KIND is
`bytes`   – all bytes are sent back,
`sync`    – as `bytes`, but first written to FILE and fdatasynced.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import cast

from benchmarks.child import end_with_stdin, say
from inturn.model.event_loop import new_event_loop


class Echo(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


class SyncedEcho(Echo):
    def __init__(self, file: int) -> None:
        self._file = file

    def data_received(self, data: bytes) -> None:
        os.write(self._file, data)
        os.fdatasync(self._file)
        self._transport.write(data)


async def serve(make: Callable[[], Echo]) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(make, "127.0.0.1", 0)
    say(str(server.sockets[0].getsockname()[1]))
    await loop.run_in_executor(None, sys.stdin.read)
    server.close()


def main(kind: str, path: str = "") -> None:
    end_with_stdin()
    make: Callable[[], Echo] = Echo
    if kind == "sync":
        make = partial(SyncedEcho, os.open(path, os.O_WRONLY | os.O_CREAT))
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(serve(make))


if __name__ == "__main__":
    main(*sys.argv[1:])
