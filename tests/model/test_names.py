"""Names of subjects, groups and producers."""

from __future__ import annotations

import pytest

from inturn.model.errors import InvalidInput, InvalidName
from inturn.model.subject import NAME_LENGTH_MAX, check_name

GOOD = ["a", "A", "orders", "orders.eu-1_x", "0", "-", "_", "a.b", ".a", "a.", "x" * NAME_LENGTH_MAX]
BAD: list[object] = [
    "",
    ".",
    "..",
    "...",
    "a..b",
    "../etc/passwd",
    "a/b",
    "a\\b",
    "a b",
    " a",
    "a\n",
    "a\x00b",
    "\x00",
    "%",
    "%retry",
    "größe",
    "ａ",
    "１",
    "x" * (NAME_LENGTH_MAX + 1),
    None,
    7,
    True,
    b"orders",
    ["orders"],
]


@pytest.mark.parametrize("name", GOOD)
def test_a_name_of_the_alphabet_is_returned_as_it_is(name: str) -> None:
    assert check_name("subject", name) == name


@pytest.mark.parametrize("name", BAD, ids=repr)
def test_any_other_name_is_refused_with_the_alphabet(name: object) -> None:
    with pytest.raises(InvalidName) as caught:
        check_name("group", name)
    assert isinstance(caught.value, InvalidInput)
    assert isinstance(caught.value, ValueError)
    assert "group name" in str(caught.value)
    assert "A-Z a-z 0-9 . _ -" in str(caught.value)
    assert (caught.value.kind, caught.value.name) == ("group", name)


def test_percent_is_for_our_own_names_only() -> None:
    assert check_name("subject", "%retry.orders", reserved=True) == "%retry.orders"
    with pytest.raises(InvalidName, match="reserved"):
        check_name("subject", "%retry.orders")


def test_a_reserved_name_keeps_to_the_other_rules() -> None:
    with pytest.raises(InvalidName):
        check_name("subject", "%../x", reserved=True)
