"""Validates that handler, order, mode and settings of a consumer fit together, before the consumer starts."""

from __future__ import annotations

import inspect
from dataclasses import replace

from inturn.consumer.options import EVERYTHING, Scope
from inturn.consumer.worker import Handler
from inturn.model.errors import InvalidInput
from inturn.model.settings import ConsumerSettings, GroupMode, OnExhausted, Order, Strategy, one_of


def order_in(mode: GroupMode, order: Order | str | None) -> Order:
    """The order in this mode. Default: by partition; in a shared group none."""
    if order is None:
        return Order.NONE if mode is GroupMode.SHARED else Order.PARTITION
    order = one_of(Order, "order", order)
    if mode is GroupMode.SHARED and order is not Order.NONE:
        raise InvalidInput(f"mode='shared' keeps no order, so not order={order.value!r}; leave out order or mode")
    return order


def check_mode(mode: GroupMode, offsets: object, scope: Scope) -> None:
    if mode is GroupMode.BROADCAST and offsets is None:
        raise InvalidInput("mode='broadcast' keeps its own offsets: give offsets=, a folder")
    if mode is not GroupMode.BROADCAST and offsets is not None:
        raise InvalidInput(f"offsets={offsets!r}: mode={mode.value!r} keeps them at the node; leave offsets out")
    if mode is not GroupMode.EXCLUSIVE and scope is not EVERYTHING:
        raise InvalidInput(
            f"`duty` divides the partitions of an exclusive group; mode={mode.value!r} has none to divide"
        )


def fit(settings: ConsumerSettings, order: Order, mode: GroupMode) -> ConsumerSettings:
    """The settings as this order and this mode support them. Raises InvalidInput."""
    if mode is not GroupMode.EXCLUSIVE and settings.trace is not None:
        raise InvalidInput(
            f"ConsumerSettings.trace is for an audit of order; mode={mode.value!r} leaves nothing to audit"
        )
    if mode is not GroupMode.EXCLUSIVE and (settings.tags or settings.workers == "processes"):
        raise InvalidInput(f"tags and process workers need mode='exclusive', not {mode.value!r}; filter in the handler")
    if mode is GroupMode.BROADCAST:
        if settings.strategy is Strategy.BEST_EFFORT or settings.max_attempts is not None:
            raise InvalidInput(
                "mode='broadcast' has no retry or dead-letter subject: what fails is repeated in place; leave "
                "max_attempts and strategy='best-effort' out, and let the handler give up by returning"
            )
        return settings
    if mode is GroupMode.SHARED:
        if settings.on_exhausted is OnExhausted.PARK:
            raise InvalidInput(
                "ConsumerSettings.on_exhausted='park' parks a key, and needs order='key', not mode='shared'"
            )
        return settings
    if order is Order.NONE:
        return replace(settings, strategy=Strategy.BEST_EFFORT)  # without order, no message waits for a repeat in place
    if order is not Order.KEY and settings.on_exhausted is OnExhausted.PARK:
        raise InvalidInput("ConsumerSettings.on_exhausted='park' parks a key, so it needs order='key'")
    return settings


def check_handler(handler: object) -> None:
    """Refuse handlers whose every call would fail."""
    if not callable(handler):
        raise InvalidInput(f"the handler is {handler!r}; give a function of (message, context)")
    name = getattr(handler, "__qualname__", repr(handler))
    if inspect.isasyncgenfunction(handler) or inspect.isgeneratorfunction(handler):
        raise InvalidInput(f"handler {name} has a `yield` in it, so calling it does nothing; use `return`")
    try:
        signature = inspect.signature(handler)
    except (TypeError, ValueError):
        return  # some builtins have no signature
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise InvalidInput(f"handler {name}{signature} cannot be called with (message, context): {error}") from None


def is_async(handler: Handler) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)
