"""/healthz and /readyz: the process answers; and all parts work, or the answer names the failing part."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from typing import Any

import inturn
from inturn.server.server import Server
from tests.cli.conftest import Cli
from tests.contract.bed import WAIT_S, Seen, eventually, quick, send_all
from tests.server.conftest import get


def ready(url: str | None) -> tuple[int, Any]:
    got = get(f"{url}/readyz")
    assert got.content_type == "application/json"
    return got.status, json.loads(got.text)


def test_a_server_that_works_is_alive_and_ready(cli: Cli) -> None:
    with cli.serve("--http", "0") as served:
        url = served.ready["http"]
        assert url.startswith("http://127.0.0.1:")
        assert get(f"{url}/healthz").text == "ok\n"
        parts = {"work": {"ready": True}, "logs": {"ready": True}, "state": {"ready": True}}
        assert ready(url) == (200, {"ready": True, "parts": parts})
        assert get(f"{url}/").status == 404
        ended = served.end()
    assert (ended.code, ended.err) == (0, "")


def test_a_server_that_stops_is_alive_and_not_ready_until_its_consumers_have_given_back(service: Server) -> None:
    """The server waits for a running handler."""
    let, began = threading.Event(), threading.Event()

    def handle(message: inturn.Message, context: inturn.Context) -> None:
        began.set()
        let.wait(60)

    with inturn.connect(str(service.address)) as mq:
        mq.create_subject("orders", 1)
        with mq.producer() as producer:
            producer.send_sync("orders", b"1")
        with mq.consumer("orders", "billing", handle):
            assert began.wait(WAIT_S)
            stopping = threading.Thread(target=service.close, args=(60.0,))
            stopping.start()
            eventually(lambda: ready(service.http_url)[0] == 503, "not ready")
            _, told = ready(service.http_url)
            assert told["parts"]["work"] == {"ready": False, "why": "it is stopping"}
            assert told["parts"]["state"] == {"ready": True}
            assert get(f"{service.http_url}/healthz").status == 200
            assert get(f"{service.http_url}/metrics").text.count('inturn_ready{part="work"} 0.0') == 1
            let.set()
            stopping.join()


def test_a_database_that_fails_is_named_and_metrics_go_on_without_it(service: Server) -> None:
    database = service._opened._database
    database._stopped = "the database has stopped: the disk said no"
    try:
        status, told = ready(service.http_url)
        assert (status, told["ready"]) == (503, False)
        assert "the disk said no" in told["parts"]["state"]["why"]
        metrics = get(f"{service.http_url}/metrics")
        assert metrics.status == 200
        assert 'inturn_ready{part="state"} 0.0' in metrics.text
        assert "inturn_group_lag" not in metrics.text
    finally:
        database._stopped = None


def test_a_node_that_is_stuck_is_not_ready_and_health_still_answers(service: Server) -> None:
    """The health check answers even while a thread holds the node's lock for good."""
    settings = service._endpoint._server._settings  # type: ignore[union-attr]
    assert settings.answer_s == 10.0
    object.__setattr__(settings, "answer_s", 0.3)
    with service._opened.node.lock:
        assert get(f"{service.http_url}/readyz").status == 503
        assert get(f"{service.http_url}/metrics").status == 503
        eventually(lambda: get(f"{service.http_url}/healthz").status == 200, "it answers in time")
    eventually(lambda: get(f"{service.http_url}/readyz").status == 200, "ready again")


def test_a_frozen_server_does_not_answer(cli: Cli) -> None:
    with cli.serve("--http", "0") as served:
        os.kill(served.process.pid, signal.SIGSTOP)
        answered: list[int] = []
        asking = threading.Thread(target=lambda: answered.append(get(f"{served.ready['http']}/healthz").status))
        asking.start()
        asking.join(0.5)
        assert answered == []
        os.kill(served.process.pid, signal.SIGCONT)
        asking.join(60)
        assert answered == [200]


def test_an_http_port_in_use_is_told_and_everything_is_closed_again(cli: Cli, service: Server) -> None:
    assert service.http_url is not None
    port = service.http_url.rpartition(":")[2]
    error = cli("serve", "--port", "0", "--http", port, "--json").error
    assert f"cannot listen for HTTP at 127.0.0.1:{port}" in error["message"]
    assert "--http" in error["message"]
    with inturn.connect(cli.data) as mq:
        assert mq.subjects() == []


def test_an_address_that_is_none_is_refused(cli: Cli) -> None:
    assert "give host:port" in cli("serve", "--http", "here", "--json").error["message"]
    assert not cli.data.exists()


def test_whoever_bothers_the_http_port_does_not_bother_the_node(service: Server) -> None:
    """Idle connections, nonsense and many requests at once, while a producer sends and a consumer handles."""
    assert service.http_url is not None
    host, port = service.http_url.removeprefix("http://").split(":")
    is_over = threading.Event()

    def bother() -> None:
        while not is_over.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as stream:
                stream.sendall(random.choice((b"GET /metrics HTTP/1.1\r\n\r\n", b"\xff" * 9000, b"GET /me", b"")))
                stream.settimeout(0.05)
                stream.recv(100)

    botherers = [threading.Thread(target=bother) for _ in range(12)]
    for thread in botherers:
        thread.start()
    try:
        with inturn.connect(str(service.address)) as mq:
            mq.create_subject("orders", 2)
            seen = Seen()
            with mq.consumer("orders", "billing", seen, order="key", settings=quick()):
                send_all(mq, "orders", 500)
                seen.wait_for(500, 60.0)
    finally:
        is_over.set()
        for thread in botherers:
            thread.join()
    for key in range(8):
        numbers = [int(message.body) for message in seen.messages if message.key == b"key-%d" % key]
        assert numbers == list(range(key, 500, 8))
