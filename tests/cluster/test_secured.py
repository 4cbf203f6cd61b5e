"""A cluster whose servers authenticate all clients and each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
from inturn import Connection, TlsSettings
from inturn.errors import AccessDenied, AuthenticationFailed
from inturn.protocol.commands import ReadCatalogue
from inturn.protocol.request import ask
from inturn.security.credentials import Credentials
from inturn.security.settings import SecuritySettings, ServerTlsSettings
from inturn.security.tokens import TokenFile
from tests.contract.bed import GroupedBed, Seen, eventually, has_joined, quick, send_all
from tests.security.bed import Certificates

RULES = """
[[allow]]
principals = "cluster"
actions = "*"
subjects = "*"
groups = "*"

[[allow]]
principals = "shop"
actions = ["create", "produce", "consume", "steer", "describe", "read", "grow"]
subjects = "*"
groups = "*"
"""


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[GroupedBed]:
    certificates = Certificates(tmp_path / "certificates")
    tokens = TokenFile(tmp_path / "tokens.json")
    (tmp_path / "access.toml").write_text(RULES)
    tls = TlsSettings(certificates.ca_file)
    made = GroupedBed(tmp_path / "cluster")
    made.credentials = Credentials(tokens.create("cluster", 0), tls)
    made.client = {"token": tokens.create("shop", 0), "tls": tls}
    made.security = SecuritySettings(
        tokens=str(tokens.path),
        access=str(tmp_path / "access.toml"),
        tls=ServerTlsSettings(*certificates.issue("server", "127.0.0.1")),
    )
    yield made
    made.close()


@pytest.fixture
def mq(secured: GroupedBed) -> Connection:
    return secured.open()


def _fail(*message_and_context: object) -> object:
    raise RuntimeError("no")


def test_a_secured_cluster_serves_those_whom_its_rules_allow(mq: Connection, quiet: None) -> None:
    mq.create_subject("line", 2)
    send_all(mq, "line", 40)
    seen = Seen()
    with mq.consumer("line", "g", seen, order="key", settings=quick()):
        seen.wait_for(40)
        assert mq.group("line", "g").park("key-0").done_at_ms is not None
        mq.grow_subject("line", 4)
        send_all(mq, "line", 40)
        eventually(lambda: len(seen.messages) >= 75, "what is not parked is handled")
    letters = quick(max_attempts=1, on_exhausted="dead-letter")
    with mq.consumer("line", "failing", _fail, order="key", settings=letters):
        eventually(lambda: has_joined(mq, "line", "failing"), "there is the group")
        eventually(lambda: len(mq.group("line", "failing").dead_letters().list()) == 80, "all are dead letters")


def test_nobody_else_may_speak_as_a_part_of_the_cluster(secured: GroupedBed, mq: Connection) -> None:
    with pytest.raises(AccessDenied, match="operate"):
        mq.set_broker_group("east", "read-only")
    with pytest.raises(AccessDenied, match="cluster"):
        ask(mq.node, ReadCatalogue(), object)
    with pytest.raises(AuthenticationFailed):
        inturn.connect(mq.target, tls=secured.client["tls"])
