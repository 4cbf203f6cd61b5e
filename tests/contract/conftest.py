from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from inturn import Connection
from tests.contract.bed import BEDS, Bed


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is `async def` runs in a separate event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(params=sorted(BEDS))
def bed(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bed]:
    made = BEDS[request.param](tmp_path / "data")
    yield made
    made.close()


@pytest.fixture
def mq(bed: Bed) -> Connection:
    """An open connection with the subject "orders" of four partitions."""
    connection = bed.open(flush="os")
    connection.create_subject("orders", partitions=4)
    return connection


@pytest.fixture
def quiet() -> Iterator[None]:
    """Do not log handlers that fail on purpose: a traceback takes longer than the rest of such a test."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def line(mq: Connection) -> Connection:
    """Like `mq`, and with the subject "line" of a single partition."""
    mq.create_subject("line", partitions=1)
    return mq
