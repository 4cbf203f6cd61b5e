"""TLS and mutual TLS: for both kinds of clients, with certificates of a test CA."""

from __future__ import annotations

import asyncio
import socket
import ssl
import time
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import inturn
from inturn import TlsSettings, aio
from inturn.errors import AuthenticationFailed, ConnectionLost, InvalidInput
from inturn.security.settings import ServerTlsSettings
from inturn.security.tokens import certificate_principal
from inturn.transport.server_session import ServerSettings
from tests.contract.bed import Seen, eventually, quick, send
from tests.security.bed import Certificates
from tests.security.conftest import Serve


@pytest.fixture
def trusting(certificates: Certificates) -> TlsSettings:
    return TlsSettings(ca_file=certificates.ca_file)


def test_messages_go_through_tls_in_order(serve: Serve, server_tls: ServerTlsSettings, trusting: TlsSettings) -> None:
    guarded = serve("shop", tls=server_tls)
    assert guarded.address.startswith("inturns://127.0.0.1:")
    mq = guarded.connect("shop", trusting)
    mq.create_subject("orders", partitions=1)
    seen = Seen()
    with mq.consumer("orders", "billing", seen, settings=quick()):
        send(mq, "orders", *(f"k:{number}" for number in range(500)))
        seen.wait_for(500)
    assert [int(body) for body in seen.bodies] == list(range(500))


def test_large_messages_and_many_at_once_go_through_tls(
    serve: Serve, server_tls: ServerTlsSettings, trusting: TlsSettings
) -> None:
    """More than a socket accepts at once, in both directions, from several threads."""
    guarded = serve("shop", tls=server_tls)
    mq = guarded.connect("shop", trusting)
    mq.create_subject("orders", partitions=4)
    bodies = [bytes([number]) * (1 << 18) for number in range(32)]
    with mq.producer() as producer:
        handles = [producer.send("orders", body, key=f"k{number}") for number, body in enumerate(bodies)]
        mq.subjects()
        for handle in handles:
            handle.result(40.0)
    assert sorted(message.body for message in mq.reader("orders")) == bodies


def test_asyncio_clients_talk_tls(serve: Serve, server_tls: ServerTlsSettings, trusting: TlsSettings) -> None:
    guarded = serve("shop", tls=server_tls)

    async def main() -> None:
        async with aio.connect(guarded.address, token=guarded.tokens["shop"], tls=trusting) as mq:
            await mq.create_subject("orders", partitions=1)
            async with mq.producer() as producer:
                for number in range(50):
                    await producer.send("orders", b"%d" % number, key="k")

    asyncio.run(main())
    assert [int(one.body) for one in guarded.connect("shop", trusting).reader("orders")] == list(range(50))


def test_tls_settings_switch_it_on_whatever_the_address_says(
    serve: Serve, server_tls: ServerTlsSettings, trusting: TlsSettings
) -> None:
    guarded = serve("shop", tls=server_tls)
    plain = guarded.address.replace("inturns://", "inturn://")
    with inturn.connect(plain, token=guarded.tokens["shop"], tls=trusting) as mq:
        assert mq.subjects() == []


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_server_that_nobody_vouches_for_is_not_trusted(
    serve: Serve, server_tls: ServerTlsSettings, kind: str, tmp_path: Path
) -> None:
    """Neither a server of a different CA, nor a server with a different name.

    No option disables the check. No token is sent.
    """
    guarded = serve("shop", tls=server_tls)
    stranger = TlsSettings(ca_file=Certificates(tmp_path / "other").ca_file)
    for tls in (None, stranger):
        with pytest.raises(ConnectionLost, match="not trusted"):
            _connect(kind, guarded.address, guarded.tokens["shop"], tls)
    assert guarded.refusals() == []


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_the_name_in_the_certificate_has_to_fit(
    serve: Serve, certificates: Certificates, trusting: TlsSettings, kind: str
) -> None:
    guarded = serve("shop", tls=ServerTlsSettings(*certificates.issue("queue", "queue.example.com")))
    token = guarded.tokens["shop"]
    with pytest.raises(ConnectionLost, match="not trusted"):
        _connect(kind, guarded.address, token, trusting)
    _connect(kind, guarded.address, token, replace(trusting, server_name="queue.example.com"))


def _connect(kind: str, address: str, token: str | None, tls: TlsSettings | None) -> None:
    if kind == "blocking":
        inturn.connect(address, token=token, tls=tls).close()
        return

    async def main() -> None:
        async with aio.connect(address, token=token, tls=tls):
            pass

    asyncio.run(main())


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_who_talks_tls_to_whom_is_told(
    serve: Serve, server_tls: ServerTlsSettings, trusting: TlsSettings, kind: str
) -> None:
    """A client without TLS at a server with TLS, and the reverse."""
    with_tls, without = serve("shop", tls=server_tls), serve("shop")
    with pytest.raises(ConnectionLost, match="inturns://"):
        _connect(kind, with_tls.address.replace("inturns", "inturn"), with_tls.tokens["shop"], None)
    with pytest.raises(ConnectionLost, match="does not talk TLS"):
        _connect(kind, without.address, without.tokens["shop"], trusting)


# Mutual TLS


@pytest.fixture
def mutual(certificates: Certificates, server_tls: ServerTlsSettings) -> ServerTlsSettings:
    return replace(server_tls, client_ca_file=certificates.ca_file)


def shown(certificates: Certificates, name: str) -> TlsSettings:
    cert, key = certificates.issue(f"client-{name}", f"{name}.example.com", common_name=name)
    return TlsSettings(certificates.ca_file, cert, key)


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_client_certificate_says_who_it_is(
    serve: Serve, mutual: ServerTlsSettings, certificates: Certificates, kind: str
) -> None:
    guarded = serve(tls=mutual)
    billing = shown(certificates, "billing")
    _connect(kind, guarded.address, None, billing)
    guarded.connect(tls=billing).create_subject("orders")
    (act,) = [one for one in guarded.audited() if one["event"] == "act"]
    assert act["principal"] == "billing"


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_without_a_client_certificate_nobody_is_let_in(
    serve: Serve, mutual: ServerTlsSettings, trusting: TlsSettings, tmp_path: Path, kind: str
) -> None:
    guarded = serve(tls=mutual)
    stranger = shown(Certificates(tmp_path / "other"), "billing")
    for tls in (trusting, replace(stranger, ca_file=trusting.ca_file)):
        with pytest.raises(ConnectionLost):
            _connect(kind, guarded.address, None, tls)
    eventually(lambda: guarded.service.connection_count == 0, "all are hung up on")


def test_whoever_has_no_right_certificate_is_in_the_audit_log(
    serve: Serve, mutual: ServerTlsSettings, trusting: TlsSettings, tmp_path: Path
) -> None:
    """A client without TLS, or a client that does not trust the server, was not refused and is not listed."""
    guarded = serve(tls=mutual)
    with socket.create_connection(("127.0.0.1", guarded.port), 30.0) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert _is_hung_up_on(nonsense)
    with pytest.raises(ConnectionLost, match="not trusted"):
        _connect("blocking", guarded.address, None, TlsSettings())
    stranger = shown(Certificates(tmp_path / "other"), "billing")
    for tls in (trusting, replace(stranger, ca_file=trusting.ca_file)):
        with pytest.raises(ConnectionLost):
            _connect("blocking", guarded.address, None, tls)
    eventually(lambda: len(guarded.refusals()) >= 2, "both are written")
    found = guarded.refusals()
    assert {(one["address"], one["command"]) for one in found} == {("127.0.0.1", "TLS")}
    assert {one["why"].split(":")[0] for one in found} == {"no certificate was shown", "the certificate is not trusted"}


def test_with_both_a_token_says_who_it_is_and_the_certificate_is_needed_all_the_same(
    serve: Serve, mutual: ServerTlsSettings, certificates: Certificates, trusting: TlsSettings
) -> None:
    guarded = serve("shop", tls=mutual)
    host = shown(certificates, "host-a")
    guarded.connect("shop", host).create_subject("orders")
    guarded.connect(None, host).create_subject("invoices")
    assert [one["principal"] for one in guarded.audited()] == ["shop", "host-a"]
    with pytest.raises(AuthenticationFailed):
        inturn.connect(guarded.address, token="inturn_0_wrong", tls=host)
    with pytest.raises(ConnectionLost):
        inturn.connect(guarded.address, token=guarded.tokens["shop"], tls=trusting)


def test_whom_a_certificate_names() -> None:
    subject = ((("organizationName", "x"),), (("commonName", "billing"),))
    assert certificate_principal({"subject": subject, "subjectAltName": (("DNS", "a.example"),)}) == "billing"
    assert (
        certificate_principal({"subject": (), "subjectAltName": (("IP", "::1"), ("DNS", "a.example"))}) == "a.example"
    )
    for nobody in ({}, {"subject": ((("commonName", "%local"),),)}, {"subject": ((("commonName", "a b"),),)}):
        with pytest.raises(AuthenticationFailed):
            certificate_principal(nobody)


# Faulty files and handshakes


def test_files_that_cannot_be_used_are_named(certificates: Certificates, tmp_path: Path) -> None:
    cert, key = certificates.issue("one", "one.example")
    other_key = certificates.issue("two", "two.example")[1]
    (tmp_path / "nonsense").write_text("nonsense")
    for settings, said in (
        (TlsSettings(ca_file="/nowhere/ca.pem"), "'/nowhere/ca.pem' is missing"),
        (TlsSettings(ca_file=str(tmp_path / "nonsense")), "cannot be used"),
        (TlsSettings(cert_file=cert, key_file=other_key), "cannot be used"),
        (ServerTlsSettings(cert, other_key), "cannot be used"),
        (ServerTlsSettings(cert, "/nowhere/key"), "'/nowhere/key' is missing"),
        (ServerTlsSettings(cert, key, "/nowhere/ca.pem"), "'/nowhere/ca.pem' is missing"),
    ):
        with pytest.raises(InvalidInput, match=said):
            settings.context()
    with pytest.raises(InvalidInput, match="without cert_file"):
        TlsSettings(key_file=key)


def test_old_versions_of_tls_are_not_spoken(serve: Serve, server_tls: ServerTlsSettings) -> None:
    guarded = serve("shop", tls=server_tls)
    assert server_tls.context().minimum_version is ssl.TLSVersion.TLSv1_2
    assert TlsSettings().context().minimum_version is ssl.TLSVersion.TLSv1_2
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with socket.create_connection(("127.0.0.1", guarded.port)) as dialed, pytest.raises(OSError):  # noqa: PT011
        old.wrap_socket(dialed)


def test_a_new_certificate_is_used_without_a_restart(serve: Serve, certificates: Certificates) -> None:
    cert, key = certificates.issue("renewed", "127.0.0.1")
    guarded = serve("shop", tls=ServerTlsSettings(cert, key))
    first = _certificate_of(guarded.port)
    certificates.issue("renewed", "127.0.0.1")
    guarded.service.reload()
    eventually(lambda: _certificate_of(guarded.port) != first, "another certificate is shown")


def test_a_certificate_that_does_not_fit_its_key_changes_nothing(
    serve: Serve, certificates: Certificates, trusting: TlsSettings
) -> None:
    """A renewal writes two files in sequence. The server may read between the writes."""
    cert, key = certificates.issue("halfway", "127.0.0.1")
    guarded = serve("shop", tls=ServerTlsSettings(cert, key))
    first = _certificate_of(guarded.port)
    Path(cert).write_bytes(Path(certificates.issue("another", "127.0.0.1")[0]).read_bytes())
    with capture_logs() as logged:
        guarded.service.reload()
        eventually(lambda: any(one["event"] == "security.not_reloaded" for one in logged), "it was told")
    assert _certificate_of(guarded.port) == first
    with guarded.connect("shop", trusting) as mq:
        assert mq.subjects() == []


def test_another_ca_of_clients_is_used_without_a_restart(
    serve: Serve, server_tls: ServerTlsSettings, certificates: Certificates, tmp_path: Path
) -> None:
    former, latter = Certificates(tmp_path / "former"), Certificates(tmp_path / "latter")
    trusted = tmp_path / "clients.pem"
    trusted.write_bytes(Path(former.ca_file).read_bytes())
    guarded = serve(tls=replace(server_tls, client_ca_file=str(trusted)))
    billing = replace(shown(latter, "billing"), ca_file=certificates.ca_file)
    with pytest.raises(ConnectionLost):
        _connect("blocking", guarded.address, None, billing)
    trusted.write_bytes(Path(latter.ca_file).read_bytes())
    with capture_logs() as logged:
        guarded.service.reload()
        eventually(lambda: any(one["event"] == "security.reloaded" for one in logged), "it was told")
    _connect("blocking", guarded.address, None, billing)


def _certificate_of(port: int) -> str:
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=30)


def test_a_client_that_never_ends_its_handshake_is_hung_up_on(serve: Serve, server_tls: ServerTlsSettings) -> None:
    """Other clients are accepted meanwhile."""
    settings = ServerSettings(greeting_s=2.0, ungreeted=4)
    guarded = serve("shop", tls=server_tls, settings=settings)
    began_s = time.monotonic()
    silent = [socket.create_connection(("127.0.0.1", guarded.port), 30.0) for _ in range(8)]
    for one in silent[:4]:  # there is room for four
        assert _is_hung_up_on(one)
    assert time.monotonic() - began_s < 2.0, "before they were waited for as long as that"
    for one in silent[4:]:
        assert _is_hung_up_on(one)
    for one in silent:
        one.close()
    with socket.create_connection(("127.0.0.1", guarded.port), 30.0) as nonsense:
        nonsense.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert _is_hung_up_on(nonsense)


def _is_hung_up_on(one: socket.socket) -> bool:
    try:
        while one.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True
