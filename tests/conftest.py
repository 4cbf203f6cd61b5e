"""For all tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# No deadline for an example: the machine may be busy.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

# The first test of such a file makes a slow fixture for all tests of the file. So the whole file runs in the same
# process.
TOGETHER = {"tests/cli/test_demo.py", "tests/spark/test_cluster.py", "tests/simulator/test_simulation.py"}

# Tests that share a Spark session. A Java process starts slowly and is slow while cold, so a single process has the
# session.
WITH_SESSION = {
    f"tests/spark/test_{name}.py"
    for name in (
        "audit",
        "benches",
        "drain",
        "for_each",
        "ordered",
        "secured",
        "session",
        "shipping",
        "source",
        "source_stream",
    )
}

HERE = Path(__file__).parent
# `pytest --quick` runs the files in `tests`, the unit tests, and the contract suite on a single bed.
QUICK_FOLDERS = {
    "broker",
    "cluster",
    "consumer",
    "contract",
    "log",
    "meta",
    "model",
    "node",
    "producer",
    "protocol",
    "store",
    "transport",
}
QUICK_BED = "embedded"
# Quick folders contain some files whose tests start programs, servers or clusters. These files are not quick.
NOT_QUICK = {
    "cluster/test_cluster.py",
    "cluster/test_growth.py",
    "cluster/test_routes.py",
    "cluster/test_secured.py",
    "cluster/test_states.py",
    "consumer/test_worker_processes.py",
    "contract/test_served.py",
    "contract/test_served_modes.py",
    "contract/test_shared_folder.py",
    "test_examples.py",
    "test_fork.py",
    "test_how_to.py",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="unit tests, and the contract suite on one bed")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick") or not collection_path.is_relative_to(HERE):
        return None
    path = collection_path.relative_to(HERE)
    is_other = collection_path.is_dir() and path.parts and path.parts[0] not in QUICK_FOLDERS
    return True if is_other or path.as_posix() in NOT_QUICK else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    others = [
        item
        for item in items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and item.callspec.params.get("bed", QUICK_BED) != QUICK_BED
    ]
    config.hook.pytest_deselected(items=others)
    left_out = set(others)
    items[:] = [item for item in items if item not in left_out]


def pytest_configure() -> None:
    """Programs that tests start end on SIGINT, even where a shell runs the tests in the background.

    A shell lets background jobs ignore SIGINT, and a program inherits an ignored signal, but not a handler. This
    process still ignores SIGINT, with an empty handler.
    """
    named = [HERE / name for name in (*QUICK_FOLDERS, *NOT_QUICK)]
    named += [HERE.parent / name for name in (*TOGETHER, *WITH_SESSION)]
    missing = [str(path) for path in named if not path.exists()]
    if missing:
        raise pytest.UsageError(f"tests/conftest.py names what is not there: {', '.join(missing)}")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, lambda number, frame: None)


class _Together(LoadScopeScheduling):  # type: ignore[misc]
    """A test goes to a free process.

    Tests of a file in TOGETHER share a process; tests with the session share a process.
    """

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.partition("::")[0]
        if path in WITH_SESSION:
            return "spark session"
        return path if path in TOGETHER else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return _Together(config, log)
