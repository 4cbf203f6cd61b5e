"""What a server tells operators over HTTP: /metrics, /healthz and /readyz."""

from __future__ import annotations

import threading
from collections.abc import Callable
from http import HTTPStatus

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from inturn.model.clock import Clock
from inturn.model.commands import ReadyPart
from inturn.ops.http_server import HttpAnswer, HttpServer, HttpSettings

KEPT_S = 1.0  # so long an answer is given again, so that asking often costs the node nothing
JSON = "application/json"


class Endpoint:
    """Answers from construction to `close`, also while the server stops: /readyz says so then."""

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
    """The text of all metrics, kept for a moment for each format that is asked for."""

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
