"""Errors survive copying and pickling, as asyncio, multiprocessing and test runners need."""

from __future__ import annotations

import copy
import pickle

import pytest

from inturn.model.errors import (
    ConnectionLost,
    FolderInUse,
    InturnError,
    InvalidInput,
    InvalidName,
    NotFound,
    ServerStopping,
    VersionMismatch,
)

ERRORS = [
    ConnectionLost("inturn://there:1", "refused"),
    FolderInUse("data", 7),
    InvalidInput("no"),
    InvalidName("subject", 3, "is no text"),
    NotFound("subject", "a", "make it"),
    ServerStopping(),
    VersionMismatch((1, 2), (3, 4), "inturn/9"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_a_copy_of_an_error_says_the_same(error: InturnError) -> None:
    for other in (copy.copy(error), copy.deepcopy(error), pickle.loads(pickle.dumps(error))):
        assert type(other) is type(error)
        assert str(other) == str(error) != ""
        assert other.args == error.args
        assert vars(other) == vars(error)
