"""What a drain keeps to: what the group's members say, and what it is asked for only if there are none. No Spark."""

from __future__ import annotations

import pytest

from inturn.model.commands import GroupDescription
from inturn.model.errors import InvalidInput
from inturn.spark.admission import tags_of


@pytest.mark.parametrize(
    ("agreed", "asked", "used"),
    [(None, None, None), (None, "a", "a"), ("", None, None), ("a || b", None, "a || b"), ("a", "a", "a")],
)
def test_tasks_want_the_tags_that_the_members_want(agreed: str | None, asked: str | None, used: str | None) -> None:
    """B7, S3"""
    assert tags_of(GroupDescription("orders", "g", (), (), tags=agreed), asked) == used


@pytest.mark.parametrize(("agreed", "asked"), [("", "a"), ("a", "b")])
def test_other_tags_than_those_of_the_members_are_refused(agreed: str, asked: str) -> None:
    """B7, S3"""
    with pytest.raises(InvalidInput, match="the members of group 'g' use"):
        tags_of(GroupDescription("orders", "g", (), (), tags=agreed), asked)
