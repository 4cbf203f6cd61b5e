"""The blocking client: connections, groups, readers and dead letters. `inturn` exports the public names."""

from inturn.client.connection import Connection, connect

__all__ = ["Connection", "connect"]
