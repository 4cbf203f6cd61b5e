"""The judges of the order checker. Every judge handles some kinds of events; all judges share a `Case`."""
