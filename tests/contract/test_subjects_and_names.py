"""Subjects and valid names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from inturn import Connection, Limits, ProducerSettings
from inturn.model.errors import AlreadyExists, InvalidInput, InvalidName, NotFound
from tests.contract.bed import Bed, Seen, quick

BAD_NAMES: list[object] = [
    "",
    "..",
    "a..b",
    "../x",
    "a/b",
    "a\x00",
    "%x",
    "ünï",
    "x" * 201,
    "a b",
    "a\n",
    None,
    5,
    b"x",
]


def not_refused(
    values: Iterable[object], call: Callable[[Any], object], kind: type[Exception], words: str = ""
) -> dict[str, str]:
    """The values that are not refused in these words, with the answer to each.

    All values go through a single connection: the start of a bed takes longer than all refusals.
    """
    found = {}
    for value in values:
        try:
            found[repr(value)] = f"accepted: {call(value)!r}"
        except Exception as error:
            if not (isinstance(error, kind) and words in str(error)):
                found[repr(value)] = repr(error)
    return found


def test_a_bad_name_is_no_subject(mq: Connection) -> None:
    assert not_refused(BAD_NAMES, mq.create_subject, InvalidName, "subject name") == {}
    assert [subject.name for subject in mq.subjects()] == ["orders"]


def test_a_bad_name_is_no_group(mq: Connection) -> None:
    assert not_refused(BAD_NAMES, lambda name: mq.consumer("orders", name, Seen()), InvalidName, "group name") == {}
    assert mq.groups() == []


def test_a_bad_name_is_no_producer(mq: Connection) -> None:
    names = [name for name in BAD_NAMES if name is not None]
    assert not_refused(names, mq.producer, InvalidName, "producer name") == {}


def test_a_bad_name_is_no_consumer(mq: Connection) -> None:
    """The name of a consumer appears in descriptions, errors and the database, like other names."""
    names = [5, "", "a\x00", "x" * 201]
    assert not_refused(names, lambda name: mq.consumer("orders", "billing", Seen(), name=name), InvalidInput) == {}


def test_the_longest_name_can_be_used(mq: Connection) -> None:
    name = "x" * 200
    mq.create_subject(name, 1)
    with mq.producer(name) as producer:
        producer.send_sync(name, b"", key="k")
    seen = Seen()
    with mq.consumer(name, name, seen):
        seen.wait_for(1)


def test_names_that_differ_in_case_are_two_subjects(mq: Connection) -> None:
    mq.create_subject("Orders", 1)
    with mq.producer() as producer:
        producer.send_sync("Orders", b"upper", key="k")
        producer.send_sync("orders", b"lower", key="k")
    assert [message.body for message in mq.reader("Orders")] == [b"upper"]
    assert [message.body for message in mq.reader("orders")] == [b"lower"]


def test_a_number_of_partitions_that_cannot_be_is_refused(mq: Connection) -> None:
    """M3."""
    counts = [0, -1, 1025, True, False, 1.0, "4", None]
    assert not_refused(counts, lambda count: mq.create_subject("new", count), InvalidInput, "1 to 1024") == {}
    with pytest.raises(NotFound):
        mq.subject("new")


def test_the_same_subject_again_is_no_error(mq: Connection) -> None:
    first = mq.create_subject("new", 3, limits=Limits(body_bytes=10))
    assert mq.create_subject("new", 3, limits=Limits(body_bytes=10)) == first


@pytest.mark.parametrize("limits", [Limits(body_bytes=25 << 20), Limits(properties_bytes=25 << 20)], ids=repr)
def test_messages_that_no_frame_can_carry_are_refused_where_the_subject_is_made(mq: Connection, limits: Limits) -> None:
    with pytest.raises(InvalidInput, match="the largest"):
        mq.create_subject("large", 1, limits=limits)
    assert "large" not in [subject.name for subject in mq.subjects()]


def test_the_largest_message_goes_through_and_is_handled(mq: Connection) -> None:
    largest = Limits(body_bytes=23 << 20)
    mq.create_subject("large", 1, limits=largest)
    body = bytes(largest.body_bytes)
    with mq.producer(settings=ProducerSettings(batch_bytes=24 << 20)) as producer:
        for _ in range(2):
            producer.send("large", body, key="k")
    seen = Seen()
    with mq.consumer("large", "g", seen, settings=quick()):
        seen.wait_for(2, 20)
    assert [len(message.body) for message in seen.messages] == [len(body)] * 2


@pytest.mark.parametrize(
    "other",
    [{"partitions": 5}, {"routing": "selector"}, {"strategy": "best-effort"}, {"limits": Limits(body_bytes=10)}],
    ids=repr,
)
def test_the_same_subject_with_other_settings_is_refused(mq: Connection, other: dict[str, object]) -> None:
    with pytest.raises(AlreadyExists, match="'orders' exists"):
        mq.create_subject("orders", **{"partitions": 4, **other})  # type: ignore[arg-type]
    assert mq.subject("orders").partition_count == 4


@pytest.mark.parametrize("wrong", [{"routing": "hash"}, {"strategy": "sloppy"}], ids=repr)
def test_a_choice_that_is_not_there_is_refused_with_those_that_are(mq: Connection, wrong: dict[str, str]) -> None:
    with pytest.raises(InvalidInput, match="use '"):
        mq.create_subject("new", **wrong)  # type: ignore[arg-type]


def test_subjects_are_remembered(bed: Bed) -> None:
    """M3."""
    mq = bed.open()
    made = [mq.create_subject(name, count) for name, count in (("b", 2), ("a", 3))]
    mq = bed.reopen()
    assert mq.subjects() == made
    assert mq.subject("a").route == made[1].route


def test_every_slot_has_one_partition_and_their_names_do_not_tell_the_subject(mq: Connection) -> None:
    """M1, M3."""
    route = mq.subject("orders").route
    assert sorted(set(route.by_slot)) == [0, 1, 2, 3]
    assert len(route.by_slot) == 1024
    assert len({str(partition) for partition in route.partitions}) == 4
    assert not any("orders" in partition.name for partition in route.partitions)


def test_one_partition_is_global_order(mq: Connection) -> None:
    """P1."""
    mq.create_subject("edge", 1)
    with mq.producer() as producer:
        assert [producer.send_sync("edge", b"", key=f"{n}").offset for n in range(20)] == list(range(20))


def test_what_is_not_there_is_not_found(mq: Connection) -> None:
    for look in (mq.subject, mq.describe_subject, mq.reader):
        with pytest.raises(NotFound, match="nothing"):
            look("nothing")
    with pytest.raises(NotFound):
        mq.consumer("nothing", "g", Seen())
    with pytest.raises(NotFound):
        mq.group("orders", "nobody").describe()
    with pytest.raises(NotFound):
        mq.group("orders", "nobody").reset("first")
