"""A small HTTP server for operators: /metrics, /healthz and /readyz. GET only, one answer per connection.

The HTTP server runs in a thread of its own and must never slow the broker down: connections, requests and times are
bounded, and each path computes its answers in one thread, for any number of requests.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from http import HTTPStatus
from typing import TypeAlias

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from inturn.model.errors import InvalidInput
from inturn.model.event_loop import new_event_loop
from inturn.model.logs import get_logger
from inturn.model.time import Clock
from inturn.protocol.commands import ReadyPart

_log = get_logger("inturn.http")


@dataclass(frozen=True, slots=True)
class HttpSettings:
    """Limits of the HTTP server."""

    connections: int = 16  # at once; further requests get 503
    request_bytes: int = 8192  # of the request line and the headers
    request_s: float = 5.0  # until the headers have arrived
    answer_s: float = 10.0  # until the answer is computed, and again until the client has taken it


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    status: HTTPStatus
    body: bytes
    content_type: str = "text/plain; charset=utf-8"


# Takes the Accept header. May block: runs in the thread of the path.
Route: TypeAlias = Callable[[str], HttpAnswer]


@dataclass(frozen=True, slots=True)
class _Request:
    method: str
    path: str
    accept: str


class _Refused(Exception):
    """The request is refused, with this status and next step."""

    def __init__(self, status: HTTPStatus, next_step: str) -> None:
        super().__init__(next_step)
        self.status = status


class HttpServer:
    """Serves from construction to `close`. Raise InvalidInput if listening fails; port 0: any free port."""

    def __init__(self, host: str, port: int, routes: Mapping[str, Route], settings: HttpSettings | None = None) -> None:
        self.host = host
        self._settings = settings if settings is not None else HttpSettings()
        self._routes = routes
        self._threads = {path: ThreadPoolExecutor(1, f"inturn-http{path.replace('/', '-')}") for path in routes}
        self._open: set[asyncio.StreamWriter] = set()
        self._is_closed = False
        self._listening: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(port,), name="inturn-http", daemon=True)
        self._thread.start()
        try:
            self.port = self._listening.result()
        except OSError as error:
            self._thread.join()
            self._end_threads()
            where, why = f"{host}:{port}", error.strerror or error
            raise InvalidInput(f"cannot listen for HTTP at {where}: {why}; choose another with --http") from None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def close(self) -> None:
        """Hang up on all clients. May be called twice."""
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self._loop.call_soon_threadsafe(self._ended.set)
        self._thread.join()
        self._end_threads()

    def _end_threads(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, port: int) -> None:
        with asyncio.Runner(loop_factory=new_event_loop) as runner:
            runner.run(self._serve(port))

    async def _serve(self, port: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        try:
            server = await asyncio.start_server(self._talk, self.host, port, limit=self._settings.request_bytes)
        except OSError as error:
            self._listening.set_exception(error)
            return
        self._listening.set_result(server.sockets[0].getsockname()[1])
        await self._ended.wait()
        server.close()
        for writer in list(self._open):
            writer.transport.abort()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        is_too_many = len(self._open) >= self._settings.connections
        self._open.add(writer)
        try:
            if is_too_many:
                _log.warning("http.too_many_connections", limit=self._settings.connections)
                await self._give(writer, _told(HTTPStatus.SERVICE_UNAVAILABLE, "too many connections; come back later"))
            else:
                await self._answer(reader, writer)
        except (OSError, EOFError, TimeoutError):
            pass  # the client is gone, or too slow
        except Exception:
            _log.exception("http.failed")
        finally:
            self._open.discard(writer)
            writer.transport.abort()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        has_body = True
        try:
            async with asyncio.timeout(self._settings.request_s):
                request = await _read(reader)
            has_body = request.method != "HEAD"
            answer = await self._worked_out(request)
        except _Refused as refused:
            answer = _told(refused.status, str(refused))
        await self._give(writer, answer, has_body=has_body)

    async def _worked_out(self, request: _Request) -> HttpAnswer:
        route = self._routes.get(request.path)
        if route is None:
            raise _Refused(HTTPStatus.NOT_FOUND, f"there are {', '.join(self._routes)}")
        if request.method not in ("GET", "HEAD"):
            raise _Refused(HTTPStatus.METHOD_NOT_ALLOWED, "use GET")
        working = self._loop.run_in_executor(self._threads[request.path], route, request.accept)
        try:
            async with asyncio.timeout(self._settings.answer_s):
                return await working
        except TimeoutError:
            why = f"no answer within {self._settings.answer_s:g} s: the server is busy, or its disk is slow"
            raise _Refused(HTTPStatus.SERVICE_UNAVAILABLE, why) from None
        except Exception as error:
            _log.exception("http.request_failed", path=request.path)
            raise _Refused(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(error).__name__}: {error}") from error

    async def _give(self, writer: asyncio.StreamWriter, answer: HttpAnswer, *, has_body: bool = True) -> None:
        head = (
            f"HTTP/1.1 {answer.status.value} {answer.status.phrase}\r\n"
            f"Content-Type: {answer.content_type}\r\n"
            f"Content-Length: {len(answer.body)}\r\n"
            "Connection: close\r\n"
            "Cache-Control: no-store\r\n"
            "\r\n"
        )
        writer.write(head.encode("latin-1", "replace") + (answer.body if has_body else b""))
        async with asyncio.timeout(self._settings.answer_s):
            writer.close()
            await writer.wait_closed()


async def _read(reader: asyncio.StreamReader) -> _Request:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        raise _Refused(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, "the request is too large") from None
    lines = head.decode("latin-1").split("\r\n")
    parts = lines[0].split(" ")
    if len(parts) != 3 or not parts[2].startswith("HTTP/1."):
        raise _Refused(HTTPStatus.BAD_REQUEST, "this is no HTTP/1.1 request")
    accept = next((line.partition(":")[2] for line in lines[1:] if line.lower().startswith("accept:")), "")
    return _Request(parts[0], parts[1].partition("?")[0], accept.strip())


def _told(status: HTTPStatus, text: str) -> HttpAnswer:
    return HttpAnswer(status, f"{text}\n".encode())


def parse_http(text: str) -> tuple[str, int]:
    """Host and port from `host:port` or `[::1]:port`. A port alone listens on this machine only."""
    host, colon, port = text.removeprefix("http://").rstrip("/").rpartition(":")
    if not colon:
        host = "127.0.0.1"
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise InvalidInput(f"HTTP address {text!r}: give host:port, or a port alone for this machine only")
    return host, int(port)


KEPT_S = 1.0  # an answer is reused for this time, so that frequent requests do not load the node
JSON = "application/json"


class Endpoint:
    """Answers from construction to `close`, also while the server stops: /readyz reports that."""

    def __init__(
        self,
        host: str,
        port: int,
        collector: Collector,
        readiness: Callable[[], tuple[ReadyPart, ...]],
        clock: Clock,
        settings: HttpSettings | None = None,
    ) -> None:
        self._readiness = readiness
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        self._page = _MetricsPage(registry, clock)
        routes = {"/metrics": self._page.answer, "/healthz": _alive, "/readyz": self._ready}
        self._server = HttpServer(host, port, routes, settings)

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._server.close()

    def _ready(self, _: str) -> HttpAnswer:
        parts = self._readiness()
        is_ready = all(part.is_ready for part in parts)
        told = {
            "ready": is_ready,
            "parts": {part.name: {"ready": part.is_ready, **({"why": part.why} if part.why else {})} for part in parts},
        }
        status = HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
        return HttpAnswer(status, msgspec.json.encode(told) + b"\n", JSON)


def _alive(_: str) -> HttpAnswer:
    return HttpAnswer(HTTPStatus.OK, b"ok\n")


class _MetricsPage:
    """The text of all metrics, cached for KEPT_S per format."""

    def __init__(self, registry: CollectorRegistry, clock: Clock) -> None:
        self._registry = registry
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, bytes]] = {}

    def answer(self, accept: str) -> HttpAnswer:
        encode, content_type = choose_encoder(accept)
        with self._lock:
            now_s = self._clock.monotonic()
            self._kept = {kind: one for kind, one in self._kept.items() if now_s < one[0] + KEPT_S}
            kept = self._kept.get(content_type)
            if kept is None:
                kept = self._kept[content_type] = now_s, encode(self._registry)
        return HttpAnswer(HTTPStatus.OK, kept[1], content_type)
