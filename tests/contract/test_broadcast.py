"""C12, C15: broadcast groups. Every member gets every message, in order, and stores offsets. There is no lease."""

from __future__ import annotations

import base64
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from inturn import Connection, ConsumerSettings, Context, Message, Strategy, suspend
from inturn.errors import GroupConflict, InvalidInput, OffsetsUnusable
from inturn.model.offsets import CommitTracker
from tests.contract.bed import WAIT_S, Bed, Seen, Witness, eventually, of_key, quick, send, send_all


def listen(mq: Connection, seen: Any, offsets: Path, name: str | None = None, subject: str = "line", **how: Any) -> Any:
    settings = how.pop("settings", quick())
    return mq.consumer(subject, "g", seen, mode="broadcast", offsets=offsets, name=name, settings=settings, **how)


def stored(offsets: Path, name: str = "consumer", subject: str = "line") -> dict[int, int]:
    content = json.loads((offsets / subject / "g" / f"{name}.json").read_text())["offsets"]
    return {row["partition"]: row["offset"] for row in content["partitions"]}


def test_every_member_gets_everything_in_the_order_of_each_key(mq: Connection, tmp_path: Path) -> None:
    send_all(mq, "orders", 200)
    one, other = Seen(), Seen()
    with (
        listen(mq, one, tmp_path, "one", "orders", order="key"),
        listen(mq, other, tmp_path, "other", "orders", order="key"),
    ):
        one.wait_for(200)
        other.wait_for(200)
        send(mq, "orders", "key-1:last")
        one.wait_for(201)
        other.wait_for(201)
    for seen in (one, other):
        assert len(seen.bodies) == 201
        for number in range(8):
            expected = [str(one) for one in range(200) if one % 8 == number] + ["last"] * (number == 1)
            assert of_key(seen.messages, f"key-{number}") == expected


def test_a_member_keeps_order_by_partition_unless_it_asks_for_something_else(line: Connection, tmp_path: Path) -> None:
    witness = Witness()
    send_all(line, "line", 100, witness=witness)
    seen = Seen()
    with listen(line, witness.watch(seen), tmp_path):
        seen.wait_for(100)
    assert seen.bodies == [b"%d" % number for number in range(100)]
    witness.judge(order="partition")


def test_it_goes_on_where_it_was_and_repeats_nothing_after_a_graceful_stop(
    bed: Bed, line: Connection, tmp_path: Path
) -> None:
    send_all(line, "line", 10)
    seen = Seen()
    with listen(line, seen, tmp_path):
        seen.wait_for(10)
    assert stored(tmp_path) == {0: 10}
    send(line, "line", "more")
    later = bed.reopen(flush="os")
    with listen(later, seen, tmp_path):
        seen.wait_for(11)
    assert seen.bodies[10:] == [b"more"]
    assert seen.epochs[0] < seen.epochs[10]


def test_a_member_that_vanishes_repeats_only_what_it_had_not_finished(line: Connection, tmp_path: Path) -> None:
    send(line, "line", *(f"k{number}:{number}" for number in range(10)))
    stuck = threading.Event()

    def handle(message: Message, context: Context) -> None:
        if message.body == b"4":
            stuck.wait(WAIT_S)

    first = Seen(handle)
    consumer = listen(line, first, tmp_path, order="key", settings=quick(concurrency=4))
    consumer.start()
    first.wait_for(10)
    eventually(lambda: consumer.leases()[0].committed == 4, "the offset is stored")
    eventually(lambda: consumer.statistics().ok_count == 9, "all others are done")
    eventually(lambda: _finished(tmp_path), "the finished ones are stored")
    consumer.kill()
    assert consumer.wait(WAIT_S)
    seen = Seen()
    with listen(line, seen, tmp_path, order="key"):
        seen.wait_for(1)
        send(line, "line", "k4:new")
        seen.wait_for(2)
    stuck.set()
    assert seen.bodies == [b"4", b"new"]


def _finished(offsets: Path) -> bool:
    """The finished messages above the offset are stored, too."""
    (row,) = json.loads((offsets / "line" / "g" / "consumer.json").read_text())["offsets"]["partitions"]
    tracker = CommitTracker(row["offset"], base64.b64decode(row["finished"]))
    return [offset for offset in range(10) if offset not in tracker] == [4]


def test_attempts_are_remembered_and_a_failing_message_holds_back_its_key_only(
    line: Connection, tmp_path: Path
) -> None:
    send(line, "line", "a:1", "b:2", "a:3")
    works = False
    seen = Seen(lambda message, context: suspend(0.02) if message.body == b"1" and not works else None)
    with listen(line, seen, tmp_path, order="key"):
        eventually(lambda: max(seen.attempts, default=0) >= 3, "it was tried three times")
    assert b"3" not in seen.bodies
    assert b"2" in seen.bodies
    works = True
    again = Seen()
    with listen(line, again, tmp_path, order="key"):
        again.wait_for(2)
    assert again.bodies == [b"1", b"3"]
    assert again.attempts[0] >= 4


@pytest.mark.parametrize(("start", "expected"), [("first", [b"0", b"1", b"2"]), ("last", []), (1, [b"1", b"2"])])
def test_a_new_member_starts_where_it_is_told(
    line: Connection, tmp_path: Path, start: Any, expected: list[bytes]
) -> None:
    send(line, "line", "0", "1", "2")
    seen = Seen()
    with listen(line, seen, tmp_path, start=start):
        send(line, "line", "new")
        seen.wait_for(len(expected) + 1)
    assert seen.bodies == [*expected, b"new"]
    with listen(line, seen, tmp_path, start="first"):
        send(line, "line", "newer")
        seen.wait_for(len(expected) + 2)
    assert seen.bodies[-1] == b"newer", "once it has offsets, start says nothing"


def test_where_it_starts_is_fixed_when_it_starts_also_if_it_never_commits(line: Connection, tmp_path: Path) -> None:
    send(line, "line", "0", "1")
    consumer = listen(line, Seen(), tmp_path, start="last")
    consumer.start()
    consumer.kill()
    assert consumer.wait(WAIT_S)
    send(line, "line", "2")
    seen = Seen()
    with listen(line, seen, tmp_path, start="last"):
        seen.wait_for(1)
    assert seen.bodies == [b"2"]


def test_two_consumers_cannot_have_the_same_offsets(line: Connection, tmp_path: Path) -> None:
    refused = pytest.raises(OffsetsUnusable, match="another consumer uses them; stop it, or give each")
    with listen(line, Seen(), tmp_path, "twin"), refused:
        listen(line, Seen(), tmp_path, "twin").start()
    with listen(line, Seen(), tmp_path, "twin"):
        pass


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: b"",
        lambda text: b"no json",
        lambda text: b"[]",
        lambda text: text[:-20],
        lambda text: text.replace(b'"offset":3', b'"offset":2'),
        lambda text: text.replace(b"checksum", b"chicksum"),
    ],
)
def test_damaged_offsets_are_refused_with_what_to_do(line: Connection, tmp_path: Path, damage: Any) -> None:
    send(line, "line", "0", "1", "2")
    seen = Seen()
    with listen(line, seen, tmp_path):
        seen.wait_for(3)
    path = tmp_path / "line" / "g" / "consumer.json"
    before = path.read_bytes()
    path.write_bytes(damage(before))
    with pytest.raises(OffsetsUnusable, match=r"consumer\.json': they are damaged.*remove it to begin"):
        listen(line, Seen(), tmp_path).start()
    path.write_bytes(before)
    with listen(line, seen, tmp_path):
        send(line, "line", "3")
        seen.wait_for(4)
    assert len(seen.bodies) == 4


def test_offsets_of_another_log_are_refused(bed: Bed, line: Connection, tmp_path: Path) -> None:
    send_all(line, "line", 5)
    seen = Seen()
    with listen(line, seen, tmp_path):
        seen.wait_for(5)
    other = Bed(tmp_path / "other")
    elsewhere = other.open(flush="os")
    elsewhere.create_subject("line", partitions=1)
    with pytest.raises(OffsetsUnusable, match="5 for partition 0, which ends at 0: they are of another log"):
        listen(elsewhere, Seen(), tmp_path).start()
    other.close()


def test_the_node_knows_its_members_by_name_and_nothing_else(line: Connection, tmp_path: Path) -> None:
    send_all(line, "line", 3)
    seen = Seen()
    with listen(line, seen, tmp_path, "cache") as consumer:
        seen.wait_for(3)
        found = line.group("line", "g").describe()
        assert (found.mode, found.members, found.partitions, found.lag) == ("broadcast", (consumer.name,), (), 0)
        with pytest.raises(GroupConflict, match="remove its offset file"):
            line.group("line", "g").reset("first")
    other = line.consumer("line", "g", Seen(), settings=quick())
    other.start()
    with pytest.raises(GroupConflict, match="mode='broadcast'"):
        other.wait(WAIT_S)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"offsets": None}, "give offsets="),
        ({"offsets": ""}, "offsets"),
        ({"settings": ConsumerSettings(max_attempts=3)}, "no retry or dead-letter subject"),
        ({"settings": ConsumerSettings(strategy=Strategy.BEST_EFFORT)}, "no retry or dead-letter subject"),
        ({"settings": ConsumerSettings(trace="x")}, "audit"),
        ({"name": "../up"}, "consumer name"),
    ],
)
def test_what_a_broadcast_group_cannot_do_is_said_at_once(
    line: Connection, tmp_path: Path, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(InvalidInput, match=complaint):
        line.consumer("line", "g", Seen(), **{"mode": "broadcast", "offsets": tmp_path, **options}).start()


def test_a_folder_that_cannot_be_written_is_an_error_at_the_start(line: Connection, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(InvalidInput, match="cannot be used"):
        listen(line, Seen(), tmp_path / "file").start()


def test_without_order_what_fails_is_repeated_in_place(line: Connection, tmp_path: Path, quiet: None) -> None:
    send(line, "line", "0", "1", "2")

    def handle(message: Message, context: Context) -> None:
        if message.body == b"1" and context.attempt < 3:
            raise RuntimeError("not now")

    seen = Seen(handle)
    with listen(line, seen, tmp_path, order="none", settings=quick(backoff_min_s=0.01)):
        seen.wait_for(5)
    assert sorted(seen.bodies) == [b"0", b"1", b"1", b"1", b"2"]
