"""Ordered handlers on Spark: `drain`, `for_each`, the lease holder in the driver, and the tasks in the executors."""
