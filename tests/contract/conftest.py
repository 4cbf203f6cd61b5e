from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from inturn import Connection
from tests.contract.bed import BEDS, Bed


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
