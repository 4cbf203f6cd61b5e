"""The kinds of order violations that the order checker and the audit find."""

from __future__ import annotations

import enum


class ViolationKind(enum.StrEnum):
    LOST = "lost"
    """A message was acknowledged to the producer, but is neither finished, parked nor skipped in this group; or an
    acknowledged message is not in the log."""
    UNEXPECTED = "unexpected"
    """A handler received a message that differs from the stored message: an offset was used twice, or no message was
    stored there."""
    OUT_OF_ORDER = "out of order"
    """A handler started at or below the last start of the lane in the same epoch."""
    REPEATED = "repeated"
    """A handler started for a message that a commit had already reported as finished."""
    OVERLAP = "overlap"
    """Two handlers ran in a lane at the same time, and the first was not left over from a lost lease or claim."""
    STALE_START = "stale start"
    """A handler started in an epoch after the grant of a higher epoch, or in an epoch that was never granted; or a
    handler started after its consumer had lost or released its claim, or outside of its claim."""
    SKIPPED = "skipped"
    """A handler started although an earlier message of the lane was not finished, or had failed last in this epoch, or
    although an earlier message of the key was in the parking lot."""
    ATTEMPT_LOST = "attempt lost"
    """A handler started with an attempt number below an earlier attempt of the message, or with the number of an
    attempt that had failed in this epoch."""
    PREMATURE_COMMIT = "premature commit"
    """A commit reported a message as finished that no handler had finished and that was neither parked nor skipped; or
    the only finishing handler is unknown to the committer: a handler of a different epoch that ended after the grant of
    the committer's lease. The same holds for messages that a commit removed from the parking lot."""
    STALE_COMMIT = "stale commit"
    """A commit was accepted from a member that did not hold the lease at that time."""
    TWO_OWNERS = "two owners"
    """A lease was granted before the previous lease had ended."""
    EPOCH_NOT_RAISED = "epoch not raised"
    """A lease was granted with an epoch that is not above all earlier epochs."""
