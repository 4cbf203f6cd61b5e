"""Waiting for what Spark does. Not beside the handlers: those are sent to executors, without the rest of the tests."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.bed import eventually


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """As `eventually` of the contract suite; Spark is slower, and to look costs more."""
    eventually(condition, what, timeout_s, 0.05)
