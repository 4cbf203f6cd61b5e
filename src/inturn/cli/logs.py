"""Warnings of the library on stderr while a command runs: short lines, or JSON lines.

The library never configures logging; a command is an application and configures logging.
"""

from __future__ import annotations

import enum
import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any

import msgspec
import structlog
from structlog.typing import EventDict, WrappedLogger

REPEAT_S = 5.0  # the same warning again within this time is left out
_muted: list[dict[str, object]] = []


class LogFormat(enum.StrEnum):
    """The format of a server's log: for people, or a flat JSON object per line for log collectors."""

    CONSOLE = "console"
    JSON = "json"


def configure(is_json: bool, level: int = logging.WARNING, log_format: LogFormat | None = None) -> None:
    """Call once per command. Replaces the configuration. Without a format, lines are {"log": …} if `is_json`, distinct
    from {"error": …}."""
    _muted.clear()
    stamps: list[structlog.typing.Processor] = []
    render = _as_json if is_json else _as_text
    if log_format is LogFormat.JSON:
        stamps = [structlog.processors.TimeStamper(fmt="iso", utc=True), structlog.stdlib.add_logger_name]
        render = _as_line
    elif log_format is LogFormat.CONSOLE:
        render = _as_text
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _drop_muted,
            _drop_repeats(),
            *stamps,
            structlog.processors.format_exc_info,
            render,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        cache_logger_on_first_use=False,
    )
    library = logging.getLogger("inturn")
    library.handlers = [_Stderr(level)]
    library.propagate = False
    library.setLevel(level)


def silence() -> None:
    """Log critical events only: the shell would take a log line for a name."""
    configure(is_json=False, level=logging.CRITICAL)


def mute(event: str, **fields: object) -> None:
    """Drop this event with these fields from now on: the event is expected."""
    _muted.append({"event": event, **fields})


class _Stderr(logging.Handler):
    """Uses `sys.stderr` of the moment: a progress bar or a test may replace `sys.stderr`."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(record.getMessage() + "\n")
        sys.stderr.flush()


def _drop_muted(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    if any(all(event.get(name) == value for name, value in muted.items()) for muted in _muted):
        raise structlog.DropEvent
    return event


def _drop_repeats() -> Callable[[WrappedLogger, str, MutableMapping[str, Any]], EventDict]:
    seen: dict[tuple[object, object, object], float] = {}

    def drop(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        what = event["event"], event.get("partition"), event.get("error")
        now_s = time.monotonic()
        if now_s - seen.get(what, -REPEAT_S) < REPEAT_S:
            raise structlog.DropEvent
        seen[what] = now_s
        return event

    return drop


def _as_json(_: WrappedLogger, __: str, event: EventDict) -> str:
    return msgspec.json.encode({"log": dict(event)}, enc_hook=repr).decode()


def _as_line(_: WrappedLogger, __: str, event: EventDict) -> str:
    first = {name: event.pop(name, None) for name in ("timestamp", "level", "event", "logger")}
    return msgspec.json.encode({**first, **event}, enc_hook=repr).decode()


def _as_text(_: WrappedLogger, __: str, event: EventDict) -> str:
    level, name = event.pop("level", "warning"), event.pop("event")
    traceback = event.pop("exception", None)
    fields = " ".join(f"{key}={value}" for key, value in event.items() if value is not None)
    return f"{level}: {name} {fields}".rstrip() + (f"\n{traceback}" if traceback else "")
