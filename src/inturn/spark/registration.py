"""The data source `inturn`, made known to a Spark session."""

from __future__ import annotations

from typing import TYPE_CHECKING

from inturn.spark.extra import needs_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Make `format("inturn")` known to this session, in place of what it knew by that name; again does no harm.

    Where inturn is installed Spark finds it without this, too, through the module `pyspark_inturn`. But only a source
    that was registered sees what had been sent to the executors before (see `ship`)."""
    with needs_extra():
        from inturn.spark.source.source import InturnDataSource
    spark.dataSource.register(InturnDataSource)
