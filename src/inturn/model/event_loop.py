"""The event loop: uvloop where uvloop is installed, else asyncio's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

new_event_loop: Callable[[], asyncio.AbstractEventLoop]
try:
    import uvloop
except ImportError:  # not on every platform
    new_event_loop = asyncio.new_event_loop
else:
    new_event_loop = uvloop.new_event_loop
