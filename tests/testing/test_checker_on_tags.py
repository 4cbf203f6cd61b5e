"""The order checker on groups that leave out messages without the wanted tags."""

from __future__ import annotations

import pytest

from inturn.testing.checker import ViolationKind
from inturn.testing.history import GroupFiltered, SendAcknowledged
from tests.testing.checker_story import Order, Story, broken, kept

ORDERS: list[Order] = ["partition", "key"]


def filtered(wanted: tuple[int, ...], unwanted: tuple[int, ...]) -> Story:
    """A group that wants the tag "y". Other messages have "x" or no tag."""
    story = Story()
    for offset in sorted((*wanted, *unwanted)):
        story.keys[offset] = b"k"
        tags = ("x", "y") if offset in wanted else ("x",) if offset % 2 else ()
        story.history.record(SendAcknowledged("s", 0, offset, b"k", f"m{offset}", tags))
    story.history.record(GroupFiltered("s", "g", "y || z"))
    return story


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_wanted_may_be_passed_by(order: Order) -> None:
    story = filtered((0, 3), (1, 2, 4)).grant("a", 1).run("a", 1, 0, 3).commit("a", 1, 1, 2, 3).commit("a", 1, 5)
    assert kept(story, order).finished == 2


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_wanted_may_not(order: Order) -> None:
    broken(filtered((0, 2), (1,)).grant("a", 1).run("a", 1, 2), ViolationKind.SKIPPED, ViolationKind.LOST, order=order)
    story = filtered((0, 2), (1,)).grant("a", 1).run("a", 1, 0).commit("a", 1, 3)
    broken(story, ViolationKind.PREMATURE_COMMIT, ViolationKind.LOST, order=order)


@pytest.mark.parametrize("order", ORDERS)
def test_what_is_not_wanted_must_not_be_handled(order: Order) -> None:
    story = filtered((0,), (1,)).grant("a", 1).run("a", 1, 0, 1)
    assert ViolationKind.UNEXPECTED in story.check(order).kinds()


def test_what_nobody_acknowledged_can_be_named_by_offset() -> None:
    story = filtered((0, 2), ()).grant("a", 1).run("a", 1, 0, 2).commit("a", 1, 3)
    ids: dict[tuple[str, int, int], str | None] = {("s", 0, offset): None for offset in (0, 1, 2)}
    broken(story, ViolationKind.PREMATURE_COMMIT, ViolationKind.SKIPPED, stored=ids)
    story.history.record(GroupFiltered("s", "g", "y", {0: (1,)}))
    kept(story, stored=ids)


def test_another_group_wants_all() -> None:
    story = filtered((0,), (1,)).grant("a", 1).run("a", 1, 0).commit("a", 1, 2)
    kept(story)
    story.history.events = [one for one in story.history if not isinstance(one, GroupFiltered)]
    broken(story, ViolationKind.PREMATURE_COMMIT, ViolationKind.LOST)
