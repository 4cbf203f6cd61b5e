"""B7: tag expressions, and batches without the filtered messages."""

from __future__ import annotations

from array import array

import pytest
from msgspec import structs

from inturn.model.batch import CHOSEN, BatchHeader, StoredBatch, contents, decode, encode, is_intact, slots_of, tagged
from inturn.model.errors import InvalidInput
from inturn.model.message import TAGS_LENGTH_MAX, Origin, Outgoing, TagFilter, tag_filter, tags_text
from inturn.model.settings import ConsumerSettings

ORIGIN = Origin("orders", 0)


def stored(messages: list[Outgoing], base: int = 0, compression: str | None = None) -> StoredBatch:
    batch = encode(messages, array("H", range(len(messages))), compression=compression)
    header = BatchHeader(batch.compression, len(batch.payload), batch.count, 1, base, 0, 0, 0, 0, 0, batch.checksum)
    return StoredBatch(header, memoryview(batch.payload))


def wanted(expression: str) -> TagFilter:
    found = tag_filter(expression)
    assert found is not None
    return found


MIXED = [
    Outgoing(b"0", b"k", tags=("paid",)),
    Outgoing(b"1", b"k", tags=("other",)),
    Outgoing(b"2", b"k"),
    Outgoing(b"3", None, tags=("other", "shipped")),
    Outgoing(b"4", b"paid"),  # a body or key that looks like a tag is no tag
]


@pytest.mark.parametrize(
    ("expression", "text"),
    [
        (None, ""),
        ("", ""),
        ("*", ""),
        ("  * ", ""),
        ("paid", "paid"),
        ("shipped||paid", "paid || shipped"),
        (" paid || shipped || paid ", "paid || shipped"),
        ("två ord", "två ord"),
    ],
)
def test_an_expression_has_one_form(expression: str | None, text: str) -> None:
    """B7: so members with the same expression agree."""
    assert tags_text(expression) == text
    assert tags_text(text) == text
    assert ConsumerSettings(tags=expression).tags == (text or None)


@pytest.mark.parametrize("expression", ["||", "a ||", "|| a", "a || || b", "* || a", 5, ["a"], "\ud800", "a" * 5000])
def test_what_is_no_expression_is_refused(expression: object) -> None:
    """B7"""
    with pytest.raises(InvalidInput, match="tags"):
        ConsumerSettings(tags=expression)  # type: ignore[arg-type]
    assert TAGS_LENGTH_MAX < 5000


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_a_batch_keeps_its_form_and_what_is_wanted(compression: str | None) -> None:
    """B7: offsets, slots and the count stay, and the checksum is right. Any of several tags matches."""
    if compression is not None:
        pytest.importorskip("zstandard")
    batch, left_out = tagged(stored(MIXED, 10, compression), wanted("paid || shipped"))
    assert batch is not None
    assert list(left_out) == [11, 12, 14]
    assert batch.header.compression == CHOSEN
    assert (batch.header.count, batch.header.base_offset) == (5, 10)
    assert is_intact(batch)
    assert list(slots_of(batch)) == [0, 1, 2, 3, 4]
    assert [(one.offset, one.body) for one in decode(batch, ORIGIN)] == [(10, b"0"), (13, b"3")]
    assert [None if one is None else one.body for one in contents(batch)] == [b"0", None, None, b"3", None]


def test_a_batch_of_which_all_is_wanted_stays_as_it_is() -> None:
    """B7"""
    batch = stored(MIXED[:1])
    assert tagged(batch, wanted("paid")) == (batch, ())


@pytest.mark.parametrize("messages", [MIXED, [Outgoing(b"paid", b"paid", properties={"paid": "paid"})] * 3])
def test_of_a_batch_that_nobody_wants_nothing_is_left(messages: list[Outgoing]) -> None:
    """B7: found from the bytes of the batch at once, or by looking at every message."""
    expression = "no such tag" if messages is MIXED else "paid"
    assert tagged(stored(messages, 7), wanted(expression)) == (None, range(7, 7 + len(messages)))


@pytest.mark.parametrize("length", [1, 31, 32, 255, 256, 4000])
def test_tags_of_any_length_are_found(length: int) -> None:
    """B7: the encoding of a tag depends on the length."""
    tag = "ä" * (length // 2) + "x" * (length % 2)
    messages = [Outgoing(b"0", tags=(tag,)), Outgoing(b"1")]
    batch, left_out = tagged(stored(messages), wanted(tag))
    assert batch is not None
    assert list(left_out) == [1]


def test_a_damaged_batch_is_left_to_its_reader() -> None:
    """B7: the tags are unknown, so the batch must not count as finished."""
    batch = stored(MIXED)
    payload = bytearray(batch.payload)
    payload[-3] ^= 1
    damaged = StoredBatch(batch.header, memoryview(bytes(payload)))
    assert tagged(damaged, wanted("no such tag")) == (damaged, ())
    header = structs.replace(batch.header, count=4)
    absurd = StoredBatch(header, batch.payload)
    assert tagged(absurd, wanted("paid"))[0] is absurd
