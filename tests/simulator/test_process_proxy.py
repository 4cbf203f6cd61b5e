"""The proxy applies exactly the promised faults to streams."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from simulator.processes.proxy import Behaviour, FrameCutter, Proxies, Proxy

WAIT_S = 40.0


def _frame(body: bytes) -> bytes:
    return struct.pack("<I", len(body)) + body


class Echo:
    """Sends all bytes back."""

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        self.received = bytearray()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                accepted, _ = self._listening.accept()
                threading.Thread(target=self._talk, args=(accepted,), daemon=True).start()

    def _talk(self, accepted: socket.socket) -> None:
        with accepted, contextlib.suppress(OSError):
            while data := accepted.recv(65536):
                self.received += data
                accepted.sendall(data)

    def close(self) -> None:
        self._listening.close()


@pytest.fixture
def echo() -> Iterator[Echo]:
    echo = Echo()
    yield echo
    echo.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[Proxy]:
    with Proxies() as proxies:
        yield proxies.add(echo.port, seed=1)


@contextlib.contextmanager
def _client(proxy: Proxy) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", proxy.port), WAIT_S) as client:
        yield client


def _read(client: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        some = client.recv(size - len(data))
        if not some:
            break
        data += some
    return bytes(data)


def _hears_nothing(client: socket.socket, wait_s: float = 0.15) -> bool:
    client.settimeout(wait_s)
    try:
        return client.recv(1) == b"never"
    except TimeoutError:
        return True
    finally:
        client.settimeout(WAIT_S)


def test_frames_are_cut_wherever_the_bytes_are() -> None:
    data = _frame(b"one") + _frame(b"") + _frame(b"three") + b"\x05\x00"
    cutter = FrameCutter()
    found = [frame for at in range(len(data)) for frame in cutter.feed(data[at : at + 1])]
    assert found == [_frame(b"one"), _frame(b""), _frame(b"three")]
    assert cutter.rest == b"\x05\x00"


def test_a_healthy_proxy_changes_nothing(proxy: Proxy, echo: Echo) -> None:
    data = _frame(b"hello") + _frame(bytes(200_000)) + b"\x09\x00rest"
    with _client(proxy) as client:
        client.sendall(data)
        client.shutdown(socket.SHUT_WR)  # a partial frame is sent with the end
        assert _read(client, len(data)) == data
        assert client.recv(1) == b""
    assert echo.received == data


def test_pieces_and_delays_keep_the_bytes(proxy: Proxy) -> None:
    proxy.set(Behaviour(piece_bytes=3), Behaviour(piece_bytes=1, delay_s=0.01))
    data = b"".join(_frame(b"%d" % number * 20) for number in range(30))
    with _client(proxy) as client:
        client.sendall(data)
        assert _read(client, len(data)) == data


def test_whole_frames_are_sent_twice(proxy: Proxy, echo: Echo) -> None:
    proxy.set(Behaviour(duplicate_share=1.0))
    with _client(proxy) as client:
        client.sendall(_frame(b"a") + _frame(b"bc"))
        expected = _frame(b"a") * 2 + _frame(b"bc") * 2
        assert _read(client, len(expected)) == expected
    assert proxy.counts["duplicated"] == 2


def test_what_is_held_comes_later(proxy: Proxy) -> None:
    with _client(proxy) as client:
        proxy.set(Behaviour(is_held=True))
        client.sendall(_frame(b"late"))
        assert _hears_nothing(client)
        proxy.set()
        assert _read(client, 8) == _frame(b"late")


def test_what_is_held_comes_even_if_its_sender_has_gone(proxy: Proxy, echo: Echo) -> None:
    with _client(proxy) as client:
        proxy.set(Behaviour(is_held=True))
        client.sendall(_frame(b"testament"))
    time.sleep(0.05)
    assert not echo.received
    proxy.set()
    _eventually(lambda: echo.received == _frame(b"testament"))


def test_a_stream_that_lost_something_is_cut_when_that_is_over(proxy: Proxy, echo: Echo) -> None:
    with _client(proxy) as client:
        client.sendall(_frame(b"first"))
        assert _read(client, 9) == _frame(b"first")
        proxy.set(Behaviour(is_dropped=True))
        client.sendall(_frame(b"second"))
        assert _hears_nothing(client)
        proxy.set()
        with pytest.raises(ConnectionResetError):
            client.recv(1)
    assert echo.received == _frame(b"first")


def test_a_garbled_frame_has_one_wrong_bit(proxy: Proxy) -> None:
    proxy.set(Behaviour(garble_share=1.0))
    sent = _frame(bytes(50))
    with _client(proxy) as client:
        client.sendall(sent)
        got = _read(client, len(sent))
    assert got[:4] == sent[:4]
    assert sum((one ^ other).bit_count() for one, other in zip(got, sent, strict=True)) == 1


@pytest.mark.parametrize("reset", [True, False])
def test_a_cut_ends_the_stream_for_the_client(proxy: Proxy, reset: bool) -> None:
    with _client(proxy) as client:
        client.sendall(_frame(b"x"))
        _read(client, 5)
        proxy.cut(reset=reset)
        if reset:
            with pytest.raises(ConnectionResetError):
                client.recv(1)
        else:
            assert client.recv(1) == b""
    with _client(proxy) as again:
        again.sendall(_frame(b"y"))
        assert _read(again, 5) == _frame(b"y")


def test_a_half_open_stream_is_silent(proxy: Proxy, echo: Echo) -> None:
    with _client(proxy) as client:
        client.sendall(_frame(b"x"))
        _read(client, 5)
        proxy.half_open(client_stays=True)
        client.sendall(_frame(b"nobody"))
        assert _hears_nothing(client)
    assert echo.received == _frame(b"x")


def test_a_server_that_is_not_there_is_told_by_a_reset() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Proxies() as proxies:
        proxy = proxies.add(port)
        with _client(proxy) as client, contextlib.suppress(ConnectionResetError):
            assert client.recv(1) == b""


def _eventually(condition: object) -> None:
    assert callable(condition)
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.01)
