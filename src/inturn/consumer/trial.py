"""Trials: single messages that an operator asks this member to handle out of turn. No I/O.

Trials run sequentially, beside all other work: a message is read, passed to the handler, and the report is repeated
until the node answers. A trial is not committed, counted or traced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from inturn.consumer.context import Context
from inturn.consumer.decoder import DecodedPull
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.protocol.commands import Command, Read, ReportTrial, Trial

KNOWN_COUNT_MAX = 1_000  # a heartbeat may return trials again that were reported meanwhile
READ_BYTES = 1  # only the batch with the message


@dataclass(frozen=True, slots=True)
class TrialReport:
    """The result of a handler call."""

    result: ResultKind
    error: str = ""
    duration_s: float = 0.0
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """The arguments of the handler call."""

    message: Message
    context: Context


class MemberTrials:
    """The trials of a member."""

    def __init__(self, subject: str, group: str, member: str) -> None:
        self._where = subject, group
        self._member = member
        self._known: deque[str] = deque(maxlen=KNOWN_COUNT_MAX)
        self._waiting: deque[Trial] = deque()
        self._now: Trial | None = None
        self._report: ReportTrial | None = None
        self._run: TrialRun | None = None
        self._is_running = False

    @property
    def is_busy(self) -> bool:
        """A trial has begun, and is not reported yet."""
        return self._now is not None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def heard(self, trials: Iterable[Trial]) -> None:
        """Take the trials that a heartbeat returned. Waiting trials that are not among them were cancelled."""
        by_id = {trial.id: trial for trial in trials}
        self._waiting = deque(trial for trial in self._waiting if trial.id in by_id)
        for trial in by_id.values():
            if trial.id not in self._known:
                self._known.append(trial.id)
                self._waiting.append(trial)

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def next_command(self) -> Command | None:
        """The command to send, unless the command is in flight already."""
        if self._now is None and self._waiting:
            self._now = self._waiting.popleft()
        if self._report is not None:
            return self._report
        if self._now is not None and self._run is None and not self._is_running:
            subject, group = self._where
            return Read(subject, self._now.partition, self._now.offset, READ_BYTES, group=group)
        return None

    def read(self, decode_pull: DecodedPull) -> None:
        trial = self._now
        if trial is None:
            return
        if decode_pull.damage is not None:
            self._refused(decode_pull.damage)
            return
        for message in (message for messages in decode_pull.messages for message in messages):
            if message.offset == trial.offset:
                subject, group = self._where
                context = Context(subject, group, trial.partition, self._member, 0, is_direct=True)
                self._run = TrialRun(message, context)
                return
        self.over(TrialReport(ResultKind.EXCEPTION, f"no message is stored at offset {trial.offset} any more"))

    def failed(self, command: Read | ReportTrial, error: InturnError) -> None:
        """The message cannot be read, or the node does not accept the report."""
        if isinstance(command, Read):
            self._refused(error)
        else:
            self.reported()

    def _refused(self, error: InturnError) -> None:
        self.over(TrialReport(ResultKind.EXCEPTION, f"the message cannot be read: {error}"))

    def take(self) -> TrialRun | None:
        """The next trial to run, returned once; `over` reports the end."""
        run, self._run = self._run, None
        self._is_running = run is not None or self._is_running
        return run

    def over(self, report: TrialReport) -> None:
        trial = self._now
        if trial is None:
            return
        self._is_running = False
        self._report = ReportTrial(
            *self._where,
            self._member,
            trial.id,
            report.result.value,
            report.error,
            report.duration_s,
            report.traceback,
        )

    def reported(self) -> None:
        """The node has the report, or does not want the report."""
        self._now = self._report = None
