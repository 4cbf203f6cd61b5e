"""The HTTP server for operators: small and robust."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from http import HTTPStatus

import pytest

from inturn.errors import InvalidInput
from inturn.server.http import HttpAnswer, HttpServer, HttpSettings, parse_http
from tests.contract.bed import eventually
from tests.server.conftest import get

SETTINGS = HttpSettings(connections=4, request_bytes=1024, request_s=30.0, answer_s=30.0)
IMPATIENT = HttpSettings(connections=4, request_bytes=1024, request_s=0.3, answer_s=0.5)


class Routes:
    """/slow answers when the test says so; /bad raises."""

    def __init__(self) -> None:
        self.let = threading.Event()
        self.accepts: list[str] = []

    def plain(self, accept: str) -> HttpAnswer:
        self.accepts.append(accept)
        return HttpAnswer(HTTPStatus.OK, b"hello\n")

    def slow(self, _: str) -> HttpAnswer:
        self.let.wait(60)
        return HttpAnswer(HTTPStatus.OK, b"at last\n")

    def bad(self, _: str) -> HttpAnswer:
        raise RuntimeError("no idea")


@pytest.fixture
def routes() -> Routes:
    return Routes()


@pytest.fixture
def settings() -> HttpSettings:
    return SETTINGS


@pytest.fixture
def server(routes: Routes, settings: HttpSettings) -> Iterator[HttpServer]:
    table = {"/plain": routes.plain, "/slow": routes.slow, "/bad": routes.bad}
    made = HttpServer("127.0.0.1", 0, table, settings)
    yield made
    routes.let.set()
    made.close()
    made.close()


def dial(server: HttpServer) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=30)


def said(stream: socket.socket) -> bytes:
    """All bytes until the end of the stream, whatever the cause of the end."""
    parts = []
    try:
        while part := stream.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def test_a_path_is_answered_with_what_its_route_says(server: HttpServer, routes: Routes) -> None:
    got = get(f"{server.url}/plain?x=1", accept="text/x")
    assert (got.status, got.text) == (200, "hello\n")
    assert routes.accepts == ["text/x"]


def test_a_head_has_the_length_and_no_body(server: HttpServer) -> None:
    with closing(dial(server)) as stream:
        stream.sendall(b"HEAD /plain HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = said(stream)
    assert b"Content-Length: 6\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"GET /nosuch HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /plain HTTP/1.1\r\n\r\n", b"405"),
        (b"hello\r\n\r\n", b"400"),
        (b"GET /plain HTTP/2\r\n\r\n", b"400"),
        (b"\xff\x00 \r\n\r\n", b"400"),
        (b"GET /plain HTTP/1.1\r\nX: " + b"x" * 5000 + b"\r\n\r\n", b"431"),
        (b"x" * 5000, b"431"),
        (b"GET /bad HTTP/1.1\r\n\r\n", b"500"),
    ],
)
def test_what_cannot_be_answered_is_told_why(server: HttpServer, request_bytes: bytes, status: bytes) -> None:
    with closing(dial(server)) as stream:
        stream.sendall(request_bytes)
        assert said(stream).startswith(b"HTTP/1.1 " + status)
    assert get(f"{server.url}/plain").status == 200


@pytest.mark.parametrize("settings", [IMPATIENT])
def test_who_does_not_say_what_it_wants_is_hung_up_on(server: HttpServer) -> None:
    with closing(dial(server)) as stream:
        stream.sendall(b"GET /pl")
        assert said(stream) == b"", "before we are tired of waiting"


@pytest.mark.parametrize("settings", [IMPATIENT])
def test_an_answer_that_takes_too_long_is_given_up_and_holds_up_no_other_path(
    server: HttpServer, routes: Routes
) -> None:
    slow: list[int] = []
    asking = [threading.Thread(target=lambda: slow.append(get(f"{server.url}/slow").status)) for _ in range(2)]
    for thread in asking:
        thread.start()
    eventually(lambda: get(f"{server.url}/plain").status == 200, "another path is answered in time")
    for thread in asking:
        thread.join()
    assert slow == [503, 503]
    routes.let.set()
    eventually(lambda: get(f"{server.url}/slow").text == "at last\n", "it is answered in time")


def test_more_connections_than_allowed_are_told_to_come_back(server: HttpServer) -> None:
    with ExitStack() as stack:
        for _ in range(SETTINGS.connections):
            stack.enter_context(closing(dial(server)))
        late = stack.enter_context(closing(dial(server)))
        assert said(late).startswith(b"HTTP/1.1 503")
    eventually(lambda: get(f"{server.url}/plain").status == 200, "there is room again")


def test_it_ends_while_somebody_waits(routes: Routes) -> None:
    server = HttpServer("127.0.0.1", 0, {"/slow": routes.slow}, HttpSettings())
    with closing(dial(server)) as stream:
        stream.sendall(b"GET /slow HTTP/1.1\r\n\r\n")
        began_s = time.monotonic()
        server.close()
        assert said(stream) == b""
        assert time.monotonic() - began_s < 20
    routes.let.set()


def test_a_port_in_use_is_told(server: HttpServer) -> None:
    with pytest.raises(InvalidInput, match=f"cannot listen for HTTP at 127.0.0.1:{server.port}: .*--http"):
        HttpServer("127.0.0.1", server.port, {})


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("7421", ("127.0.0.1", 7421)),
        (":7421", ("127.0.0.1", 7421)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:7421", ("::1", 7421)),
        ("http://localhost:80/", ("localhost", 80)),
    ],
)
def test_an_address_is_a_host_and_a_port(text: str, address: tuple[str, int]) -> None:
    assert parse_http(text) == address


@pytest.mark.parametrize("text", ["", "localhost", "x:y", "127.0.0.1:70000", "1:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput, match="give host:port"):
        parse_http(text)
