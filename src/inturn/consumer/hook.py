"""Hooks around handling: for tracing, metrics, context variables."""

from __future__ import annotations

from collections.abc import Sequence

from inturn.consumer.context import Context
from inturn.model.message import Message
from inturn.model.result import ResultKind


class Hook:
    """Override what you need. Called in the worker's thread, right before and after the handler.

    `after` runs even when the handler raised; `error` is then what it raised. An exception in a hook is logged and
    changes nothing.
    """

    def before(self, messages: Sequence[Message], context: Context) -> None:
        pass

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        pass
