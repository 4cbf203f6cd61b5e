"""What a worker does with a run: call the handler, message by message, until it is over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from inturn.consumer.context import Context
from inturn.consumer.hook import Hook
from inturn.consumer.outcome import Outcome, of_exception, of_return
from inturn.consumer.run import Run
from inturn.model.clock import Clock
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings

Handler: TypeAlias = Callable[[Any, Context], object]

_log = get_logger("inturn.consumer")


class Worker:
    """Holds nothing but settings: one serves all threads."""

    def __init__(self, handler: Handler, settings: ConsumerSettings, clock: Clock, hooks: Sequence[Hook]) -> None:
        self._handler = handler
        self._settings = settings
        self._monotonic = clock.monotonic
        self._hooks = tuple(hooks)
        self._name = getattr(handler, "__qualname__", repr(handler))
        self._is_plain = settings.ack == "auto" and settings.batch == 1 and not self._hooks

    def work(self, run: Run) -> None:
        run.open()
        if self._is_plain:
            self._work_plain(run)
        else:
            self._work(run)

    def _work_plain(self, run: Run) -> None:
        """The same as `_work` for the usual case, with as little between two messages as possible."""
        handler, monotonic, context = self._handler, self._monotonic, run.context
        message = run.next(monotonic())
        while message is not None:
            try:
                returned = handler(message, context)
            except BaseException as error:
                outcome = of_exception(error, self._settings)
            else:
                if returned is None and context.attempt == 1:
                    message = run.next(monotonic())
                    continue
                outcome = of_return(returned, context, self._settings, self._name)
            if not self._settle(run, [message], outcome):
                return
            message = run.next(monotonic())

    def _work(self, run: Run) -> None:
        is_batch = self._settings.batch > 1
        while True:
            now_s = self._monotonic()
            given = run.next_batch(now_s) if is_batch else run.next(now_s)
            if given is None:
                return
            messages = given if isinstance(given, list) else [given]
            self._before(messages, run.context)
            try:
                outcome = of_return(self._handler(given, run.context), run.context, self._settings, self._name)
            except BaseException as error:
                outcome = of_exception(error, self._settings)
            if outcome.kind is ResultKind.SUCCESS and self._monotonic() - now_s > self._settings.handler_timeout_s:
                outcome = replace(outcome, kind=ResultKind.TIMEOUT)
            self._after(messages, run.context, outcome)
            if not self._settle(run, messages, outcome):
                return

    def _settle(self, run: Run, messages: list[Message], outcome: Outcome) -> bool:
        goes_on = run.settle(outcome)
        context = run.context
        # At attempts 1, 2, 4, 8 …: a message that fails for ever is not to fill the log.
        if not goes_on and context.attempt & (context.attempt - 1) == 0:
            note = _log.info if outcome.kind is ResultKind.FAILED else _log.warning  # it asked for the repeat
            note(
                "consumer.handler_failed",
                handler=self._name,
                kind=outcome.kind.value,
                subject=context.subject,
                partition=context.partition,
                offset=messages[0].offset,
                group=context.group,
                epoch=context.epoch,
                attempt=context.attempt,
                again_in_s=outcome.wait_s,
                key=messages[0].key_text,
                error=None if outcome.error is None else repr(outcome.error),
                exc_info=outcome.error if outcome.kind is ResultKind.EXCEPTION else None,
            )
        return goes_on

    def _before(self, messages: list[Message], context: Context) -> None:
        for hook in self._hooks:
            try:
                hook.before(messages, context)
            except BaseException as error:
                _log.error("consumer.hook_failed", hook=repr(hook), error=repr(error))

    def _after(self, messages: list[Message], context: Context, outcome: Outcome) -> None:
        for hook in self._hooks:
            try:
                hook.after(messages, context, outcome.kind, outcome.error)
            except BaseException as error:
                _log.error("consumer.hook_failed", hook=repr(hook), error=repr(error))
