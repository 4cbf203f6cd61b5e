"""The worker calls the handler for the messages of a run, until the run is over."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from inturn.consumer.context import Context, Hook
from inturn.consumer.outcome import Next, Outcome, is_printable, of_exception, of_return, text_of, traceback_of
from inturn.consumer.run import Run
from inturn.consumer.trial import TrialReport, TrialRun
from inturn.model.errors import WorkerDied
from inturn.model.logs import get_logger
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.model.settings import ConsumerSettings
from inturn.model.time import Clock

Handler: TypeAlias = Callable[[Any, Context], object]

_log = get_logger("inturn.consumer")


class Worker:
    """Holds only settings: all threads share a worker."""

    def __init__(self, handler: Handler, settings: ConsumerSettings, clock: Clock, hooks: Sequence[Hook]) -> None:
        self._handler = handler
        self._settings = settings
        self._monotonic = clock.monotonic
        self._hooks = tuple(hooks)
        self._name = getattr(handler, "__qualname__", repr(handler))
        self._batch = settings.batch
        self._is_batch = settings.batch > 1
        self._is_plain = settings.ack == "auto" and not self._is_batch and not self._hooks

    def work(self, run: Run) -> None:
        if self._is_plain:
            self._work_plain(run)
            return
        for given in run.calls(self._monotonic, self._batch):
            self._before(given, run.context)
            try:
                returned = self._handler(given if self._is_batch else given[0], run.context)
            except BaseException as error:
                self._settle(run, given, of_exception(error, self._settings))
            else:
                self._settle(run, given, of_return(returned, run.context, self._settings, self._name))

    def _work_plain(self, run: Run) -> None:
        """The loop for the usual case, with as little as possible between two messages."""
        handler = self._handler
        for given in run.calls(self._monotonic):
            try:
                returned = handler(given[0], run.context)
            except BaseException as error:
                self._settle(run, given, of_exception(error, self._settings))
            else:
                if returned is not None:
                    self._settle(run, given, of_return(returned, run.context, self._settings, self._name))

    async def work_async(self, run: Run) -> None:
        """The loop for a coroutine function. The run ends if the task is cancelled."""
        is_plain, handler = self._is_plain, self._handler
        for given in run.calls(self._monotonic, self._batch):
            if not is_plain:
                self._before(given, run.context)
            try:
                returned = await handler(given if self._is_batch else given[0], run.context)  # type: ignore[misc]
            except BaseException as error:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    self._cancelled(run, given, error)
                    return
                self._settle(run, given, of_exception(error, self._settings))
            else:
                if returned is not None or not is_plain:
                    self._settle(run, given, of_return(returned, run.context, self._settings, self._name))

    def _cancelled(self, run: Run, messages: list[Message], error: BaseException) -> None:
        """The event loop ends: no fault of the message, which is neither moved nor logged, whatever the settings."""
        outcome = Outcome(Next.REPEAT, ResultKind.EXCEPTION, error=error)
        self._after(messages, run.context, outcome)
        run.settle(outcome)

    def try_out(self, trial: TrialRun) -> TrialReport:
        """Call the handler out of turn, hooks included; no message is settled."""
        given = [trial.message]
        self._before(given, trial.context)
        began_s = self._monotonic()
        try:
            returned = self._handler(given if self._is_batch else given[0], trial.context)
        except BaseException as error:
            outcome = of_exception(error, self._settings)
        else:
            outcome = of_return(returned, trial.context, self._settings, self._name)
        return self._report(trial, outcome, self._monotonic() - began_s)

    async def try_out_async(self, trial: TrialRun) -> TrialReport:
        given = [trial.message]
        self._before(given, trial.context)
        began_s = self._monotonic()
        try:
            returned = await self._handler(given if self._is_batch else given[0], trial.context)  # type: ignore[misc]
        except BaseException as error:
            outcome = of_exception(error, self._settings)
        else:
            outcome = of_return(returned, trial.context, self._settings, self._name)
        return self._report(trial, outcome, self._monotonic() - began_s)

    def _report(self, trial: TrialRun, outcome: Outcome, duration_s: float) -> TrialReport:
        if outcome.kind is ResultKind.SUCCESS and duration_s > self._settings.handler_timeout_s:
            outcome = replace(outcome, kind=ResultKind.TIMEOUT)
        self._after([trial.message], trial.context, outcome)
        error = outcome.error
        text = "" if error is None else text_of(error)
        told = "" if outcome.kind is not ResultKind.EXCEPTION or not is_printable(error) else traceback_of(error)
        return TrialReport(outcome.kind, text, duration_s, told)

    def broke(self, run: Run, error: BaseException) -> None:
        """An internal fault, not of the handler: the messages are repeated."""
        if run.given and run.lane is not None:
            run.settle(of_exception(error, self._settings))
        _log.error("consumer.worker_failed", error=text_of(error))

    def _settle(self, run: Run, messages: list[Message], outcome: Outcome) -> None:
        context = run.context
        if outcome.kind is ResultKind.SUCCESS and self._monotonic() - run.asked_at_s > self._settings.handler_timeout_s:
            outcome = replace(outcome, kind=ResultKind.TIMEOUT)
        self._after(messages, context, outcome)
        failed = outcome.next in (Next.REPEAT, Next.ROLLBACK, Next.MOVE)
        is_raised = outcome.kind is ResultKind.EXCEPTION and not isinstance(outcome.error, WorkerDied)
        # At attempts 1, 2, 4, 8 …: a message that fails for ever must not fill the log.
        if failed and context.attempt & (context.attempt - 1) == 0:
            _log.log(
                logging.INFO
                if outcome.kind is ResultKind.FAILED
                else logging.WARNING,  # the handler asked for the repeat
                "consumer.handler_failed",
                handler=self._name,
                kind=outcome.kind.value,
                subject=context.subject,
                partition=context.partition,
                offset=messages[0].offset,
                group=context.group,
                epoch=context.epoch,
                attempt=context.attempt,
                key=messages[0].key_text,
                error=None if outcome.error is None else text_of(outcome.error),
                exc_info=outcome.error if is_raised and is_printable(outcome.error) else None,
            )
        run.settle(outcome)  # last: from here on the lane may go on in another thread

    def _before(self, messages: list[Message], context: Context) -> None:
        for hook in self._hooks:
            try:
                hook.before(messages, context)
            except BaseException as error:
                _log.error("consumer.hook_failed", hook=type(hook).__qualname__, error=text_of(error))

    def _after(self, messages: list[Message], context: Context, outcome: Outcome) -> None:
        for hook in self._hooks:
            try:
                hook.after(messages, context, outcome.kind, outcome.error)
            except BaseException as error:
                _log.error("consumer.hook_failed", hook=type(hook).__qualname__, error=text_of(error))
