from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.node.machine import Machine


@pytest.fixture
def machine() -> Iterator[Machine]:
    made = Machine()
    yield made
    made.close()
