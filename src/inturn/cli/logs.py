"""Warnings of the library, for whoever runs a command: short lines on stderr, or JSON lines.

The library itself never configures logging; a command is an application and does.
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
    """How a server writes its log: for people, or one flat JSON object per line for whoever collects it."""

    CONSOLE = "console"
    JSON = "json"


def configure(is_json: bool, level: int = logging.WARNING, log_format: LogFormat | None = None) -> None:
    """Once per command. Replaces whatever was configured. Without a format, lines are {"log": …} if `is_json`, so that
    they can be told from {"error": …}."""
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
    """Next to nothing: whoever started this would take a line for a name."""
    configure(is_json=False, level=logging.CRITICAL)


def mute(event: str, **fields: object) -> None:
    """Leave out this event with these fields from now on: it is about to happen on purpose."""
    _muted.append({"event": event, **fields})


class _Stderr(logging.Handler):
    """Looks stderr up at every line, so that a progress bar or a test may replace it."""

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
