"""Structured logging of the library through `logging`: applications decide what is shown and where."""

from __future__ import annotations

import logging
from typing import Any

import structlog


def get_logger(name: str) -> Any:
    """A structlog logger over `logging.getLogger(name)`: structlog's configuration renders, `logging` emits.

    Without any configuration, warnings go to stderr. `logging.getLogger("inturn")` controls all loggers of inturn.
    """
    return structlog.wrap_logger(logging.getLogger(name))
