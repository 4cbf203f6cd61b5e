"""Asking one member to handle one message, and waiting for what became of it."""

from __future__ import annotations

import uuid

from inturn.connection.arguments import check_wait, check_whole
from inturn.model.clock import Clock
from inturn.model.commands import FindTrial, Trial, TrialState, TryMessage
from inturn.model.errors import TrialTimeout
from inturn.model.request import Ask

LOOK_S = 20.0  # a node holds nothing back for much longer


def tried(
    ask: Ask, clock: Clock, subject: str, group: str, member: str, partition: int, offset: int, timeout_s: float
) -> TrialState:
    """TrialTimeout if the member did not tell in time: the handler may run all the same."""
    check_whole(partition=partition, offset=offset)
    check_wait("timeout_s", timeout_s)
    trial = ask(TryMessage(subject, group, member, partition, offset, uuid.uuid4().hex), Trial)
    until_s = clock.monotonic() + timeout_s
    while True:
        left_s = until_s - clock.monotonic()
        find = FindTrial(subject, group, trial.id, max(0.0, min(left_s, LOOK_S)), left_s <= 0)
        state = ask(find, TrialState)
        if state.result is not None:
            return state
        if left_s <= 0:
            raise TrialTimeout(state.member, f"{subject}/{partition}@{offset}", timeout_s)
