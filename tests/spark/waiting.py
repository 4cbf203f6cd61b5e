"""`wait_until` for Spark tests. A separate module, because the modules of handlers are sent to executors without the
other test modules."""

from __future__ import annotations

from collections.abc import Callable

from tests.contract.bed import eventually


def wait_until(condition: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
    """As `eventually` of the contract suite, with a longer timeout and interval, because Spark is slower."""
    eventually(condition, what, timeout_s, 0.05)
