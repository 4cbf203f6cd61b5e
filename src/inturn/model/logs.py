"""Where the library writes its log: structured, through `logging`, so that applications decide what becomes of it."""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A structlog logger over `logging.getLogger(name)`: rendered as structlog is configured, emitted by logging.

    Unless somebody configures it, warnings go to stderr. `logging.getLogger("inturn")` is the switch for all.
    """
    return structlog.wrap_logger(logging.getLogger(name))
