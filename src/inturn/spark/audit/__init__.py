"""The audit of the order contract over traces and logs, run as Spark jobs."""
