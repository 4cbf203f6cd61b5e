"""Trials: single messages that somebody asked this member to handle out of turn. No I/O.

One after the other, beside whatever else runs: each is read, given to the handler, and reported until that is answered.
Nothing of it is committed, counted or traced.
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

KNOWN_COUNT_MAX = 1_000  # an answer may name again what was reported meanwhile
READ_BYTES = 1  # the batch that the message is in, and nothing else


@dataclass(frozen=True, slots=True)
class TrialReport:
    """What became of a call of the handler."""

    result: ResultKind
    error: str = ""
    duration_s: float = 0.0
    traceback: str = ""


@dataclass(frozen=True, slots=True)
class TrialRun:
    """What the handler is to be called with."""

    message: Message
    context: Context


class MemberTrials:
    """Those of one member."""

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
        """One of them has begun, and is not reported yet."""
        return self._now is not None

    @property
    def has_waiting(self) -> bool:
        return bool(self._waiting)

    def heard(self, trials: Iterable[Trial]) -> None:
        """What a heartbeat was answered with. Those that wait and are not there any more were given up."""
        by_id = {trial.id: trial for trial in trials}
        self._waiting = deque(trial for trial in self._waiting if trial.id in by_id)
        for trial in by_id.values():
            if trial.id not in self._known:
                self._known.append(trial.id)
                self._waiting.append(trial)

    def forget_waiting(self) -> None:
        self._waiting.clear()

    def next_command(self) -> Command | None:
        """What to send, unless it is on its way already."""
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
        self.over(TrialReport(ResultKind.EXCEPTION, f"nothing is stored at offset {trial.offset} any more"))

    def failed(self, command: Read | ReportTrial, error: InturnError) -> None:
        """It cannot be read, or nobody wants to know what became of it."""
        if isinstance(command, Read):
            self._refused(error)
        else:
            self.reported()

    def _refused(self, error: InturnError) -> None:
        self.over(TrialReport(ResultKind.EXCEPTION, f"the message cannot be read: {error}"))

    def take(self) -> TrialRun | None:
        """The next one to be run, once; its end is told by `over`."""
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
        """The node knows, or does not want to."""
        self._now = self._report = None
