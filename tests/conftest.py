"""For all tests."""

from __future__ import annotations

import signal

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# How long an example takes says something about the machine, which may have other work.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# Whichever test of these comes first makes what all of the file look at, which takes long: one process runs them all.
TOGETHER = {"tests/cli/test_demo.py", "tests/spark/test_cluster.py", "tests/testing/test_simulation.py"}


def pytest_configure() -> None:
    """Programs that tests start end on SIGINT, also where a shell runs the tests in the background.

    A shell lets its background jobs ignore SIGINT, and a program inherits an ignored signal, but not a handler. This
    process goes on ignoring SIGINT, with a handler that does nothing.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


class _Together(LoadScopeScheduling):  # type: ignore[misc]
    """A test goes to whichever process is free, those of a file above to one."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        return path if path in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Together(config, log)
