"""Where Spark looks: modules called `pyspark_*` offer a data source, as `DefaultSource`, that needs no registration."""

import contextlib

# Spark imports this for whoever uses any Python data source: an extra that is not installed must not fail theirs.
with contextlib.suppress(ImportError):
    from inturn.spark.source.source import InturnDataSource as DefaultSource  # noqa: F401
