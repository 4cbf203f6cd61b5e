"""The version of inturn."""

from __future__ import annotations

VERSION = "0.1.0"
SOFTWARE = f"inturn/{VERSION}"  # sent by clients and servers when a stream opens
