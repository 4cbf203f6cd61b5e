"""`inturn token`, and commands against a server that requires a token."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import inturn
from inturn.errors import AuthenticationFailed
from inturn.security.credentials import TOKEN, TOKEN_FILE
from tests.cli.conftest import Cli
from tests.contract.bed import eventually
from tests.security.bed import Certificates


def test_a_token_is_shown_once_and_its_hash_is_kept(cli: Cli) -> None:
    made = cli("token", "create", "billing", "--note", "host a", "--json").json
    assert made["principal"] == "billing"
    assert made["token"].startswith("inturn_")
    (listed,) = cli("token", "list", "--json").json["tokens"]
    assert (listed["principal"], listed["note"], listed["expires_at_ms"]) == ("billing", "host a", None)
    text = cli("token", "list").out
    assert listed["id"] in text
    secret = made["token"].rpartition("_")[2]
    assert secret not in text
    assert secret not in (cli.data / "tokens.json").read_text()


def test_people_get_the_token_alone_on_stdout(cli: Cli) -> None:
    """`INTURN_TOKEN=$(inturn token create billing)`."""
    made = cli("token", "create", "billing", "--expires", "90d")
    assert made.out.strip().startswith("inturn_")
    assert made.out.count("\n") == 1
    assert "shown only now" in made.err
    assert "in 89 d" in cli("token", "list").out


def test_a_revoked_token_is_gone(cli: Cli) -> None:
    cli("token", "create", "billing")
    cli("token", "create", "shop")
    first, second = cli("token", "list", "--json").json["tokens"]
    assert cli("token", "revoke", first["id"], "--json").json == {"revoked": first["id"], "principal": "billing"}
    assert [one["id"] for one in cli("token", "list", "--json").json["tokens"]] == [second["id"]]
    assert cli("token", "revoke", first["id"], "--json").error["type"] == "NotFound"


@pytest.mark.parametrize(
    "arguments", [("create", "a b"), ("create", "%local"), ("create", "x", "--expires", "soon"), ("revoke", "nobody")]
)
def test_what_makes_no_sense_is_refused(cli: Cli, arguments: tuple[str, ...]) -> None:
    assert cli("token", *arguments, "--json").error["type"] in ("InvalidInput", "NotFound")


def test_a_server_with_tokens_beside_its_data_asks_for_them(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read the token from the environment.

    The server learns new tokens after a SIGHUP, or without a signal.
    """
    token = cli("token", "create", "ops", "--json").json["token"]
    monkeypatch.delenv(TOKEN, raising=False)
    with cli.serve() as served:
        to = ("--server", served.address)
        error = cli("subject", "list", *to, "--json").error
        assert error["type"] == "AuthenticationFailed"
        assert "INTURN_TOKEN" in error["message"]
        monkeypatch.setenv(TOKEN, token)
        assert cli("subject", "create", "orders", *to, "--json").json["name"] == "orders"
        assert cli("produce", "orders", *to, "--json", stdin="a\nb\n").json["sent"] == 2
        later = cli("token", "create", "late", "--json").json["token"]
        served.process.send_signal(signal.SIGHUP)
        _wait_until_let_in(served.address, later)
        ended = served.end()
    assert ended.code == 0
    assert "the server asks for a token" in ended.err  # a warning: a client came without a token
    assert not any(one.rpartition("_")[2] in ended.err for one in (token, later))


def _wait_until_let_in(address: str, token: str) -> None:
    def is_let_in() -> bool:
        try:
            inturn.connect(address, token=token).close()
        except AuthenticationFailed:
            return False
        return True

    eventually(is_let_in, "it is let in")


def test_rules_and_the_audit_log_of_a_server(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = str(tmp_path / "tokens.json")
    shop = cli("token", "create", "shop", "--tokens", tokens, "--json").json["token"]
    access = tmp_path / "access.toml"
    access.write_text('[[allow]]\nprincipals = "shop"\nactions = "create"\nsubjects = "order.*"\n')
    audit = tmp_path / "audit.jsonl"
    with cli.serve("--tokens", tokens, "--access", str(access), "--audit-log", str(audit)) as served:
        monkeypatch.setenv(TOKEN, shop)
        to = ("--server", served.address, "--json")
        assert cli("subject", "create", "order.book", *to).code == 0
        assert cli("subject", "create", "invoice", *to).error["type"] == "AccessDenied"
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [(one["event"], one["subject"], one.get("outcome")) for one in lines] == [
        ("act", "order.book", "done"),
        ("refused", "invoice", None),
    ]
    assert shop not in audit.read_text()


def test_top_and_doctor_tell_what_they_may_not_see(
    orders: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A principal that may steer a group may see the group, but not the subject. Producers see no group."""
    assert orders("consume", "orders", "--group", "billing", "--limit", "10").code == 0
    rules = [("looker", "describe"), ("producer", "produce"), ("steerer", "steer")]
    access = tmp_path / "access.toml"
    access.write_text(
        "".join(
            f'[[allow]]\nprincipals = "{one}"\nactions = "{action}"\nsubjects = "*"\ngroups = "*"\n'
            for one, action in rules
        )
    )
    tokens = {one: orders("token", "create", one, "--json").json["token"] for one, _ in rules}
    with orders.serve("--access", str(access)) as served:
        to = ("--server", served.address)
        for name, shown, refused in (("looker", 1, 0), ("producer", 0, 0), ("steerer", 0, 1)):
            monkeypatch.setenv(TOKEN, tokens[name])
            look = orders("top", "--once", "--json", *to).json
            assert (len(look["groups"]), look["refused_count"]) == (shown, refused)
            assert ("1 group not shown" in orders("top", *to).err) == bool(refused)
            doctor = orders("doctor", "--json", *to)
            assert doctor.code == 0
            told = [one["what"] for one in doctor.json["findings"] if one["check"] == "access"]
            assert bool(told) == (name != "looker")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--access", "nowhere.toml"), "clients are not authenticated"),
        (("--tokens", "nowhere.json"), "cannot be read"),
        (("--tls-cert", "a.pem"), "belong together"),
        (("--tls-client-ca", "ca.pem"), "asks for TLS"),
        (("--tls-cert", "a.pem", "--tls-key", "a.key"), "'a.pem' is missing"),
        (("--audit-log", "no/such/folder/audit"), "cannot be written"),
    ],
)
def test_settings_that_make_no_sense_are_told_before_anything_is_made(
    cli: Cli, arguments: tuple[str, ...], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    error = cli("serve", "--port", "0", "--json", *arguments).error
    assert said in error["message"]
    assert not os.path.exists(cli.data)


def test_a_server_with_tls_and_client_certificates(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands read the certificate from the environment."""
    certificates = Certificates(tmp_path / "certificates")
    cert, key = certificates.issue("server", "127.0.0.1")
    client_cert, client_key = certificates.issue("client", "ops.example.com", common_name="ops")
    access = tmp_path / "access.toml"
    access.write_text('[[allow]]\nprincipals = "ops"\nactions = "create"\nsubjects = "*"\n')
    arguments = ("--tls-cert", cert, "--tls-key", key, "--tls-client-ca", certificates.ca_file, "--access", str(access))
    for name in (TOKEN, TOKEN_FILE):
        monkeypatch.delenv(name, raising=False)
    with cli.serve("--host", "0.0.0.0", *arguments) as served:
        assert served.address.startswith("inturns://0.0.0.0:")
        to = ("--server", served.address.replace("0.0.0.0", "127.0.0.1"), "--json")
        assert "not trusted" in cli("subject", "list", *to).error["message"]
        monkeypatch.setenv("INTURN_TLS_CA", certificates.ca_file)
        assert cli("subject", "list", *to).error["type"] == "ConnectionLost"
        monkeypatch.setenv("INTURN_TLS_CERT", client_cert)
        monkeypatch.setenv("INTURN_TLS_KEY", client_key)
        assert cli("subject", "create", "orders", *to).json["name"] == "orders"
        ended = served.end()
    assert ended.code == 0
    assert "warning" not in ended.err.replace('"level":"warning"', "")


def test_tokens_without_tls_on_an_address_that_others_reach_are_warned_of(cli: Cli) -> None:
    cli("token", "create", "ops")
    with cli.serve("--host", "0.0.0.0") as served:
        ended = served.end()
    assert ended.code == 0
    assert "without TLS: tokens and messages can be read on their way" in json.loads(ended.err)["warning"]
