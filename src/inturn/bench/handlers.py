"""Handlers that benchmarks give to Spark and to consumers, by name."""

from __future__ import annotations

import time

from inturn.consumer.context import Context
from inturn.model.message import Message


def trivial(message: Message, context: Context) -> None:
    pass


def five_ms(message: Message, context: Context) -> None:
    time.sleep(0.005)
