"""Consuming under a lease: reading, and saying what is done.

Leases and claims: who may consume what, and since when.

Membership: who is in a group, and who should consume what.
"""

from __future__ import annotations

import msgspec

from inturn.model.batch import StoredBatch
from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyRequest, Lot, LotChange, Trial


class Acquire(Command, frozen=True, gc=False):
    """Ask for the lease of a partition; held back until it is free or `wait_s` is over (then LeaseHeld).

    Every grant has a higher epoch than all before. `ask` counts up per member: the same ask again is answered
    with the same grant, an older one is refused.
    """

    subject: str
    group: str
    partition: int
    member: str
    ask: int
    wait_s: float = 0.0
    keeps: bool = False  # others are to work under it
    outlives: bool = False  # something of the member may outlive its process, so the lease does not end with that


class Claim(Command, frozen=True, gc=False):
    """Ask for the right to work on some slots of a partition, under the lease of `owner`; answered as an Acquire is.

    Held back while another claimant has any of the slots. From then on `member` pulls, commits, moves and releases with
    the lease's epoch as an owner would, but is given messages of its slots only, and its commits add to what is stored.
    What renews a claim renews the lease. A lease with live claims is not released (LeaseHeld): they are called back.
    """

    subject: str
    group: str
    partition: int
    owner: str
    epoch: int
    member: str
    ask: int
    slots: bytes = b""  # a SlotSet
    wait_s: float = 0.0


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A message that failed and waits to be repeated: what the next holder has to know of it."""

    offset: int  # of one that came to the partition with a parking lot: its mark (see `inturn.model.offsets`)
    key: bytes | None
    attempts: int  # so far
    error: str
    waiting: int = 0  # messages behind it in its lane, as far as pulled
    is_exhausted: bool = False  # not repeated any more until somebody resumes or skips its key


class Granted(msgspec.Struct, frozen=True, gc=False):
    """The lease, and how far the holder before came."""

    epoch: int
    offset: int  # where to go on
    life_s: float  # counted from before the lease was asked for
    finished: bytes = b""  # offsets above `offset` that are done all the same: a roaring bitmap, or nothing
    failures: tuple[Failure, ...] = ()
    lots: tuple[Lot, ...] = ()
    requests: tuple[KeyRequest, ...] = ()  # that wait for this partition
    request_mark: int = 0  # requests in an assignment count only above this
    is_claim: bool = False  # others work on the partition, too: commits say what was finished, not how far it is


class Renew(Command, frozen=True, gc=False):
    """Keep leases, each given as (partition, epoch)."""

    subject: str
    group: str
    member: str
    held: tuple[tuple[int, int], ...]


class Renewed(msgspec.Struct, frozen=True, gc=False):
    """The partitions whose leases live on; the others are over. `wanted_back` are claims among them whose lease is
    to be released: their holders come to an end with them, commit and give them back."""

    partitions: tuple[int, ...]
    wanted_back: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()  # their broker could not be asked: nothing is known of them, nothing was renewed


class Pull(Command, frozen=True, gc=False, array_like=True):
    """Read from an offset on, under a lease, which this renews."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    tags: str = ""  # an expression: other messages are left out (see `inturn.model.batch.tagged`)


class Pulled(msgspec.Struct, frozen=True, gc=False, array_like=True):
    batches: tuple[StoredBatch, ...]
    next_offset: int  # where to go on; behind the last batch, or behind a gap in which nothing is stored
    end_offset: int  # one past the newest that may be read
    now_ms: int = 0  # on the clock that `stored_at_ms` was taken from
    unwanted: bytes = b""  # offsets that were left out for their tags, and count as done: a roaring bitmap, or nothing


class Progress(msgspec.Struct, frozen=True, gc=False):
    """How far a member is with a partition that it holds. All of it is stored together, or nothing.

    `number` counts up within an epoch: what comes late, after a higher one, changes nothing.
    """

    partition: int
    epoch: int
    offset: int  # everything below is done
    number: int = 0
    finished: bytes = b""  # offsets above that are done, too: a roaring bitmap, or nothing
    failed: tuple[Failure, ...] = ()  # since the last commit that was answered
    settled: tuple[int, ...] = ()  # offsets that failed before and are over now
    lots: tuple[LotChange, ...] = ()
    requests: tuple[int, ...] = ()  # ids of those that were acted upon
    ask: int = 0  # of a claimant: what its claim was granted for, since all claims under a lease have its epoch


class Commit(Command, frozen=True, gc=False):
    """Store progress. Partitions whose lease is not held with that epoch are refused."""

    subject: str
    group: str
    member: str
    progress: tuple[Progress, ...]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The partitions whose offset was taken; for the others the epoch is over."""

    partitions: tuple[int, ...]
    unreached: tuple[int, ...] = ()  # their broker could not be asked: whether it was taken is not known


class Release(Command, frozen=True, gc=False):
    """Commit and give the lease back, in one step; whoever waits for it gets it at once."""

    subject: str
    group: str
    member: str
    progress: Progress

    @property
    def partition(self) -> int:
        return self.progress.partition


class Heartbeat(Command, frozen=True, gc=False):
    """A member is alive. Answered at once if the assignment is newer than `generation`, else after `wait_s`.

    The first heartbeat joins the group and creates it if needed, starting at `start`.
    """

    subject: str
    group: str
    member: str
    order: str
    start: str
    generation: int = 0
    wait_s: float = 0.0
    assignment: str = "sticky"  # one of AssignmentStrategy; as with `order`, the members of a group agree
    takes_over: bool = False  # all partitions are its own as long as it is there; one member at most (GroupConflict)
    mode: str = "exclusive"  # one of GroupMode; the group has that of its first member for good (else GroupConflict)
    tags: str = ""  # an expression, see `inturn.model.message`; as with `order`, the members of a group agree


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """Who should consume what. Advice: only a lease gives the right to."""

    generation: int
    partitions: tuple[int, ...]
    subject: Subject
    authorised_s: float  # counted from before the heartbeat was sent; then the member stops by itself
    requests: tuple[KeyRequest, ...] = ()  # all that wait in the group; whoever holds the partition acts on them
    order: str = ""  # what all members of the group keep to: what they asked for, unless somebody has set another
    assignment: str = ""  # the assignment strategy of the group
    trials: tuple[Trial, ...] = ()  # for this member only: each until it is reported, or given up


class Leave(Command, frozen=True, gc=False):
    """The member goes. Send it after the last lease was released."""

    subject: str
    group: str
    member: str
