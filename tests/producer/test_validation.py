"""Which messages a producer accepts, and the partition of a message: checked before queueing."""

from __future__ import annotations

import random

import pytest

from inturn.model.errors import InvalidInput, LimitExceeded
from inturn.model.routing import slot_of
from inturn.model.settings import Limits, ProducerSettings, Routing
from inturn.producer.core import ProducerCore
from tests.producer.fake_log import messages_of, some_core, some_subject

SMALL = Limits(body_bytes=10, key_bytes=4, properties_bytes=8)


def only_message(core: ProducerCore):
    (attempt,) = core.poll(0.0)
    (message,) = messages_of(attempt.command.batch)
    return attempt.command.partition, message


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"body": b"x" * 11}, "Limits.body_bytes"),
        ({"key": b"x" * 5}, "Limits.key_bytes"),
        ({"key": "äää"}, "Limits.key_bytes"),
        ({"properties": {"name": "value"}}, "Limits.properties_bytes"),
        ({"tags": ("12345", "6789")}, "Limits.properties_bytes"),
        ({"message_id": "12345"}, "Limits.key_bytes"),
    ],
)
def test_too_much_is_refused_with_the_name_of_the_limit(given: dict[str, object], setting: str) -> None:
    core = some_core(some_subject(limits=SMALL))
    values: dict[str, object] = {"body": b"", "key": None, **given}
    with pytest.raises(LimitExceeded, match=setting) as caught:
        core.add("orders", born_at_ms=0, **values)  # type: ignore[arg-type]
    assert caught.value.size > caught.value.limit
    assert core.is_idle
    assert core.waiting_bytes == 0


def test_exactly_the_limit_is_accepted() -> None:
    core = some_core(some_subject(limits=SMALL))
    core.add("orders", b"x" * 10, b"1234", 0, ("12345678",), {"name": "valu"}, "1234")
    _, message = only_message(core)
    assert message.body == b"x" * 10


@pytest.mark.parametrize(
    "given",
    [
        {"body": "text"},
        {"body": None},
        {"body": 5},
        {"key": 5},
        {"key": ("a",)},
        {"properties": {"a": 1}},
        {"properties": {1: "a"}},
        {"properties": ["a"]},
        {"tags": "abc"},
        {"tags": (1,)},
        {"message_id": 5},
        {"key": "\ud800"},
        {"properties": {"a": "\ud800"}},
    ],
    ids=repr,
)
def test_values_of_the_wrong_kind_are_refused_without_a_trace(given: dict[str, object]) -> None:
    core = some_core()
    values: dict[str, object] = {"body": b"", "key": None, **given}
    with pytest.raises(InvalidInput):
        core.add("orders", born_at_ms=0, **values)  # type: ignore[arg-type]
    assert core.is_idle
    assert core.waiting_bytes == 0


@pytest.mark.parametrize("body", [b"abc", bytearray(b"abc"), memoryview(b"abc")])
def test_any_kind_of_bytes_is_a_body(body: bytes) -> None:
    core = some_core()
    core.add("orders", body, bytearray(b"k"), 0)  # type: ignore[arg-type]
    _, message = only_message(core)
    assert (message.body, message.key) == (b"abc", b"k")


def test_what_the_caller_changes_later_is_not_sent() -> None:
    """The message is fixed at `send`: later changes of a reused dict must not change the message."""
    core = some_core()
    properties = {"n": "1"}
    core.add("orders", b"a", b"k", 0, (), properties)
    properties["n"] = "2"
    core.add("orders", b"b", b"k", 0, (), properties)
    (attempt,) = core.poll(0.0)
    assert [message.properties for message in messages_of(attempt.command.batch)] == [{"n": "1"}, {"n": "2"}]


def test_tags_that_can_be_read_once_are_kept_or_refused() -> None:
    """Tags are never lost silently."""
    core = some_core()
    try:
        core.add("orders", b"a", b"k", 0, (tag for tag in ("x", "y")))  # type: ignore[arg-type]
    except InvalidInput:
        return
    _, message = only_message(core)
    assert message.tags == ("x", "y")


def test_a_key_goes_to_the_partition_of_its_slot() -> None:
    """P2, M3."""
    subject = some_subject(8)
    core = some_core(subject)
    for number in range(200):
        key = f"key {number}"
        batch = core.add("orders", b"", key, 0)
        assert batch.partition == slot_of(key.encode()) * 8 // 1024
        assert batch.slots[-1] == slot_of(key.encode())
        assert core.add("orders", b"", key.encode(), 0).partition == batch.partition


def test_messages_without_a_key_are_spread_over_all_partitions() -> None:
    """P2."""
    core = ProducerCore(1, 0, ProducerSettings(), random.Random(3))
    core.learn(some_subject(8))
    counts = [0] * 8
    for _ in range(4000):
        counts[core.add("orders", b"", None, 0).partition] += 1
    assert min(counts) > 300
    assert max(counts) < 700


def selector_core() -> ProducerCore:
    return some_core(some_subject(4, routing=Routing.SELECTOR))


def test_a_selector_chooses_and_its_argument_is_the_key() -> None:
    """P2."""
    core = selector_core()
    core.add("orders", b"a", None, 0, selector=lambda partitions, message, arg: int(str(arg)) % len(partitions), arg=7)
    partition, message = only_message(core)
    assert (partition, message.key) == (3, b"7")


def test_a_key_given_beside_a_selector_is_the_key() -> None:
    """P2."""
    core = selector_core()
    core.add("orders", b"a", "mine", 0, selector=lambda partitions, message, arg: 2, arg="other")
    partition, message = only_message(core)
    assert (partition, message.key) == (2, b"mine")


@pytest.mark.parametrize("wrong", [-1, 4, True, None, "1", 1.0])
def test_a_selector_that_names_no_partition_is_refused(wrong: object) -> None:
    """P2."""
    core = selector_core()
    with pytest.raises(InvalidInput, match="0 to 3"):
        core.add("orders", b"a", None, 0, selector=lambda *_: wrong, arg="k")  # type: ignore[arg-type]
    assert core.is_idle


def test_a_selector_that_raises_leaves_nothing_behind() -> None:
    core = selector_core()
    with pytest.raises(ZeroDivisionError):
        core.add("orders", b"a", None, 0, selector=lambda *_: 1 // 0, arg="k")
    assert core.is_idle
    assert core.waiting_bytes == 0


def test_an_argument_that_cannot_be_a_key_needs_a_key() -> None:
    core = selector_core()
    with pytest.raises(InvalidInput, match="order key as key="):
        core.add("orders", b"a", None, 0, selector=lambda *_: 0, arg={"a": 1})
    core.add("orders", b"a", "k", 0, selector=lambda *_: 0, arg={"a": 1})


def test_a_selector_on_a_subject_of_slots_is_refused() -> None:
    """P2: otherwise messages of the same key could be in two partitions."""
    core = some_core()
    with pytest.raises(InvalidInput, match="routes by slots"):
        core.add("orders", b"a", "k", 0, selector=lambda *_: 0)


def test_a_key_without_a_selector_on_a_subject_of_selectors_is_refused() -> None:
    """P2."""
    with pytest.raises(InvalidInput, match="give selector="):
        selector_core().add("orders", b"a", "k", 0)


def test_no_key_and_no_selector_goes_anywhere() -> None:
    core = selector_core()
    assert {core.add("orders", b"", None, 0).partition for _ in range(200)} == {0, 1, 2, 3}
