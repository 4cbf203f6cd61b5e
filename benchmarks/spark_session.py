"""The Spark session of a benchmark: the active session stays active; a new session ends with the benchmark."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@contextmanager
def spark_session(cores: int = 2) -> Iterator[SparkSession]:
    from pyspark import SparkContext

    from inturn.spark import session

    is_new = SparkContext._active_spark_context is None
    spark = session("inturn-bench", f"local[{cores}]")
    try:
        yield spark
    finally:
        if is_new:
            spark.stop()
