"""`inturn broker-group`, and the roles of `inturn serve`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.conftest import Cli
from tests.contract.bed import GroupedBed, eventually


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GroupedBed]:
    with contextlib.closing(GroupedBed(tmp_path / "cluster")) as made:
        made.silent_s = 2.0  # a broker dies in a test
        yield made


@pytest.fixture
def address(cluster: GroupedBed) -> str:
    """The address of a cluster's meta server."""
    return cluster.open().target


def test_broker_groups_are_listed_and_set(cli: Cli, address: str) -> None:
    """P9."""
    to = ("--server", address)
    assert cli("subject", "create", "orders", "-p", "3", *to).code == 0
    listed = cli("broker-group", "list", *to, "--json").json["broker_groups"]
    assert [(one["name"], one["state"], one["is_heard"], one["partitions"]) for one in listed] == [
        ("east", "available", True, 2),
        ("west", "available", True, 1),
    ]
    assert cli("broker-group", "set", "east", "read-only", *to, "--json").json["state"] == "read-only"
    text = cli("broker-group", "list", *to).out
    assert "read-only" in text
    assert "inturn://127.0.0.1:" in text
    assert cli("broker-group", "set", "east", "available", *to).out == "broker group east is available\n"


def test_a_route_is_set_by_hand(cli: Cli, address: str) -> None:
    """M2."""
    to = ("--server", address, "--json")
    made = cli("subject", "create", "orders", "-p", "2", "--broker-group", "west", *to).json
    assert made["broker_groups"] == ["west"]
    both = cli("subject", "create", "b", "-p", "2", "--broker-group", "west", "--broker-group", "east", *to).json
    assert both["broker_groups"] == ["east", "west"]
    logs = [one["log"] for one in cli("subject", "describe", "b", *to).json["partition_list"]]
    assert [one.partition("/")[0] for one in logs] == ["west", "east"]
    assert (
        cli("subject", "create", "c", "--broker-group", "south", *to).error["message"].endswith("there are: east, west")
    )


def test_a_broker_group_that_is_not_there_or_a_state_that_is_none_is_refused(cli: Cli) -> None:
    """P9."""
    assert cli("subject", "create", "orders").code == 0
    assert "there are: local" in cli("broker-group", "set", "east", "read-only", "--json").error["message"]
    assert cli("broker-group", "set", "local", "closed").code == 2
    assert "local" in cli("broker-group", "list").out


def test_a_node_can_be_made_read_only_and_back(cli: Cli) -> None:
    """P9."""
    assert cli("subject", "create", "orders").code == 0
    assert cli("broker-group", "set", "local", "read-only").code == 0
    assert cli("broker-group", "list", "--json").json["broker_groups"][0]["state"] == "read-only"
    assert cli("broker-group", "set", "local", "available").code == 0
    assert cli("produce", "orders", "--json", stdin="x\n").json["sent"] == 1


def test_the_doctor_and_the_list_of_subjects_tell_of_a_broker_that_is_dead(
    cli: Cli, cluster: GroupedBed, address: str
) -> None:
    """P9."""
    to = ("--server", address)
    assert cli("subject", "create", "both", "-p", "2", *to).code == 0
    assert cli("subject", "create", "easts", "-p", "2", "--broker-group", "east", *to).code == 0
    assert "2 brokers are heard" in cli("doctor", *to).out
    cluster.brokers.pop("west").close(0.0)

    def groups() -> list[dict[str, Any]]:
        listed: list[dict[str, Any]] = cli("broker-group", "list", *to, "--json").json["broker_groups"]
        return listed

    eventually(lambda: not groups()[1]["is_heard"], "west is counted dead")
    told = cli("doctor", *to)
    assert told.code == 1
    assert "the broker of broker group west was not heard for" in told.out
    listed = cli("subject", "list", *to, "--json").json["subjects"]
    assert [(one["name"], one["state"]) for one in listed] == [("both", "unreached"), ("easts", "ok")]
    assert cli("broker-group", "set", "east", "read-only", *to).code == 0
    assert "broker group east is read-only" in cli("doctor", *to).out
    ran = cli("doctor", "--data", str(cluster.path / "west"), "--json")
    assert ran.code == 0, ran.out


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--role", "broker"], "needs --broker-group NAME and --meta ADDRESS"),
        (["--role", "broker", "--broker-group", "east"], "needs --broker-group NAME and --meta ADDRESS"),
        (["--role", "meta", "--broker-group", "east"], "are for --role broker"),
        (["--meta", "inturn://127.0.0.1:1"], "are for --role broker"),
        (["--role", "broker", "--broker-group", "east", "--meta", "nowhere"], "is no address of a server"),
        (["--role", "broker", "--broker-group", "a/b", "--meta", "inturn://127.0.0.1:1"], "not allowed"),
        (
            ["--role", "broker", "--broker-group", "a", "--meta", "inturn://127.0.0.1:1", "--host", "0.0.0.0"],
            "--advertise",
        ),
    ],
)
def test_roles_that_make_no_sense_are_refused(cli: Cli, options: list[str], complaint: str) -> None:
    """M1."""
    assert complaint in cli("serve", str(cli.data), *options, "--json").error["message"]
    assert not cli.data.exists()


def test_a_folder_that_has_subjects_of_its_own_cannot_become_that_of_a_broker(cli: Cli) -> None:
    """M1."""
    assert cli("subject", "create", "orders").code == 0
    meta = "inturn://127.0.0.1:1"
    ran = cli("serve", str(cli.data), "--role", "broker", "--broker-group", "east", "--meta", meta, "--json")
    assert "subjects of its own" in ran.error["message"]
