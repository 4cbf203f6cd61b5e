from __future__ import annotations

from collections.abc import Iterator

import pytest

from inturn.model.settings import Limits, Routing, Strategy
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.subjects import Subjects


@pytest.fixture
def database() -> Iterator[Database]:
    opened = Database.open(None)
    yield opened
    opened.close()


@pytest.fixture
def group_id(database: Database) -> int:
    """The group "billing" of the subject "orders" with three partitions."""
    Subjects(database).create("orders", 3, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
    return Groups(database).create("orders", "billing", "first", [0, 0, 0], 1)
