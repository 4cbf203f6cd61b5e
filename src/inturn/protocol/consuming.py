"""Commands of consumers: leases, claims, pulls, commits, heartbeats and assignments; deliveries and receipts of shared
groups; moves of failed messages to derived subjects."""

from __future__ import annotations

import msgspec

from inturn.model.batch import Batch, StoredBatch
from inturn.model.subject import Subject
from inturn.protocol.command import Command
from inturn.protocol.keys import KeyRequest, Lot, LotChange, Trial


class Acquire(Command, frozen=True, gc=False):
    """Acquire the lease of a partition. Held back until the lease is free, or `wait_s` is over (then LeaseHeld).

    Every grant has a higher epoch than all before. `ask`, the acquire number, rises per member: a repeat of the same
    number is answered with the same grant, a lower number is refused.
    """

    subject: str
    group: str
    partition: int
    member: str
    ask: int
    wait_s: float = 0.0
    keeps: bool = False  # claims under the lease will follow
    outlives: bool = False  # the member's work may outlive its process, so the lease does, too


class Claim(Command, frozen=True, gc=False):
    """Claim some slots of a partition, under the lease of `owner`. Answered like an Acquire.

    Held back while a different claimant has any of the slots. Once granted, `member` pulls, commits, moves and releases
    with the lease's epoch like an owner, but gets messages of the claimed slots only; commits add to the stored
    progress. Renewing a claim renews the lease. A lease with live claims is not released (LeaseHeld): the node calls
    the claims back.
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
    """A failed message that waits for its retry, for the next holder of the lease."""

    offset: int  # of a message that came with a parking lot: its mark (see `inturn.model.offsets`)
    key: bytes | None
    attempts: int  # so far
    error: str
    waiting: int = 0  # pulled messages behind it in its lane
    is_exhausted: bool = False  # no retry until an operator resumes or skips the key


class Granted(msgspec.Struct, frozen=True, gc=False):
    """The lease, with the progress of the former holder."""

    epoch: int
    offset: int  # the next offset to consume
    life_s: float  # from before the Acquire was sent
    finished: bytes = b""  # finished offsets above `offset`: a roaring bitmap, or empty
    failures: tuple[Failure, ...] = ()
    lots: tuple[Lot, ...] = ()
    requests: tuple[KeyRequest, ...] = ()  # waiting requests of this partition
    request_mark: int = 0  # requests in an assignment count only above this id
    is_claim: bool = False  # there are other claims: commits list finished offsets only


class Renew(Command, frozen=True, gc=False):
    """Renew leases, each given as (partition, epoch)."""

    subject: str
    group: str
    member: str
    held: tuple[tuple[int, int], ...]


class Renewed(msgspec.Struct, frozen=True, gc=False):
    """The partitions with live leases; all other leases are over. `wanted_back`: claims under a lease that is to be
    released. The claimants finish running messages, commit and release."""

    partitions: tuple[int, ...]
    wanted_back: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()  # unreachable broker: not renewed, state unknown


class Pull(Command, frozen=True, gc=False, array_like=True):
    """Read from an offset on, under a lease. Renews the lease."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    tags: str = ""  # an expression: other messages are filtered out (see `inturn.model.batch.tagged`)


class Pulled(msgspec.Struct, frozen=True, gc=False, array_like=True):
    batches: tuple[StoredBatch, ...]
    next_offset: int  # of the next pull: behind the last batch, or behind a gap without messages
    end_offset: int  # one past the newest readable message
    now_ms: int = 0  # on the clock of `stored_at_ms`
    unwanted: bytes = b""  # offsets filtered out by tags, which count as finished: a roaring bitmap, or empty


class Progress(msgspec.Struct, frozen=True, gc=False):
    """The progress of a member in a partition. Stored as a whole, or not at all.

    `number` rises within an epoch: progress with a lower number than stored has no effect.
    """

    partition: int
    epoch: int
    offset: int  # all messages below are finished
    number: int = 0
    finished: bytes = b""  # finished offsets above: a roaring bitmap, or empty
    failed: tuple[Failure, ...] = ()  # since the last answered commit
    settled: tuple[int, ...] = ()  # offsets of earlier failures that are finished now
    lots: tuple[LotChange, ...] = ()
    requests: tuple[int, ...] = ()  # ids of executed requests
    ask: int = 0  # of a claimant: the acquire number of its claim, since all claims of a lease share its epoch


class Commit(Command, frozen=True, gc=False):
    """Store progress. Refused for a partition whose lease the member does not hold with this epoch."""

    subject: str
    group: str
    member: str
    progress: tuple[Progress, ...]


class Committed(msgspec.Struct, frozen=True, gc=False):
    """The partitions with accepted progress; the epoch of all other partitions is over."""

    partitions: tuple[int, ...]
    unreached: tuple[int, ...] = ()  # unreachable broker: stored or not, unknown


class Release(Command, frozen=True, gc=False):
    """Commit and release the lease in one step. A waiting Acquire gets the lease at once."""

    subject: str
    group: str
    member: str
    progress: Progress

    @property
    def partition(self) -> int:
        return self.progress.partition


class Heartbeat(Command, frozen=True, gc=False):
    """A member is alive. Answered at once if the assignment is newer than `generation`, otherwise after `wait_s`.

    The first heartbeat joins the group. A new group is created, and starts at `start`.
    """

    subject: str
    group: str
    member: str
    order: str
    start: str
    generation: int = 0
    wait_s: float = 0.0
    assignment: str = "sticky"  # one of AssignmentStrategy; like `order`, equal for all members
    takes_over: bool = False  # gets all partitions while it is a member; at most one member (GroupConflict)
    mode: str = "exclusive"  # one of GroupMode; fixed by the first member of the group (else GroupConflict)
    tags: str = ""  # an expression (see `inturn.model.message`); like `order`, equal for all members


class Assignment(msgspec.Struct, frozen=True, gc=False):
    """The partitions that a member should consume. Advice: only a lease permits consuming."""

    generation: int
    partitions: tuple[int, ...]
    subject: Subject
    authorised_s: float  # from before the heartbeat was sent; after that time the member stops
    requests: tuple[KeyRequest, ...] = ()  # all waiting requests of the group, executed by the partitions' holders
    order: str = ""  # of all members of the group: as they asked, or as an operator has set
    assignment: str = ""  # the assignment strategy of the group
    trials: tuple[Trial, ...] = ()  # of this member: until the result is reported, or the operator gives up


class Leave(Command, frozen=True, gc=False):
    """The member leaves the group. Sent after the last lease was released."""

    subject: str
    group: str
    member: str


class Receipt(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivery of a message: valid in the epoch until the message is acknowledged or returned, or time is over."""

    offset: int
    number: int  # rises within an epoch


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A delivered message; `deliveries` counts all deliveries of the message, this delivery included."""

    offset: int
    number: int  # of the receipt
    deliveries: int = 1


class Fetch(Command, frozen=True, gc=False, array_like=True):
    """Fetch at most `max_count` messages of a partition of a shared group. Held back until a message is available.

    The messages belong to the member for `visibility_s` from their delivery on. `ask` rises per member and partition;
    `answered` is the highest `ask` whose answer arrived: messages delivered for a higher `ask` are free again.
    """

    subject: str
    group: str
    partition: int
    member: str
    ask: int
    answered: int
    max_count: int
    max_bytes: int
    visibility_s: float
    wait_s: float = 0.0


class Fetched(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """`pulled` holds the messages of `deliveries`, and may hold further messages, which are not to be handled."""

    epoch: int  # of the receipts; rises when the node has lost its record of deliveries
    deliveries: tuple[Delivery, ...]
    pulled: Pulled
    waited_s: float = 0.0  # from the arrival of the Fetch until the delivery


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message for redelivery after `delay_s`. With an error, the message has failed, and the failure is counted."""

    offset: int
    number: int  # of the receipt
    delay_s: float = 0.0
    error: str | None = None
    key: bytes | None = None


class PartitionReceipts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """The results of delivered messages of a partition."""

    partition: int
    epoch: int
    done: tuple[Receipt, ...] = ()
    returned: tuple[Returned, ...] = ()


class Acknowledge(Command, frozen=True, gc=False):
    """Messages of a shared group are finished, or return for redelivery. Stored as a whole, or not at all.

    `number` rises per member: a repeat is answered as before; a lower number has no effect, since the member has
    stopped waiting for the answer. Expired receipts are refused one by one.
    """

    subject: str
    group: str
    member: str
    number: int
    receipts: tuple[PartitionReceipts, ...]


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """All receipts were accepted but `refused`, as (partition, offset): those receipts are over."""

    refused: tuple[tuple[int, int], ...] = ()


class OpenRetry(Command, frozen=True, gc=False):
    """Create the group's retry subject, with a partition per delay, unless present. Answered with the Subject."""

    subject: str
    group: str
    levels: int


class OpenDeadLetters(Command, frozen=True, gc=False):
    """Create the group's dead-letter subject, with one partition, unless present. Answered with the Subject."""

    subject: str
    group: str


class Move(Command, frozen=True, gc=False):
    """Store failed messages in the group's retry or dead-letter subject, under the lease of the partition.

    Answered when the messages are durable: only then are the messages finished in the partition. A repeated Move stores
    the messages again. In a shared group, the receipts of all messages have to be valid (otherwise ReceiptExpired names
    the expired receipts); the member acknowledges the messages afterwards.
    """

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    to_subject: str
    to_partition: int
    batch: Batch
    receipts: tuple[Receipt, ...] = ()  # shared groups
