"""Sets of slots, and the encoding of slot sets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inturn.model.errors import InvalidInput
from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet

slots = st.sets(st.integers(0, SLOT_COUNT - 1), max_size=40)


@given(slots)
def test_a_set_is_what_it_was_made_of(chosen: set[int]) -> None:
    found = SlotSet.of(chosen)
    assert list(found) == sorted(chosen)
    assert len(found) == len(chosen)
    assert all(slot in found for slot in chosen)
    assert [slot for slot in range(SLOT_COUNT) if found.flags[slot]] == sorted(chosen)


@given(slots)
def test_a_set_comes_back_from_its_bytes(chosen: set[int]) -> None:
    found = SlotSet.of(chosen)
    data = found.to_bytes()
    assert len(data) == SLOT_COUNT // 8
    assert SlotSet.from_bytes(data) == found


@given(slots)
def test_the_bit_of_a_slot_is_where_it_is_said_to_be(chosen: set[int]) -> None:
    data = SlotSet.of(chosen).to_bytes()
    for slot in range(SLOT_COUNT):
        assert bool(data[slot // 8] >> slot % 8 & 1) is (slot in chosen)


@given(slots, slots)
def test_sets_overlap_if_they_have_a_slot_in_common(one: set[int], other: set[int]) -> None:
    assert SlotSet.of(one).overlaps(SlotSet.of(other)) is bool(one & other)


def test_all_slots_are_no_bytes() -> None:
    assert ALL_SLOTS.to_bytes() == b""
    assert SlotSet.from_bytes(b"") is ALL_SLOTS
    assert SlotSet.of(range(SLOT_COUNT)) == ALL_SLOTS
    assert ALL_SLOTS.is_all
    assert len(ALL_SLOTS) == SLOT_COUNT
    assert SlotSet.from_bytes(b"\xff" * 128) == ALL_SLOTS
    assert not SlotSet.of(range(SLOT_COUNT - 1)).is_all


def test_no_slots_are_not_all_slots() -> None:
    none = SlotSet.of(())
    assert none.to_bytes() == bytes(128)
    assert SlotSet.from_bytes(bytes(128)) == none
    assert not none
    assert not none.overlaps(ALL_SLOTS)


@pytest.mark.parametrize("slot", [-1, SLOT_COUNT])
def test_a_slot_that_there_is_not_is_refused(slot: int) -> None:
    with pytest.raises(InvalidInput, match=f"slot {slot}: there are slots 0 to 1023"):
        SlotSet.of([slot])


@pytest.mark.parametrize("size", [1, 127, 129])
def test_a_set_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(InvalidInput, match=f"a set of slots in {size} bytes: send 128, or none for all slots"):
        SlotSet.from_bytes(bytes(size))
