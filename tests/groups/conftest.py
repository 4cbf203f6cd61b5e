from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inturn import Connection
from tests.contract.bed import GroupedBed


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[GroupedBed]:
    """One meta server and the brokers "east" and "west", started by `open`."""
    made = GroupedBed(tmp_path / "cluster")
    yield made
    made.close()


@pytest.fixture
def mq(cluster: GroupedBed) -> Connection:
    return cluster.open()
