from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from inturn.model.routing import slot_of
from tests.cli.conftest import Cli


def test_everything_is_printed_with_its_place(orders: Cli) -> None:
    found = orders("consume", "orders", "--json").json_lines
    assert len(found) == 30
    for partition in range(3):
        offsets = [one["offset"] for one in found if one["partition"] == partition]
        assert offsets == list(range(len(offsets)))
    assert {"subject", "partition", "offset", "key", "born_at_ms", "body"} == set(found[0])


def test_people_get_one_line_per_message(orders: Cli) -> None:
    ran = orders("consume", "orders", "--limit", "3")
    assert len(ran.out.splitlines()) == 3
    assert '"customer"' in ran.out
    assert ran.err == "3 messages\n"


def test_a_key_is_looked_for_in_its_partition_only(orders: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from inturn.client.reader import Reader

    asked: set[int] = set()
    read: Callable[..., object] = Reader.read

    def noting(self: Reader, partition: int, wait_s: float = 0.0) -> object:
        asked.add(partition)
        return read(self, partition, wait_s)

    monkeypatch.setattr(Reader, "read", noting)
    found = orders("consume", "orders", "--key", "c1", "--json").json_lines
    assert [one["key"] for one in found] == ["c1"] * 6
    assert asked == {slot_of(b"c1") * 3 // 1024}


def test_one_partition_and_a_start_offset(orders: Cli) -> None:
    all_of_it = [one for one in orders("consume", "orders", "--json").json_lines if one["partition"] == 2]
    assert orders("consume", "orders", "--partition", "2", "--json").json_lines == all_of_it
    assert orders("consume", "orders", "--partition", "2", "--from", "4", "--json").json_lines == all_of_it[4:]
    assert orders("consume", "orders", "--from", "last", "--json").out == ""
    assert len(orders("consume", "orders", "--from", "2020-01-31T12:00", "--json").json_lines) == 30
    assert orders("consume", "orders", "--from", "2999-01-31", "--json").out == ""


@pytest.mark.parametrize("start", ["yesterday", "", "-1", "committed", "9999-12-31T23:59:59.999999", "9" * 5000])
def test_a_bad_position_is_told(orders: Cli, start: str) -> None:
    for command in (["consume", "orders", "--from"], ["group", "reset", "g", "-s", "orders", "--yes", "--to"]):
        error = orders(*command, start, "--json").error
        assert error["type"] == "InvalidInput"
        assert "use first, last, a time" in error["message"]


def test_an_unknown_partition_is_told(orders: Cli) -> None:
    assert "0 to 2" in orders("consume", "orders", "--partition", "3", "--json").error["message"]


def test_bodies_that_are_no_text_are_escaped_or_base64(cli: Cli) -> None:
    cli("subject", "create", "raw", "--partitions", "1")
    cli("produce", "raw", "--key-separator", ":", stdin=b"k\xff:\x1b[31m\xfe\n")
    assert "k\\xff" in cli("consume", "raw").out
    assert "\\x1b[31m\\xfe" in cli("consume", "raw").out
    (found,) = cli("consume", "raw", "--json").json_lines
    assert (found["key_base64"], found["body_base64"]) == ("a/8=", "G1szMW3+")


def test_a_group_handles_everything_once(orders: Cli) -> None:
    first = orders("consume", "orders", "--group", "billing", "--json").json_lines
    assert len(first) == 30
    assert {one["group"] for one in first} == {"billing"}
    assert orders("consume", "orders", "--group", "billing", "--json").out == ""
    assert len(orders("consume", "orders", "--group", "other", "--json").json_lines) == 30


def test_a_group_with_a_limit_goes_on_where_it_was(orders: Cli) -> None:
    places = []
    for expected in (7, 7, 7, 7, 2):
        ran = orders("consume", "orders", "--group", "billing", "--limit", "7", "--json")
        assert (ran.code, ran.err) == (0, "")
        assert len(ran.json_lines) == expected
        places += [(one["partition"], one["offset"]) for one in ran.json_lines]
    assert len(places) == len(set(places)) == 30


def test_a_new_group_starts_where_it_is_told(orders: Cli) -> None:
    assert orders("consume", "orders", "--group", "late", "--from", "last", "--json").out == ""
    assert orders("group", "describe", "late", "--json").json["lag"] == 0


def test_a_group_takes_all_messages(orders: Cli) -> None:
    for option in (["--key", "c1"], ["--partition", "1"]):
        assert orders("consume", "orders", "--group", "g", *option).code == 2
    assert orders("consume", "orders", "--group", "../x", "--json").error["type"] == "InvalidName"


@pytest.mark.parametrize("order", ["key", "partition", "none"])
def test_a_group_is_handled_in_the_order_that_is_asked_for(orders: Cli, order: str) -> None:
    options = ["--group", "billing", "--order", order, "--json"]
    first = orders("consume", "orders", *options, "--limit", "12").json_lines
    rest = orders("consume", "orders", *options).json_lines
    places = [(one["partition"], one["offset"]) for one in first + rest]
    assert (len(first), len(places), len(set(places))) == (12, 30, 30)
    if order != "none":
        for key in {one["key"] for one in rest}:
            offsets = [one["offset"] for one in first + rest if one["key"] == key]
            assert offsets == sorted(offsets)
    assert orders("key", "list", "orders", "--group", "billing", "--json").json["keys"] == [], "--limit is no failure"


def test_how_a_group_handles_is_only_for_groups(orders: Cli) -> None:
    for options in (["--order", "key"], ["--max-attempts", "3"], ["--on-exhausted", "park"]):
        assert orders("consume", "orders", *options).code == 2
    assert orders("consume", "orders", "--group", "g", "--on-exhausted", "block").code == 2
    parking = ["--max-attempts", "3", "--on-exhausted", "park"]
    assert orders("consume", "orders", "--group", "g", *parking, "--json").error["type"] == "InvalidInput"
    found = orders("consume", "orders", "--group", "g", "--order", "key", *parking, "--json").json_lines
    assert len(found) == 30


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_a_following_member_after_a_commit(orders: Cli, number: signal.Signals) -> None:
    process = orders.process("consume", "orders", "--group", "billing", "--follow", "--json")
    assert process.stdout is not None
    lines = [process.stdout.readline() for _ in range(30)]
    assert all(line.startswith(b"{") for line in lines)
    time.sleep(0.3)  # the command waits for more messages
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, b"", b"")
    described = orders("group", "describe", "billing", "--json").json
    assert described["lag"] == 0
    assert described["subjects"][0]["members"] == []
    assert all(one["owner"] is None for one in described["subjects"][0]["partitions"])


def test_ctrl_c_ends_following_without_a_group(orders: Cli) -> None:
    process = orders.process("consume", "orders", "--follow")
    assert process.stdout is not None
    for _ in range(30):
        process.stdout.readline()
    time.sleep(0.3)  # the command waits for more messages
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, b"30 messages\n")


def test_following_goes_on_when_the_subject_grows(orders: Cli) -> None:
    process = orders.process("consume", "orders", "--follow", "--json")
    assert process.stdout is not None
    for _ in range(30):
        process.stdout.readline()
    orders("subject", "grow", "orders", "--partitions", "8")
    orders("produce", "orders", "--key-separator", ":", stdin="".join(f"new-{number}:x\n" for number in range(40)))
    found = {json.loads(process.stdout.readline())["partition"] for _ in range(40)}
    assert len(found) > 4, "there are more than it had"
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 0
    process.communicate()


def test_a_reader_that_goes_away_is_no_error(cli: Cli) -> None:
    cli("subject", "create", "long", "--partitions", "1")
    cli("produce", "long", stdin="".join(f"{number} {'x' * 200}\n" for number in range(5000)))
    for options in ([], ["--json"], ["--group", "g"]):
        process = cli.process("consume", "long", *options)
        assert process.stdout is not None
        assert process.stdout.readline()
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"")


def test_what_could_not_be_printed_is_not_committed(cli: Cli) -> None:
    """The command stops somewhere in the pipe's buffer. Every message that was not written is delivered again."""
    cli("subject", "create", "long", "--partitions", "1")
    cli("produce", "long", stdin="".join(f"{number} {'x' * 200}\n" for number in range(5000)))
    process = cli.process("consume", "long", "--group", "g", "--json")
    assert process.stdout is not None
    process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    process.communicate(timeout=60)
    lag = cli("group", "describe", "g", "--json").json["lag"]
    rest = cli("consume", "long", "--group", "g", "--json").json_lines
    assert 0 < lag < 5000
    assert [one["offset"] for one in rest] == list(range(5000 - lag, 5000))


def test_what_a_member_does_can_be_traced(orders: Cli, tmp_path: Path) -> None:
    """S5: the trace is the input of `inturn audit`."""
    traces = tmp_path / "traces"
    ran = orders("consume", "orders", "--group", "g", "--limit", "30", "--trace", str(traces), "--json")
    assert len(ran.json_lines) == 30
    assert sum(file.stat().st_size for file in traces.rglob("*") if file.is_file()) > 100
    error = orders("consume", "orders", "--trace", str(traces))
    assert error.code == 2
