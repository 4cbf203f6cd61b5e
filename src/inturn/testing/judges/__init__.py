"""The judges of the order checker: each looks at some kinds of events. What they know together is the case."""
