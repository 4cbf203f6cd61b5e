"""Entry point for Spark: a module called `pyspark_*` offers a data source, as `DefaultSource`, without registration."""

import contextlib

# Spark imports this module for every query with a Python data source. A missing extra must not break other sources.
with contextlib.suppress(ImportError):
    from inturn.spark.source.source import InturnDataSource as DefaultSource  # noqa: F401
