"""The extra `inturn[spark]`: what is said when it is not installed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from inturn.model.errors import InvalidInput

INSTALL = "pip install 'inturn[spark]'"
_MODULES = ("pandas", "py4j", "pyarrow", "pyspark")


@contextlib.contextmanager
def needs_extra() -> Iterator[None]:
    """Around imports: a module of the extra that is missing is `InvalidInput`, which says how to install it."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _MODULES:
            raise
        raise InvalidInput(f"inturn.spark needs the extra, {error.name} is missing: {INSTALL}") from error
