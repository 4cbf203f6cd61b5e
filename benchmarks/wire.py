"""wire: round trips of a Ping over TCP on this machine, to a server process; beside the figures, as many bytes to a
bare echo server on the same kind of event loop, also a process, from the plainest client of the same shape. In turns.

Single client, p50: on an event loop, beside a bare client on an event loop; blocking (`ask`), beside a blocking socket.
16 clients, round trips/s: 16 connections and as many tasks of an event loop, beside the same with bare clients;
blocking, with a thread and a connection per client, 2 processes × 8, beside as many blocking sockets.
Pipelined: a connection, up to 8 000 requests on their way, with a callback per request, beside a bare client on an
event loop with the same work: encodes, writes and splits frames singly, and finds the callback by the number.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from asyncio import AbstractEventLoop
from collections.abc import Awaitable, Callable
from contextlib import ExitStack, closing
from functools import partial

from benchmarks.bare_client import FRAME, AsyncClient, PipelinedClient, dial, round_trip
from benchmarks.child import Child
from benchmarks.report import BenchReport, BenchRow, Beside, median, percentile
from benchmarks.served_child import served
from benchmarks.window import BURST, BURSTS, Window
from inturn.client import connect
from inturn.model.errors import InturnError
from inturn.model.event_loop import new_event_loop
from inturn.model.time import SystemClock
from inturn.protocol.commands import Answer, Done, Node, Ping
from inturn.protocol.request import ask
from inturn.transport.address import parse_address
from inturn.transport.async_client import AsyncRemoteNode
from inturn.version import SOFTWARE

AIM = 2.0
PROCESSES, CLIENTS_EACH = 2, 8


def run(quick: bool) -> BenchReport:
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="inturn-bench-"))
        server, echo = (stack.enter_context(child) for child in (served(folder), Child("echo_child", "bytes")))
        address, port = server.hear(), int(echo.hear())
        trips, seconds, count = (100, 0.3, 10 * BURST) if quick else (200, 1.0, 100 * BURST)
        rounds = 3 if quick else 5
        rows = [
            *_one_client(address, port, 3 if quick else 30, trips),
            _many_on_a_loop(address, port, rounds, seconds),
            _many_clients(address, port, rounds, seconds),
            _pipelined_on_a_loop(address, port, rounds, count),
            _pipelined(address, port, rounds, count),
        ]
    worst = max(rows, key=lambda row: row.ratio if row.unit == "ms" else 1 / row.ratio)
    return BenchReport("wire", worst.figure, worst.unit, worst.beside, worst.ratio, rows)


def _one_client(address: str, port: int, rounds: int, count: int) -> list[BenchRow]:
    blocking_ms: list[float] = []
    bare_ms: list[float] = []
    loop_ms: list[float] = []
    bare_loop_ms: list[float] = []
    with ExitStack() as stack:
        node = stack.enter_context(connect(address, wait_s=10.0)).node
        dialed = stack.enter_context(dial(port))
        loop = stack.enter_context(closing(new_event_loop()))
        client = _async_client(loop, port)
        stack.callback(client.close)
        ours = loop.run_until_complete(_reach(address))
        stack.callback(_close, loop, ours)
        for _ in range(rounds):
            loop_ms += loop.run_until_complete(_round_trips_ms(ours, count))
            bare_loop_ms += loop.run_until_complete(client.round_trips_ms(count))
            for _ in range(count):
                began = time.perf_counter()
                ask(node, Ping(), Done)
                blocking_ms.append((time.perf_counter() - began) * 1000)
            for _ in range(count):
                began = time.perf_counter()
                round_trip(dialed, FRAME)
                bare_ms.append((time.perf_counter() - began) * 1000)
    return [
        _p50_row("one client on an event loop, p50", loop_ms, bare_loop_ms, "bare echo, event loop, p50"),
        _p50_row("one blocking client, p50", blocking_ms, bare_ms, "bare echo, blocking socket, p50"),
    ]


def _p50_row(what: str, ours_ms: list[float], bare_ms: list[float], peer: str) -> BenchRow:
    figure, bare = percentile(ours_ms, 0.5), percentile(bare_ms, 0.5)
    more = {"p99_ms": percentile(ours_ms, 0.99), "bare_p99_ms": percentile(bare_ms, 0.99)}
    ratio = figure / bare
    return BenchRow(what, figure, "ms", [Beside(peer, bare)], ratio, f"≤ {AIM:g} ×", ratio <= AIM, more)


async def _reach(address: str) -> AsyncRemoteNode:
    node = AsyncRemoteNode(parse_address(address), SOFTWARE, SystemClock())
    await node.wait_until_up(10.0)
    return node


def _close(loop: AbstractEventLoop, node: AsyncRemoteNode) -> None:
    loop.run_until_complete(node.aclose())


async def _round_trips_ms(node: AsyncRemoteNode, count: int) -> list[float]:
    times_ms = []
    for _ in range(count):
        began = time.perf_counter()
        await node.ask(Ping())
        times_ms.append((time.perf_counter() - began) * 1000)
    return times_ms


def _many_on_a_loop(address: str, port: int, rounds: int, seconds: float) -> BenchRow:
    ours: list[float] = []
    bare: list[float] = []
    count = PROCESSES * CLIENTS_EACH

    async def until(trip: Callable[[], Awaitable[object]], end: float) -> int:
        done = 0
        while time.perf_counter() < end:
            await trip()
            done += 1
        return done

    async def per_s(trips: list[Callable[[], Awaitable[object]]]) -> float:
        end = time.perf_counter() + seconds
        return sum(await asyncio.gather(*(until(trip, end) for trip in trips))) / seconds

    with ExitStack() as stack:
        loop = stack.enter_context(closing(new_event_loop()))
        nodes = [loop.run_until_complete(_reach(address)) for _ in range(count)]
        clients = [_async_client(loop, port) for _ in range(count)]
        for node, client in zip(nodes, clients, strict=True):
            stack.callback(client.close)
            stack.callback(_close, loop, node)
        for _ in range(rounds):
            ours.append(loop.run_until_complete(per_s([partial(node.ask, Ping()) for node in nodes])))
            bare.append(loop.run_until_complete(per_s([client.round_trip for client in clients])))
    return _rate_row(f"{count} clients on one event loop", ours, bare, "bare echo, as many on one event loop")


def _pipelined_on_a_loop(address: str, port: int, rounds: int, count: int) -> BenchRow:
    ours: list[float] = []
    bare: list[float] = []
    with ExitStack() as stack:
        loop = stack.enter_context(closing(new_event_loop()))
        node = loop.run_until_complete(_reach(address))
        stack.callback(_close, loop, node)
        _, client = loop.run_until_complete(loop.create_connection(PipelinedClient, "127.0.0.1", port))
        stack.callback(client.close)
        for _ in range(rounds):
            ours.append(count / loop.run_until_complete(_submitted_on_a_loop_s(node, count)))
            bare.append(count / loop.run_until_complete(client.run_s(count)))
    return _rate_row("one pipelined connection, event loop", ours, bare, "bare echo, pipelined on an event loop")


async def _submitted_on_a_loop_s(node: AsyncRemoteNode, count: int) -> float:
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    left, to_send, back = count, count, 0

    def send_burst() -> None:
        nonlocal to_send
        for _ in range(min(BURST, to_send)):
            to_send -= 1
            node.submit(Ping(), reply)

    def reply(answer: Answer | InturnError) -> None:
        nonlocal left, back
        if type(answer) is not Done:
            done.set_exception(InturnError(f"answered with {answer!r}"))
        left -= 1
        back += 1
        if back == BURST:
            back = 0
            send_burst()
        if not left:
            done.set_result(None)

    began = time.perf_counter()
    for _ in range(BURSTS):
        send_burst()
    await done
    return time.perf_counter() - began


def _async_client(loop: AbstractEventLoop, port: int) -> AsyncClient:
    _, client = loop.run_until_complete(loop.create_connection(AsyncClient, "127.0.0.1", port))
    return client


def _many_clients(address: str, port: int, rounds: int, seconds: float) -> BenchRow:
    ours: list[float] = []
    bare: list[float] = []
    with ExitStack() as stack:
        start = partial(_clients, stack)
        our_clients, bare_clients = start("inturn", address), start("bare", port)
        for _ in range(rounds):
            ours.append(_per_s(our_clients, seconds))
            bare.append(_per_s(bare_clients, seconds))
    what = f"{PROCESSES * CLIENTS_EACH} blocking clients, {PROCESSES} processes × {CLIENTS_EACH} threads"
    return _rate_row(what, ours, bare, "bare echo, as many blocking sockets")


def _clients(stack: ExitStack, kind: str, target: object) -> list[Child]:
    children = [stack.enter_context(Child("wire_clients_child", kind, target, CLIENTS_EACH)) for _ in range(PROCESSES)]
    for child in children:
        child.hear()
    return children


def _per_s(clients: list[Child], seconds: float) -> float:
    for child in clients:
        child.tell(seconds)
    return sum(float(child.hear()) for child in clients)


def _pipelined(address: str, port: int, rounds: int, count: int) -> BenchRow:
    ours: list[float] = []
    bare: list[float] = []
    with ExitStack() as stack:
        mq = stack.enter_context(connect(address, wait_s=10.0))
        loop = stack.enter_context(closing(new_event_loop()))
        _, client = loop.run_until_complete(loop.create_connection(PipelinedClient, "127.0.0.1", port))
        stack.callback(client.close)
        for _ in range(rounds):
            ours.append(count / _submitted_s(mq.node, count))
            bare.append(count / loop.run_until_complete(client.run_s(count)))
    return _rate_row("one pipelined connection, threads", ours, bare, "bare echo, pipelined on an event loop")


def _submitted_s(node: Node, count: int) -> float:
    window = Window()
    wrong: list[object] = []

    def reply(answer: Answer | InturnError) -> None:
        if type(answer) is not Done:
            wrong.append(answer)
        window.came_back(1)

    began = time.perf_counter()
    for _ in range(count // BURST):
        window.take()
        for _ in range(BURST):
            node.submit(Ping(), reply)
    window.drain()
    took = time.perf_counter() - began
    if wrong:
        raise InturnError(f"{len(wrong)} of {count} were not answered with Done, the first with {wrong[0]!r}")
    return took


def _rate_row(what: str, ours: list[float], bare: list[float], peer: str) -> BenchRow:
    figure, bound = median(ours), median(bare)
    ratio = figure / bound
    aim = f"≥ {1 / AIM:g} ×"
    return BenchRow(what, figure, "round trips/s", [Beside(peer, bound)], ratio, aim, ratio >= 1 / AIM)
