"""The ways in which order can be broken: what the order checker and the audit look for."""

from __future__ import annotations

import enum


class ViolationKind(enum.StrEnum):
    LOST = "lost"
    """Acknowledged, but never finished by this group, nor parked, nor skipped by name; or acknowledged, but not in
    the log."""
    UNEXPECTED = "unexpected"
    """A handler got a message that is not the one stored there: an offset used twice, or out of nowhere."""
    OUT_OF_ORDER = "out of order"
    """A start at or below the last start of its lane and epoch."""
    REPEATED = "repeated"
    """A message was started although a commit had said that it is done."""
    OVERLAP = "overlap"
    """Two handlers ran in one lane at once, and not because the first was left over from a lost lease or claim."""
    STALE_START = "stale start"
    """A handler started in an epoch when a higher one had been granted, or in one that was never granted; or after its
    consumer had lost its claim or given it back, or outside of it."""
    SKIPPED = "skipped"
    """A start although an earlier message of the lane was not finished, or its last try in this epoch failed, or an
    earlier message of the key was in the parking lot."""
    ATTEMPT_LOST = "attempt lost"
    """A message was started with an attempt below one before, or with that of a try that had failed in this epoch."""
    PREMATURE_COMMIT = "premature commit"
    """A commit past a message, or a claim that it is finished, that nobody had finished, parked or skipped; or only a
    handler that the committer cannot know of: one of another epoch, which ended after the committer's lease was
    granted. Also one that was taken out of the parking lot so."""
    STALE_COMMIT = "stale commit"
    """A commit was accepted from somebody who did not hold the lease at that time."""
    TWO_OWNERS = "two owners"
    """A lease was granted while the one before had not ended."""
    EPOCH_NOT_RAISED = "epoch not raised"
    """A lease was granted with an epoch that is not above all earlier ones."""
