"""Which inturn this is."""

from __future__ import annotations

VERSION = "0.1.0"
SOFTWARE = f"inturn/{VERSION}"  # how clients and servers introduce themselves
