from __future__ import annotations

import json

import pytest

from tests.cli.conftest import Cli


def test_a_subject_is_created_listed_and_described(cli: Cli) -> None:
    made = cli("subject", "create", "orders", "--partitions", "3", "--max-body-bytes", "1000", "--json")
    assert made.code == 0
    assert made.json["partitions"] == 3
    assert made.json["limits"]["body_bytes"] == 1000
    (listed,) = cli("subject", "list", "--json").json["subjects"]
    assert (listed["name"], listed["message_count"], listed["state"]) == ("orders", 0, "ok")
    described = cli("subject", "describe", "orders", "--json").json
    slots = [slot for one in described["partition_list"] for slot in one["slots"]]
    assert slots == [[0, 341], [341, 682], [682, 1024]]


def test_people_get_tables(orders: Cli) -> None:
    listed = orders("subject", "list")
    assert "orders" in listed.out
    assert "30" in listed.out
    described = orders("subject", "describe", "orders")
    assert "682–1023" in described.out
    assert "\x1b[" not in described.out


def test_creating_the_same_again_is_no_error_but_other_settings_are(cli: Cli) -> None:
    assert cli("subject", "create", "orders", "--partitions", "3").code == 0
    assert cli("subject", "create", "orders", "--partitions", "3").code == 0
    error = cli("subject", "create", "orders", "--partitions", "4", "--json").error
    assert error["type"] == "AlreadyExists"
    assert "partitions 3" in error["message"]


@pytest.mark.parametrize("name", ["../x", "", "a\0b", "a b", "..", "x" * 201, "%dead"])
def test_a_bad_name_is_refused_and_leaves_no_folder(cli: Cli, name: str) -> None:
    assert cli("subject", "create", name, "--json").error["type"] == "InvalidName"
    assert not cli.data.exists()


@pytest.mark.parametrize("partitions", ["0", "-1", "1025"])
def test_a_bad_partition_count_is_refused_and_leaves_no_folder(cli: Cli, partitions: str) -> None:
    error = cli("subject", "create", "orders", "--partitions", partitions, "--json").error
    assert "1 to 1024" in error["message"]
    assert not cli.data.exists()


def test_a_bad_limit_is_refused(cli: Cli) -> None:
    assert cli("subject", "create", "orders", "--max-body-bytes", "0", "--json").error["type"] == "InvalidInput"


@pytest.mark.parametrize("option", [["--routing", "random"], ["--strategy", "none"], ["--partitions", "many"]])
def test_wrong_usage_exits_with_2(cli: Cli, option: list[str]) -> None:
    ran = cli("subject", "create", "orders", *option)
    assert (ran.code, ran.out) == (2, "")
    assert option[0] in ran.err


def test_an_unknown_subject_is_told(orders: Cli) -> None:
    for command in (["subject", "describe"], ["consume"], ["produce"]):
        error = orders(*command, "nosuch", "--json", stdin="").error
        assert (error["type"], error["name"], error["retriable"]) == ("NotFound", "nosuch", False)


def test_an_error_for_people_is_one_line_without_a_traceback(orders: Cli) -> None:
    ran = orders("subject", "describe", "nosuch")
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: no subject 'nosuch'")
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    "command",
    [
        ["subject", "list"],
        ["subject", "describe", "x"],
        ["produce", "x"],
        ["consume", "x"],
        ["consume", "x", "--group", "g"],
        ["group", "list"],
        ["group", "describe", "g"],
        ["group", "reset", "g", "--subject", "x", "--to", "first", "--yes"],
        ["doctor"],
    ],
)
def test_looking_makes_no_folder_and_no_files(cli: Cli, command: list[str]) -> None:
    assert cli(*command, "--json", stdin="").error["type"] == "InvalidInput"
    assert not cli.data.exists()
    cli.data.mkdir()
    assert cli(*command, "--json", stdin="").error["type"] == "InvalidInput"
    assert list(cli.data.iterdir()) == []


def test_messages_without_a_key_may_be_kept_in_one_lane(cli: Cli) -> None:
    assert cli("subject", "create", "plain", "--json").json["keyless"] == "independent"
    assert cli("subject", "create", "lined", "--keyless", "one-lane", "--json").json["keyless"] == "one-lane"
    assert cli("subject", "describe", "lined", "--json").json["keyless"] == "one-lane"
    assert "one-lane" in cli("subject", "describe", "lined").out
    assert cli("subject", "create", "lined", "--json").error["type"] == "AlreadyExists"
    assert cli("subject", "create", "other", "--keyless", "sideways").code == 2


def test_a_subject_grows(cli: Cli) -> None:
    """M4"""
    cli("subject", "create", "orders", "--partitions", "2")
    grown = cli("subject", "grow", "orders", "--partitions", "4", "--json").json
    assert (grown["partitions_before"], grown["partitions"], grown["route_version"]) == (2, 4, 2)
    assert grown["waiting"] == []
    again = cli("subject", "grow", "orders", "--partitions", "4", "--wait")
    assert "4 → 4" in again.out
    assert again.code == 0
    error = cli("subject", "grow", "orders", "--partitions", "3", "--json").error
    assert "not shrink" in error["message"]


def test_groups_that_wait_are_named_after_growing(orders: Cli) -> None:
    orders("consume", "orders", "--group", "billing", "--limit", "1")
    grown = orders("subject", "grow", "orders", "--partitions", "6", "--json").json
    assert {(one["group"], one["waits_for"] < one["partition"]) for one in grown["waiting"]} == {("billing", True)}
    described = orders("group", "describe", "billing", "--json").json
    told = json.dumps(described)
    assert '"waits_for": {"partition":' in told
    assert "waits for partition" in orders("group", "describe", "billing").out
    assert "waits for partition" in orders("subject", "grow", "orders", "--partitions", "6").out
