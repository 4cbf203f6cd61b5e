"""The connection, and what it is made of."""

from inturn.client.connection import Connection, connect

__all__ = ["Connection", "connect"]
