"""A subject and what was decided when it was created.

Names of subjects, groups and producers. They are kept in the database, never used as file names.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from inturn.model.errors import InvalidName
from inturn.model.routing import Route
from inturn.model.settings import Keyless, Limits, Routing, Strategy

NAME_LENGTH_MAX = 200
RESERVED_LENGTH_MAX = 2 * NAME_LENGTH_MAX + 20
RESERVED = "%"
_ALLOWED = re.compile(r"[A-Za-z0-9._%-]+\Z", re.ASCII)


def check_name(kind: str, name: object, *, reserved: bool = False) -> str:
    """Return the name if it may be used, raise `InvalidName` if not. `reserved` allows our own `%` names."""
    if not isinstance(name, str):
        raise InvalidName(kind, name, f"is a {type(name).__name__}, not a str")
    if not 1 <= len(name) <= (RESERVED_LENGTH_MAX if reserved else NAME_LENGTH_MAX):
        raise InvalidName(kind, name, f"has {len(name)} characters")
    if not _ALLOWED.match(name):
        raise InvalidName(kind, name, "has a character that is not allowed")
    if set(name) == {"."} or ".." in name:
        raise InvalidName(kind, name, "has '..' in it or is only dots")
    if RESERVED in name and not reserved:
        raise InvalidName(kind, name, f"has {RESERVED!r}, which is reserved")
    return name


def retry_subject(group: str, subject: str) -> str:
    """Where messages wait that failed in this group under best effort; one partition per delay."""
    return f"%retry%{group}%{subject}"


def dead_letter_subject(group: str, subject: str) -> str:
    """Where messages go that this group has given up."""
    return f"%dead%{group}%{subject}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A stream of messages and its route: which partition each slot belongs to."""

    name: str
    route: Route
    routing: Routing = Routing.SLOTS
    strategy: Strategy = Strategy.STRICT
    limits: Limits = Limits()
    keyless: Keyless = Keyless.INDEPENDENT

    @property
    def partition_count(self) -> int:
        return len(self.route.partitions)
