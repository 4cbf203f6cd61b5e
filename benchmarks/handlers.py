"""Handlers that benchmarks give to Spark and to consumers, by name."""

from __future__ import annotations

import time

from inturn.consumer.context import Context
from inturn.model.message import Message


def trivial(message: Message, context: Context) -> None:
    pass


def five_ms(message: Message, context: Context) -> None:
    time.sleep(0.005)


def compute(rounds: int) -> int:
    """Work for a CPU that never lets another thread of the interpreter on."""
    found = 0
    for number in range(rounds):
        found += number * number % 7
    return found


LONG_ROUNDS, SHORT_ROUNDS = 25_000, 600  # about 2 ms, about 50 µs


def computes_long(message: Message, context: Context) -> None:
    compute(LONG_ROUNDS)


def computes_shortly(message: Message, context: Context) -> None:
    compute(SHORT_ROUNDS)
