"""Subjects with the settings of their creation, and the rules for names of subjects, groups and producers.

Names are stored in the database and never used as file names.
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
    """The name, if valid. Raises InvalidName. `reserved` allows inturn's own names with `%`."""
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
    """The retry subject of a group: failed messages wait here under best effort, in one partition per delay."""
    return f"%retry%{group}%{subject}"


def dead_letter_subject(group: str, subject: str) -> str:
    """The dead-letter subject of a group: messages that the group has given up."""
    return f"%dead%{group}%{subject}"


@dataclass(frozen=True, slots=True)
class Subject:
    """A stream of messages and its route: the partition of every slot."""

    name: str
    route: Route
    routing: Routing = Routing.SLOTS
    strategy: Strategy = Strategy.STRICT
    limits: Limits = Limits()
    keyless: Keyless = Keyless.INDEPENDENT

    @property
    def partition_count(self) -> int:
        return len(self.route.partitions)
