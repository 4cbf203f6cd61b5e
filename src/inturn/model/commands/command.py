"""What all commands have in common."""

from __future__ import annotations

import msgspec


class Command(msgspec.Struct, frozen=True, gc=False):
    pass


class Done(msgspec.Struct, frozen=True, gc=False):
    pass
