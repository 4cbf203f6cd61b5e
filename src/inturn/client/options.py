"""Options and arguments of connections and groups: checks before a command is sent, and defaults."""

from __future__ import annotations

import getpass
import math
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

from inturn.consumer.options import ConsumerOptions
from inturn.model.errors import InvalidInput
from inturn.model.message import tags_text
from inturn.model.settings import ConsumerSettings, LeaseSettings, checked
from inturn.model.subject import check_name

_INTERNAL = frozenset({"lease", "retries_of"})  # given by the connection and by the consumer
_NOT_OF_HANDLERS = frozenset({"loop", "duty"})


class HandlerOptions(ConsumerOptions, total=False):
    """Options of `Connection.consumer`, `Connection.handler` and `AsyncConnection.consumer`.

    `Connection.consumer` describes all options. `lease` and `retries_of` raise TypeError: the connection sets both.
    `loop` and `duty` are only for `Connection.consumer`.
    """

    tags: str | None  # filter expression, "paid || shipped"; short for `settings.tags`
    processes: int | None  # handle in so many processes; short for `settings.workers` and `settings.concurrency`


def check_consumer_options(method: str, options: Mapping[str, object]) -> None:
    """TypeError, as for a plain parameter list, if `Connection.consumer` has no such option."""
    _check(method, options, _INTERNAL)


def check_handler_options(method: str, options: Mapping[str, object]) -> None:
    """TypeError if `Connection.handler` and `AsyncConnection.consumer` have no such option."""
    _check(method, options, _INTERNAL | _NOT_OF_HANDLERS)


def _check(method: str, options: Mapping[str, object], excluded: frozenset[str]) -> None:
    for name in options:
        if name in excluded or name not in HandlerOptions.__optional_keys__:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")


def consumer_options(options: HandlerOptions, lease: LeaseSettings | None) -> ConsumerOptions:
    """The options of `Consumer`: `tags` and `processes` become part of `settings`."""
    settings = settings_with(options.get("settings"), options.get("tags"), options.get("processes"))
    rest = {name: value for name, value in options.items() if name not in ("tags", "processes")}
    return cast(ConsumerOptions, {**rest, "settings": settings, "lease": lease})


def broker_group_names(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise InvalidInput(f"broker_groups={names!r}: give a list of names")
    return tuple(check_name("broker group", name) for name in names)


def check_wait(name: str, wait_s: object) -> None:
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 <= wait_s < math.inf:
        raise InvalidInput(f"{name}={wait_s!r}: give a number of seconds, 0 or more")


def check_whole(**numbers: object) -> None:
    """Check whole numbers, given by the name of the argument."""
    for name, number in numbers.items():
        if isinstance(number, bool) or not isinstance(number, int):
            raise InvalidInput(f"{name}={number!r}: give a whole number")


def settings_with(
    settings: ConsumerSettings | None, tags: str | None, processes: int | None
) -> ConsumerSettings | None:
    """The settings with `tags` and `processes` merged in. InvalidInput if both give different tags."""
    checked(settings, ConsumerSettings, "settings")
    if tags is None and processes is None:
        return settings
    settings = settings if settings is not None else ConsumerSettings()
    if tags is not None:
        if settings.tags not in (None, tags_text(tags) or None):
            raise InvalidInput(f"tags={tags!r}, but settings.tags is {settings.tags!r}; give one of them")
        settings = replace(settings, tags=tags)
    if processes is not None:
        settings = replace(settings, workers="processes", concurrency=processes)
    return settings


def user_and_host() -> str:
    """The default for `by` of a key request."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):  # a user id without a name, as in some containers
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"
