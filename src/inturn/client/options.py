"""The keyword options of consumers that a connection makes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from inturn.client.keys import settings_with
from inturn.consumer.options import ConsumerOptions
from inturn.model.settings import LeaseSettings

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
