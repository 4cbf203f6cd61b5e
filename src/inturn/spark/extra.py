"""The extra `inturn[spark]`: a check of the installation, and the registration of the data source."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from inturn.model.errors import InvalidInput

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

INSTALL = "pip install 'inturn[spark]'"
_MODULES = ("pandas", "py4j", "pyarrow", "pyspark")


@contextlib.contextmanager
def needs_extra() -> Iterator[None]:
    """Wrap imports: raise `InvalidInput` with the install command if a module of the extra is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _MODULES:
            raise
        raise InvalidInput(f"inturn.spark needs the extra, {error.name} is missing: {INSTALL}") from error


def register(spark: SparkSession) -> None:
    """Register `format("inturn")` with this session. Replaces a source of the same name; repeated calls do no harm.

    Where inturn is installed, Spark also finds the source without registration, through the module `pyspark_inturn`.
    But only a registered source sees the files that were sent to the executors before the registration (see `ship`)."""
    with needs_extra():
        from inturn.spark.source.source import InturnDataSource
    spark.dataSource.register(InturnDataSource)
