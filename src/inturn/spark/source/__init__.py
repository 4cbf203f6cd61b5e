"""The data source `inturn` for Spark: options, offsets, filters, and the readers of batch queries and streams."""
