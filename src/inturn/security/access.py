"""Access rules and quotas of an operator, in a TOML file. A command that no rule allows is refused.

    [[allow]]
    principals = "shop-*"
    actions = "produce"
    subjects = ["order.*", "invoice"]

    [[allow]]
    principals = ["billing", "billing-*"]
    actions = ["consume", "describe"]
    subjects = "order.*"
    groups = "billing"

    [[quota]]
    principals = "shop-*"          # per principal; the first matching quota counts
    connections = 100
    commands_per_s = 1000
    bytes_per_s = 10_000_000

`groups` may be left out only if none of the actions is about groups (then the rule applies to all groups).
Patterns: `*` matches any number of characters, `?` matches a single character, all other characters match themselves.
A pattern must match the whole name.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from inturn.model.errors import InvalidInput
from inturn.security.permissions import OF_GROUPS, Need, Permission

ALL = "*"


class Patterns:
    """A set of patterns. A name fits if any pattern matches."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._regex = re.compile("|".join(f"(?:{_regex(one)})" for one in patterns), re.ASCII | re.DOTALL)

    def fit(self, name: str) -> bool:
        return self._regex.fullmatch(name) is not None


class _RuleText(msgspec.Struct, forbid_unknown_fields=True):
    """A rule as written in the file."""

    principals: str | list[str]
    actions: str | list[str]
    subjects: str | list[str]
    groups: str | list[str] | None = None


class Quota(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits of a principal at once and per second; None: unlimited. Bytes count in both directions."""

    principals: str | list[str]
    connections: int | None = None
    commands_per_s: float | None = None
    bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("connections", "commands_per_s", "bytes_per_s"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name} is {value!r}; it must be above 0")


class _FileText(msgspec.Struct, forbid_unknown_fields=True):
    allow: list[_RuleText] = []
    quota: list[Quota] = []


class Rule:
    def __init__(self, text: _RuleText) -> None:
        self.permissions = _permissions(_listed(text.actions))
        about_groups = sorted(self.permissions & OF_GROUPS)
        if text.groups is None and about_groups:
            raise InvalidInput(f"it allows {about_groups[0]}, which is about groups; name the groups: groups = '…'")
        self._principals = Patterns(_listed(text.principals))
        self._subjects = Patterns(_listed(text.subjects))
        self._groups = Patterns(_listed(text.groups if text.groups is not None else ALL))

    def is_for(self, principal: str) -> bool:
        return self._principals.fit(principal)

    def allows(self, need: Need) -> bool:
        return (
            not self.permissions.isdisjoint(need.permissions)
            and (need.subject is None or self._subjects.fit(need.subject))
            and (need.group is None or self._groups.fit(need.group))
        )


class Access:
    """The rules and quotas of a file."""

    def __init__(self, rules: Iterable[Rule] = (), quotas: Iterable[Quota] = ()) -> None:
        self._rules = tuple(rules)
        self._quotas = tuple((Patterns(_listed(one.principals)), one) for one in quotas)

    def rules_for(self, principal: str) -> tuple[Rule, ...]:
        return tuple(rule for rule in self._rules if rule.is_for(principal))

    def quota_for(self, principal: str) -> Quota | None:
        return next((quota for patterns, quota in self._quotas if patterns.fit(principal)), None)


def read_access(path: str | os.PathLike[str]) -> Access:
    """Read an access file. Raises InvalidInput, which names the rule, if the file cannot be read or is invalid."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"access file {str(path)!r} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(f"access file {str(path)!r} is no TOML: {error}") from None
    return parse_access(content, str(path))


def parse_access(content: dict[str, Any], name: str) -> Access:
    try:
        text = msgspec.convert(content, _FileText)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"access file {name!r}: {error}; see docs/how-to/secure.md") from None
    rules = []
    for number, one in enumerate(text.allow, start=1):
        try:
            rules.append(Rule(one))
        except InvalidInput as error:
            raise InvalidInput(f"access file {name!r}, rule {number}: {error}") from None
    return Access(rules, text.quota)


def _listed(text: str | list[str]) -> list[str]:
    listed = [text] if isinstance(text, str) else text
    if not all(listed):
        raise InvalidInput("an empty name matches nothing; use '*' for all")
    return listed


def _permissions(names: list[str]) -> frozenset[Permission]:
    if names == [ALL]:
        return frozenset(Permission)
    try:
        return frozenset(map(Permission, names))
    except ValueError as error:
        raise InvalidInput(f"{error}; there are {', '.join(Permission)}, or '*' for all") from None


def _regex(pattern: str) -> str:
    """The pattern as a regular expression without backtracking.

    Every star except the last matches as little as possible, in an atomic group. No other choice can match where this
    choice fails, and with backtracking the time would rise with every star.
    """
    first, *others = ("".join("." if one == "?" else re.escape(one) for one in part) for part in pattern.split(ALL))
    if not others:
        return first
    *middle, last = others
    return first + "".join(f"(?>.*?{part})" for part in middle) + ".*" + last
