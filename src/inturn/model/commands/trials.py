"""Trials: one message, handled out of turn for diagnosis."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command


class Trial(msgspec.Struct, frozen=True, gc=False):
    """One stored message that one member is to handle out of turn, for diagnosis."""

    id: str  # given by whoever asks for it
    partition: int
    offset: int


class TryMessage(Command, frozen=True, gc=False):
    """Have one member handle one stored message now, out of turn. Answered with the Trial; the same id again is the
    same trial. NotFound if the member or the message is not there.

    `member` is a name, or the beginning of one (up to a `-`) that no other member has.
    """

    subject: str
    group: str
    member: str
    partition: int
    offset: int
    id: str


class FindTrial(Command, frozen=True, gc=False):
    """What became of a trial; held back until it is over, or until `wait_s` is. NotFound if its member left before.

    `gives_up`: whoever asked waits no longer. If its member has not begun when it hears of that, it never does.
    """

    subject: str
    group: str
    id: str
    wait_s: float = 0.0
    gives_up: bool = False


class TrialState(msgspec.Struct, frozen=True, gc=False):
    """What became of a trial. `result` is None while its member has not reported."""

    trial: Trial
    member: str
    result: str | None = None  # one of ResultKind
    error: str = ""  # what the handler raised, or what was wrong with what it returned
    duration_s: float = 0.0
    traceback: str = ""  # of what the handler raised


class ReportTrial(Command, frozen=True, gc=False):
    """A member tells what became of a trial. Answered with Done, also when nobody waits for it any more."""

    subject: str
    group: str
    member: str
    id: str
    result: str  # one of ResultKind
    error: str = ""
    duration_s: float = 0.0
    traceback: str = ""
