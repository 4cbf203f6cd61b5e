from __future__ import annotations

import io
import json
import signal
import time
from pathlib import Path

import pytest

from inturn.cli.produce import Keying, read_lines
from tests.cli.conftest import Cli
from tests.contract.bed import eventually


def _bodies(cli: Cli, subject: str = "orders") -> list[str]:
    return [one["body"] for one in cli("consume", subject, "--json").json_lines]


@pytest.fixture
def one(cli: Cli) -> Cli:
    """The subject orders with a single partition, so that all messages have an order."""
    assert cli("subject", "create", "orders", "--partitions", "1").code == 0
    return cli


def test_lines_of_a_file_become_messages_in_their_order(one: Cli, tmp_path: Path) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(b"first\r\n\nthird \nlast")
    sent = one("produce", "orders", str(file), "--json").json
    assert (sent["sent"], sent["skipped"], sent["partitions"]) == (4, 0, [{"partition": 0, "sent": 4}])
    assert _bodies(one) == ["first", "", "third ", "last"]


def test_lines_of_a_pipe_become_messages(one: Cli) -> None:
    process = one.process("produce", "orders", "--json", "--flush", "os")
    out, err = process.communicate(b"a\nb\n")
    assert (process.returncode, err) == (0, b"")
    assert json.loads(out)["sent"] == 2
    assert _bodies(one) == ["a", "b"]


def test_nothing_to_send_is_no_error(one: Cli) -> None:
    assert one("produce", "orders", "--json", stdin="").json["sent"] == 0
    assert "0 messages" in one("produce", "orders", "-", stdin="").out


def test_the_same_key_goes_to_the_same_partition(orders: Cli) -> None:
    homes: dict[str, set[int]] = {}
    numbers: dict[str, list[int]] = {}
    for one in orders("consume", "orders", "--json").json_lines:
        homes.setdefault(one["key"], set()).add(one["partition"])
        numbers.setdefault(one["key"], []).append(json.loads(one["body"])["n"])
    assert sorted(homes) == ["c0", "c1", "c2", "c3", "c4"]
    assert all(len(partitions) == 1 for partitions in homes.values())
    assert all(of_key == sorted(of_key) for of_key in numbers.values())


def test_a_key_for_all_and_a_key_before_a_separator(one: Cli) -> None:
    one("produce", "orders", "--key", "all", stdin="x\n")
    one("produce", "orders", "--key-separator", "::", stdin="me::a::b\n")
    found = one("consume", "orders", "--json").json_lines
    assert [(one["key"], one["body"]) for one in found] == [("all", "x"), ("me", "a::b")]


@pytest.mark.parametrize(
    ("options", "bad", "why"),
    [
        (["--json-lines"], "{", "not JSON"),
        (["--json-lines"], "[1]", "a JSON list, not an object"),
        (["--key-field", "a.b"], '{"a": 1}', "no field 'a.b'"),
        (["--key-field", "a"], '{"a": null}', "field 'a' is a null"),
        (["--key-field", "a"], '{"a": 1.5}', "field 'a' is a number"),
        (["--key-field", "a"], '{"a": true}', "field 'a' is a boolean"),
        (["--key-field", "a"], '{"a": ""}', "the key is empty"),
        (["--key-separator", ":"], "none", "no separator"),
        (["--key-separator", ":"], ":none", "the key is empty"),
    ],
)
def test_a_bad_line_is_named_and_what_went_before_stays(one: Cli, options: list[str], bad: str, why: str) -> None:
    good = {"--key-field": '{"a": {"b": 1}}' if "a.b" in options else '{"a": "k"}', "--json-lines": "{}"}
    line = good.get(options[0], "k:v")
    text = f"{line}\n{line}\n{bad}\n{line}\n"
    error = one("produce", "orders", *options, "--json", stdin=text).error
    assert (error["type"], error["line"], error["sent"]) == ("BadLine", 3, 2)
    assert why in error["message"]
    assert len(_bodies(one)) == 2
    skipped = one("produce", "orders", *options, "--skip-bad", "--json", stdin=text).json
    assert (skipped["sent"], skipped["skipped"]) == (3, 1)


def test_people_are_told_the_bad_line_too(one: Cli) -> None:
    ran = one("produce", "orders", "--json-lines", stdin="{}\nx\n")
    assert ran.code == 1
    assert "line 2: not JSON" in ran.err
    ran = one("produce", "orders", "--json-lines", "--skip-bad", stdin="{}\nx\n")
    assert ran.code == 0
    assert "skipped line 2" in ran.err
    assert "1 bad line skipped" in ran.err


def test_a_line_over_the_limit_is_a_bad_line(cli: Cli) -> None:
    cli("subject", "create", "orders", "--partitions", "1", "--max-body-bytes", "10", "--max-key-bytes", "10")
    for length in (11, 21, 5000):
        error = cli("produce", "orders", "--json", stdin=f"ok\n{'x' * length}\n").error
        assert (error["type"], error["line"], error["sent"]) == ("BadLine", 2, 1)
    assert cli("produce", "orders", "--skip-bad", "--json", stdin=f"{'x' * 5000}\nok\n").json["sent"] == 1


def test_keys_cannot_come_from_two_places(one: Cli) -> None:
    ran = one("produce", "orders", "--key", "a", "--key-field", "b", stdin="")
    assert ran.code == 2
    assert "--key and --key-field" in ran.err
    assert one("produce", "orders", "--key", "", stdin="").code == 2


def test_a_file_that_is_not_there_is_wrong_usage(one: Cli) -> None:
    assert one("produce", "orders", "nosuch.txt").code == 2


def test_a_subject_with_selector_takes_a_partition(cli: Cli) -> None:
    cli("subject", "create", "chosen", "--partitions", "3", "--routing", "selector")
    error = cli("produce", "chosen", "--key", "k", "--json", stdin="x\n").error
    assert "--partition" in error["message"]
    assert "0 to 2" in cli("produce", "chosen", "--partition", "3", "--json", stdin="x\n").error["message"]
    sent = cli("produce", "chosen", "--key", "k", "--partition", "2", "--json", stdin="x\n").json
    assert sent["partitions"] == [{"partition": 2, "sent": 1}]
    # On a subject with selectors the slot does not tell the partition, so the command reads all partitions.
    assert [one["partition"] for one in cli("consume", "chosen", "--key", "k", "--json").json_lines] == [2]


def test_a_subject_with_slots_takes_no_partition(one: Cli) -> None:
    error = one("produce", "orders", "--partition", "0", "--json", stdin="x\n").error
    assert "leave --partition out" in error["message"]


def test_a_producer_may_have_a_name(one: Cli) -> None:
    assert one("produce", "orders", "--producer", "nightly", "--json", stdin="x\n").json["sent"] == 1
    assert one("produce", "orders", "--producer", "../x", "--json", stdin="x\n").error["type"] == "InvalidName"


def test_ctrl_c_tells_how_many_were_stored(one: Cli) -> None:
    process = one.process("produce", "orders")
    assert process.stdin is not None
    process.stdin.write(b"a\nb\n")
    process.stdin.flush()
    segment = one.data / "log" / "p1" / "00000000000000000000.log"
    eventually(lambda: segment.stat().st_size > 0, "something is stored", 60.0)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, b"")
    assert b"stored and stay" in err


def test_lines_are_read_with_bounded_memory() -> None:
    stream = io.BytesIO(b"short\n" + b"x" * 100 + b"\nexactly-10\r\n" + b"y" * 12)
    lines = [(line.number, line.data[:12], line.is_cut) for line in read_lines(stream, 10)]
    assert lines == [
        (1, b"short", False),
        (2, b"x" * 12, True),
        (3, b"exactly-10", False),
        (4, b"y" * 12, True),
    ]


def test_a_whole_number_is_a_key() -> None:
    assert Keying(field=("id",)).split(b'{"id": 7}') == (b"7", b'{"id": 7}')
