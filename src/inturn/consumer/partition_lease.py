"""The lease of a partition, as the consumer knows the lease: stage, epoch, deadlines, commands in flight. No I/O."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from inturn.model.errors import InturnError
from inturn.protocol.commands import Command, Granted

NEVER = float("-inf")


class Stage(enum.Enum):
    ASKING = "asking"  # the lease is requested
    ACTIVE = "active"  # pulling and handling
    DRAINING = "draining"  # no handler is started; then commit and release
    RELEASING = "releasing"
    LOST = "lost"  # another member may hold the lease: wait for running handlers, commit nothing


HOLDING = frozenset((Stage.ACTIVE, Stage.DRAINING))


@dataclass(slots=True)
class Pending:
    """A command in flight, and the time at which waiting for the answer ends."""

    command: Command
    sent_at_s: float
    until_s: float


@dataclass(slots=True, eq=False)
class PartitionLease:
    """Times are monotonic. `deadline_s` is the only field that workers read, without a lock."""

    stage: Stage = Stage.ASKING
    epoch: int = 0
    is_claim: bool = False  # of some slots, under the lease of another member
    acquire_number: int = 0  # of the last acquire request
    life_s: float = 0.0  # as the grantor stated; only the grantor's figure counts
    ends_s: float = NEVER
    authorised_until_s: float = NEVER
    # No handler is started from this time on: the earlier of the two, or NEVER once the partition is given up.
    deadline_s: float = NEVER
    pending: dict[type[Command], Pending] = field(default_factory=dict)  # commands about this partition
    retry_at_s: float = NEVER  # after an error: no command is sent before
    error: InturnError | None = None
    is_damaged: bool = False  # the error is about pulled messages; a successful pull alone does not clear it

    def granted(self, answer: Granted, ends_s: float) -> None:
        self.stage = Stage.ACTIVE
        self.error = None
        self.epoch = answer.epoch
        self.is_claim = answer.is_claim
        self.life_s = answer.life_s
        self.ends_s = ends_s
        self.deadline_s = min(ends_s, self.authorised_until_s)

    def renewed(self, ends_s: float) -> None:
        self.ends_s = max(self.ends_s, ends_s)
        if self.stage is Stage.ACTIVE:
            self.deadline_s = min(self.ends_s, self.authorised_until_s)

    def authorised(self, until_s: float) -> None:
        self.authorised_until_s = until_s
        if self.stage is Stage.ACTIVE:
            self.deadline_s = min(self.ends_s, self.authorised_until_s)

    def give_up(self, stage: Stage) -> None:
        """Enter DRAINING or LOST: no handler is started from now on. Commands need not wait for a retry time."""
        self.stage = stage
        self.deadline_s = self.retry_at_s = NEVER

    def forbid_starts(self) -> None:
        self.deadline_s = NEVER

    @property
    def is_holding(self) -> bool:
        return self.stage in HOLDING

    # Commands

    def may_send(self, kind: type[Command], now_s: float) -> bool:
        """At most a single command of a kind is in flight; after an error, commands wait for `retry_at_s`."""
        return kind not in self.pending and now_s >= self.retry_at_s

    def failed(self, error: InturnError, retry_at_s: float) -> None:
        self.error, self.retry_at_s = error, retry_at_s

    def damaged(self, error: InturnError, retry_at_s: float) -> None:
        """A pulled batch cannot be decoded."""
        self.failed(error, retry_at_s)
        self.is_damaged = True

    def pull_answered(self) -> None:
        if not self.is_damaged:
            self.error = None

    def batch_decoded(self) -> None:
        self.error, self.is_damaged = None, False
