from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from inturn import Connection
from tests.contract.bed import GroupedBed


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GroupedBed]:
    """A meta server and the brokers "east" and "west", started by `open`."""
    made = GroupedBed(tmp_path / "cluster")
    yield made
    made.close()


@pytest.fixture
def mortal(tmp_path: Path) -> Iterator[GroupedBed]:
    """The same, for tests with dying brokers: a broker that is silent for two seconds is dead."""
    made = GroupedBed(tmp_path / "cluster")
    made.silent_s = 2.0
    yield made
    made.close()


@pytest.fixture
def mq(cluster: GroupedBed) -> Connection:
    return cluster.open()


@pytest.fixture
def quiet() -> Iterator[None]:
    """Do not log handlers that fail on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
