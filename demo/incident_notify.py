"""The handler of the last act: the same function online and in the tasks of Spark."""

from __future__ import annotations

import asyncio

from demo.incident_sale import NOTIFY_S
from inturn.consumer.context import Context
from inturn.model.message import Message

NOTIFY = f"{__name__}:notify"


async def notify(message: Message, context: Context) -> None:
    """Slow, as whatever talks to others is."""
    await asyncio.sleep(NOTIFY_S)
