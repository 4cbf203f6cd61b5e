"""Authentication: tokens, rotation and expiry."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
from pathlib import Path

import pytest
from structlog.testing import capture_logs

import inturn
from inturn import aio
from inturn.errors import AuthenticationFailed, ConnectionLost, InvalidInput
from inturn.model.errors import ProtocolError
from inturn.model.time import SystemClock
from inturn.protocol.codec import VERSIONS
from inturn.protocol.commands import Hello, ListSubjects, SubjectList, Welcome
from inturn.security.credentials import Credentials
from inturn.security.guard import Guard
from inturn.security.settings import SecuritySettings, is_loopback
from inturn.security.tokens import TokenFile
from inturn.server.server import Server
from inturn.transport.address import Address, dialled
from tests.contract.bed import Seen, eventually, quick, send
from tests.security.bed import NOW_MS
from tests.security.conftest import Serve

SECRET = "inturn_000000000000_" + "x" * 43


def test_a_token_lets_its_principal_in(serve: Serve) -> None:
    mq = serve("shop").connect("shop")
    mq.create_subject("orders")
    assert [one.name for one in mq.subjects()] == ["orders"]


@pytest.mark.parametrize("token", [None, SECRET, "x", "inturn_", "inturn__", "inturn_%s_" % ("0" * 12)])
def test_without_a_right_token_nobody_is_let_in(serve: Serve, token: str | None) -> None:
    guarded = serve("shop")
    with pytest.raises(AuthenticationFailed) as caught:
        inturn.connect(guarded.address, token=token)
    assert "inturn token create" in str(caught.value)
    assert SECRET not in str(caught.value)
    (refusal,) = guarded.refusals()
    assert (refusal["command"], refusal["address"]) == ("Hello", "127.0.0.1")


def test_half_of_a_token_is_worth_nothing(serve: Serve) -> None:
    """A list shows the id of a token. The secret part must match, too."""
    guarded = serve("shop", "billing")
    token, other = guarded.tokens["shop"], guarded.tokens["billing"]
    for wrong in (token[:-1], token + "x", token.rpartition("_")[0] + "_" + other.split("_", 2)[2], token.upper()):
        with pytest.raises(AuthenticationFailed, match="unknown here, or was revoked"):
            inturn.connect(guarded.address, token=wrong)


def test_nothing_is_done_before_the_greeting_or_after_a_refusal(serve: Serve) -> None:
    guarded = serve("shop")
    with guarded.raw() as raw:
        raw.send_frame(53, b"\x80")  # ListSubjects without a Hello
        assert raw.is_hung_up_on()
    with guarded.raw() as raw:
        assert isinstance(raw.ask(Hello(VERSIONS, "x", "wrong")), AuthenticationFailed)
        with pytest.raises(ConnectionError):
            raw.ask(ListSubjects())
    with guarded.raw() as raw:
        assert isinstance(raw.ask(Hello(VERSIONS, "x", guarded.tokens["shop"])), Welcome)
        assert raw.ask(ListSubjects()) == SubjectList(())


def test_a_second_greeting_does_not_change_who_it_is(serve: Serve) -> None:
    guarded = serve("shop", "admin")
    with guarded.raw() as raw:
        raw.ask(Hello(VERSIONS, "x", guarded.tokens["shop"]))
        assert isinstance(raw.ask(Hello(VERSIONS, "x", guarded.tokens["admin"])), InvalidInput | ProtocolError)


def test_asyncio_clients_have_tokens_too(serve: Serve) -> None:
    guarded = serve("shop")

    async def main() -> None:
        async with aio.connect(guarded.address, token=guarded.tokens["shop"]) as mq:
            await mq.create_subject("orders")
        with pytest.raises(AuthenticationFailed):
            await aio.connect(guarded.address, token=SECRET)

    asyncio.run(main())


def test_tokens_are_changed_in_turn_without_a_restart(serve: Serve) -> None:
    """Two tokens are valid at once.

    The older token is revoked after the last use; a client that still uses the token loses the stream.
    """
    guarded = serve("shop")
    old = guarded.connect("shop")
    old.create_subject("orders")
    new_token = guarded.token_file.create("shop", 0)
    guarded.service.reload()
    eventually(lambda: _is_let_in(guarded.address, new_token), "the new token is known")
    with inturn.connect(guarded.address, token=new_token) as new:
        assert [one.name for one in new.subjects()] == ["orders"]
        guarded.token_file.revoke(guarded.tokens["shop"].split("_")[1])
        eventually(lambda: not _is_let_in(guarded.address, guarded.tokens["shop"]), "noticed by itself")
        eventually(lambda: guarded.service.connection_count == 1, "the old one is hung up on")
        assert [one.name for one in new.subjects()] == ["orders"]
    events = [(one["event"], one["principal"]) for one in guarded.audited() if one["event"].startswith("token")]
    assert events == [("token.created", "shop"), ("token.revoked", "shop")]


def _is_let_in(address: str, token: str) -> bool:
    try:
        inturn.connect(address, token=token).close()
    except AuthenticationFailed:
        return False
    return True


def test_a_producer_whose_token_was_revoked_by_mistake_loses_nothing(serve: Serve) -> None:
    """A client that was accepted once treats a refusal like a server that is away: waits, and continues in order."""
    guarded = serve("shop", "ops")
    mq = guarded.connect("shop")
    mq.create_subject("orders", partitions=1)
    content = guarded.token_file.path.read_bytes()
    with mq.producer() as producer:
        producer.send_sync("orders", b"0", key="k")
        guarded.token_file.revoke(guarded.tokens["shop"].split("_")[1])
        guarded.service.reload()
        eventually(lambda: guarded.service.connection_count == 0, "it is hung up on")
        handles = [producer.send("orders", b"%d" % number, key="k") for number in range(1, 5)]
        eventually(lambda: guarded.refusals(), "it comes again, and is refused")
        guarded.token_file.path.write_bytes(content)
        guarded.service.reload()
        assert [handle.result(40.0).offset for handle in handles] == [1, 2, 3, 4]


class Calendar(SystemClock):
    """A clock whose day the test sets."""

    ahead_ms = 0

    def time_ms(self) -> int:  # type: ignore[override]
        return NOW_MS + self.ahead_ms


def test_a_token_ends_when_it_has_expired(serve: Serve) -> None:
    """For new and for existing streams."""
    clock = Calendar()
    guarded = serve("shop", clock=clock)
    token = guarded.token_file.create("guest", NOW_MS, expires_at_ms=NOW_MS + 5_000)
    guarded.service.reload()
    eventually(lambda: _is_let_in(guarded.address, token), "the new token is known")
    guest, shop = inturn.connect(guarded.address, token=token), guarded.connect("shop")
    clock.ahead_ms = 5_000
    assert not _is_let_in(guarded.address, token)
    eventually(lambda: guarded.service.connection_count == 1, "the guest is hung up on")
    assert shop.subjects() == []
    guest.close()
    assert next(one["why"] for one in guarded.refusals()) == "the token has expired"


def test_a_token_that_has_expired_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="has already passed"):
        TokenFile(tmp_path / "tokens.json").create("shop", NOW_MS, expires_at_ms=NOW_MS)


def test_only_hashes_are_kept_and_only_for_their_owner(tmp_path: Path) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    tokens = [file.create("shop", 0) for _ in range(3)]
    text = file.path.read_text()
    assert len(set(tokens)) == 3
    for token in tokens:
        assert token not in text
        assert token.split("_", 2)[2] not in text
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert sorted(one.principal for one in file.read().by_id.values()) == ["shop"] * 3


def test_a_token_file_that_cannot_be_read_changes_nothing(serve: Serve) -> None:
    """A file that is half-written or missing: known tokens stay valid."""
    guarded = serve("shop")
    guarded.token_file.path.write_text("{")
    guarded.service.reload()
    assert guarded.connect("shop").subjects() == []
    os.unlink(guarded.token_file.path)
    guarded.service.reload()
    assert guarded.connect("shop").subjects() == []


# Root may give files away, other users may not. The test works for both.
OWNER = (4711, 4712) if os.geteuid() == 0 else (os.geteuid(), os.getegid())


def owner_and_mode(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid, found.st_mode & 0o777


def test_whoever_changes_a_token_file_leaves_it_to_its_owner(tmp_path: Path) -> None:
    """`sudo inturn token revoke`, with a server of a different user."""
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("shop", NOW_MS)
    os.chown(file.path, *OWNER)
    file.path.chmod(0o640)
    file.revoke(token.split("_")[1])
    assert owner_and_mode(file.path) == (*OWNER, 0o640)


def test_a_new_token_file_belongs_to_whom_the_folder_belongs(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    os.chown(folder, *OWNER)
    TokenFile(folder / "tokens.json").create("shop", NOW_MS)
    assert {one.name: owner_and_mode(one) for one in folder.iterdir()} == {
        "tokens.json": (*OWNER, 0o600),
        "tokens.json.lock": (*OWNER, 0o600),
    }


def test_a_token_file_that_its_owner_would_lose_is_not_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("shop", NOW_MS)

    def not_permitted(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr("inturn.security.tokens.os.fchown", not_permitted)
    with pytest.raises(InvalidInput, match=f"belongs to user {os.geteuid()}.*run this as that user"):
        file.revoke(token.split("_")[1])
    assert file.read().find(token, NOW_MS).principal == "shop"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["tokens.json", "tokens.json.lock"]


def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path: Path) -> None:
    """Otherwise the owner of the folder could make root give a different file away."""
    (tmp_path / "elsewhere").touch()
    (tmp_path / "tokens.json.lock").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match=r"tokens\.json\.lock"):
        TokenFile(tmp_path / "tokens.json").create("shop", NOW_MS)


def test_a_token_file_that_can_be_read_again_is_used_though_nothing_in_it_changed(tmp_path: Path) -> None:
    """The cause does not matter: owner, mode, or a folder above. The problem is logged once."""
    file = TokenFile(tmp_path / "tokens.json")
    token = file.create("shop", NOW_MS)
    guard = Guard(SecuritySettings(tokens=str(file.path)), SystemClock())
    readable = Path.read_bytes
    with pytest.MonkeyPatch.context() as patched, capture_logs() as logged:
        patched.setattr(Path, "read_bytes", lambda _: (_ for _ in ()).throw(PermissionError(errno.EACCES, "no")))
        file.path.chmod(0o000)
        guard.reload()
        guard.reload()
        assert [one["event"] for one in logged] == ["security.not_reloaded"]
        patched.setattr(Path, "read_bytes", readable)
        guard.reload()
        guard.reload()
    assert [one["event"] for one in logged] == ["security.not_reloaded", "security.reloaded"]
    assert guard.tokens.find(token, NOW_MS).principal == "shop"


def test_a_server_does_not_start_with_a_token_file_that_is_not_there(tmp_path: Path) -> None:
    settings = SecuritySettings(tokens=str(tmp_path / "nowhere.json"))
    with pytest.raises(InvalidInput, match=r"nowhere\.json.*cannot be read"):
        Server(tmp_path / "data", address=Address("127.0.0.1"), security=settings)
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.0.2.1", "queue.example.com"])
def test_nobody_else_is_served_without_being_asked_who_they_are(tmp_path: Path, host: str) -> None:
    with pytest.raises(InvalidInput, match="--insecure serves without authentication"):
        Server(tmp_path / "data", address=Address(host))
    assert not (tmp_path / "data").exists()
    SecuritySettings(is_insecure=True).check_host(host)
    SecuritySettings(tokens="t").check_host(host)


def test_what_loopback_is() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.1.2.3", "::1", "localhost"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "10.0.0.1", "localhost.example.com", "127.0.0.1.evil.com"]))


def test_rules_without_authentication_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="clients are not authenticated"):
        SecuritySettings(access=str(tmp_path / "access.toml"))


def test_the_socket_in_the_folder_needs_no_token_and_is_its_owners_only(serve: Serve) -> None:
    guarded = serve("shop", access="")
    local = guarded.local()
    local.create_subject("orders")  # without any rule: a client that can open the socket owns the files
    mode = stat.S_IMODE(os.stat(guarded.folder / "data" / "inturn.sock").st_mode)
    assert mode == 0o600


def test_a_token_is_in_no_repr_and_no_error(serve: Serve) -> None:
    guarded = serve("shop")
    token = guarded.tokens["shop"]
    mq = guarded.connect("shop")
    assert token not in repr(mq) + repr(mq.node) + repr(vars(mq)) + repr(Hello(VERSIONS, "x", token))
    for wrong in (token + " x", token * 20, token + "é"):
        with pytest.raises(InvalidInput) as caught:
            inturn.connect(guarded.address, token=wrong)
        assert token not in str(caught.value)
    with pytest.raises(InvalidInput, match="no user and no password") as caught:
        inturn.connect(guarded.address.replace("//", f"//{token}@"))
    assert token not in str(caught.value)


def test_credentials_for_a_folder_are_a_mistake(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="this is a folder"):
        inturn.connect(tmp_path / "data", token=SECRET)
    with pytest.raises(InvalidInput, match="this is a folder"):
        aio.connect(tmp_path / "data", token=SECRET)


def test_the_environment_is_read_when_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("INTURN_TOKEN", raising=False)
    monkeypatch.delenv("INTURN_TOKEN_FILE", raising=False)
    assert inturn.token_from_environment() is None
    monkeypatch.setenv("INTURN_TOKEN", f"{SECRET}\n")
    assert inturn.token_from_environment() == SECRET
    (tmp_path / "token").write_text(f"{SECRET}\n")
    monkeypatch.setenv("INTURN_TOKEN_FILE", str(tmp_path / "token"))
    with pytest.raises(InvalidInput, match="both set"):
        inturn.token_from_environment()
    monkeypatch.delenv("INTURN_TOKEN")
    assert inturn.token_from_environment() == SECRET


def test_consumers_work_with_tokens_and_go_on_after_a_restart_of_the_stream(serve: Serve) -> None:
    guarded = serve("shop", "billing")
    shop, billing = guarded.connect("shop"), guarded.connect("billing")
    shop.create_subject("orders", partitions=2)
    seen = Seen()
    with billing.consumer("orders", "billing", seen, order="key", settings=quick()):
        send(shop, "orders", *(f"k{number % 3}:{number}" for number in range(20)))
        seen.wait_for(20)
    for key in ("k0", "k1", "k2"):
        bodies = [int(one.body) for one in seen.messages if one.key == key.encode()]
        assert bodies == sorted(bodies)


def test_a_server_that_is_not_there_is_still_just_not_there() -> None:
    with pytest.raises(ConnectionLost):
        inturn.connect("inturn://127.0.0.1:1", token=SECRET)


def test_a_token_that_would_be_seen_on_its_way_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    for target, is_warned in (("inturn://192.0.2.1:1", True), ("inturn://127.0.0.1:1", False)):
        dialled(target, Credentials(SECRET))
        assert ("token_in_clear" in caplog.text) == is_warned
        assert SECRET not in caplog.text
        caplog.clear()
