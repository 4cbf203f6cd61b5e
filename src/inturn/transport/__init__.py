"""Streams between clients and servers: addresses, TLS, listeners, sessions.

`inturn.server` and `inturn.cluster` serve nodes with this package; clients connect with this package.
"""
