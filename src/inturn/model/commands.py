"""What a client can ask of a node, and what it answers. These structs are the protocol.

Every command is answered once: by its answer, or by an InturnError. Commands with `wait_s` are held back by the
node until there is something to say, or the time is over (long poll). All of them may be repeated after a lost answer:
most change nothing then; a Move stores its messages again, and a SteerKey that skips has to name the offset that it
means. Partitions are given by their index in the subject's route.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

import msgspec

from inturn.model.batch import Batch, StoredBatch
from inturn.model.errors import InturnError
from inturn.model.route import Partition
from inturn.model.settings import LeaseSettings, Limits
from inturn.model.subject import Subject


class Command(msgspec.Struct, frozen=True, gc=False):
    pass


# Connecting: between a client and a server only


class Hello(Command, frozen=True, gc=False):
    """The first frame of a client; nothing else is taken before. Answered with Welcome, VersionMismatch or
    AuthenticationFailed."""

    versions: tuple[int, int]  # of the protocol, the lowest and the highest that the client speaks
    software: str = ""
    token: str = ""

    def __repr__(self) -> str:
        """Without the token: it is nobody's business but the server's."""
        return f"Hello(versions={self.versions!r}, software={self.software!r})"


class Welcome(msgspec.Struct, frozen=True, gc=False):
    """The version that both speak from now on, and what the client has to keep to."""

    version: int
    software: str
    frame_bytes: int  # the largest frame that is taken
    lease: LeaseSettings
    role: str = ""  # one of Role; empty: a node that is meta and broker in one


class Ping(Command, frozen=True, gc=False):
    """Is anybody there? Answered with Done. A client that has been silent for a minute is hung up on."""


# Producing


class OpenProducer(Command, frozen=True, gc=False):
    """Ask for a producer id. A name gets its id back with a higher epoch, which fences whoever had it before.

    With the nonce of whoever opened it last, it is answered as it was then: a repeated or late copy fences nobody.
    """

    name: str | None = None
    nonce: str | None = None


class ProducerOpened(msgspec.Struct, frozen=True, gc=False):
    producer_id: int
    epoch: int


class Append(Command, frozen=True, gc=False, array_like=True):
    """Store a batch. Answered when it is durable as the log's flush setting says.

    A batch whose sequence was stored already is answered with its first offset again. A sequence that leaves
    one out is refused, unless `gap` says that the producer gave up what is missing.
    """

    subject: str
    partition: int
    batch: Batch
    gap: bool = False


class Appended(msgspec.Struct, frozen=True, gc=False, array_like=True):
    base_offset: int


# Membership


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
    tags: str = ""  # an expression, see `inturn.model.tags`; as with `order`, the members of a group agree


class KeyRequest(msgspec.Struct, frozen=True, gc=False):
    """Somebody asks the holder of a partition to park, resume or skip a key."""

    id: int  # counts up within the node
    partition: int
    key: bytes
    kind: str  # one of KeyAction
    offset: int | None = None  # skip: which message; only if it is still the first of its key
    by: str = ""
    why: str = ""
    origin: int | None = None  # skip: the partition that the message was read from, if it is another one


class Trial(msgspec.Struct, frozen=True, gc=False):
    """One stored message that one member is to handle out of turn, for diagnosis."""

    id: str  # given by whoever asks for it
    partition: int
    offset: int


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


class Done(msgspec.Struct, frozen=True, gc=False):
    pass


# Consuming


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

    offset: int  # of one that came to the partition with a parking lot: its mark (see `inturn.model.mark`)
    key: bytes | None
    attempts: int  # so far
    error: str
    waiting: int = 0  # messages behind it in its lane, as far as pulled
    is_exhausted: bool = False  # not repeated any more until somebody resumes or skips its key


class Lot(msgspec.Struct, frozen=True, gc=False):
    """A key whose messages are parked."""

    key: bytes
    state: str  # one of LotState


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


class ParkedMessage(msgspec.Struct, frozen=True, gc=False):
    """A message in the parking lot of its key, with all there is of it: the log may forget it meanwhile."""

    partition: int
    offset: int
    content: bytes  # an Outgoing, as msgpack
    position: int = 0  # counts up in the lot; given by the node


class LotChange(msgspec.Struct, frozen=True, gc=False):
    """What becomes of the parking lot of one key."""

    key: bytes
    state: str  # one of LotState, from now on
    reason: str = ""
    added: tuple[ParkedMessage, ...] = ()  # to its end; one that is there already stays where it is
    removed: tuple[tuple[int, int], ...] = ()  # handled or skipped: (partition, offset)


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


# Shared groups


class Receipt(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """One message, given out once: valid in the epoch it came with, until it is acknowledged, returned or over."""

    offset: int
    number: int  # counts up within an epoch


class Delivery(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that was given out; `deliveries` counts how often, this one included."""

    offset: int
    number: int  # of the receipt
    deliveries: int = 1


class Fetch(Command, frozen=True, gc=False, array_like=True):
    """Be given messages of a partition of a shared group, `max_count` at the most; held back until there are any.

    They are this member's for `visibility_s`, counted from when they are given out. `ask` counts up per member and
    partition; `answered` is the highest whose answer arrived: what was given out for later ones did not, and is free.
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
    """`pulled` holds the messages of `deliveries`, and maybe others beside them, which are not to be handled."""

    epoch: int  # of their receipts; rises whenever the node has forgotten what it gave out
    deliveries: tuple[Delivery, ...]
    pulled: Pulled
    waited_s: float = 0.0  # between when the ask was heard and when they were given out


class Returned(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """A message that is to be given out again, after a while; with an error it has failed, and that is counted."""

    offset: int
    number: int  # of the receipt
    delay_s: float = 0.0
    error: str | None = None
    key: bytes | None = None


class PartitionReceipts(msgspec.Struct, frozen=True, gc=False, array_like=True):
    """What became of messages that were given out."""

    partition: int
    epoch: int
    done: tuple[Receipt, ...] = ()
    returned: tuple[Returned, ...] = ()


class Acknowledge(Command, frozen=True, gc=False):
    """Messages of a shared group are done, or are to be given out again. Stored together, or nothing.

    `number` counts up per member: the same again is answered as it was; older ones, to whose answers nobody listens any
    more, change nothing. Receipts that are over are refused, each alone.
    """

    subject: str
    group: str
    member: str
    number: int
    receipts: tuple[PartitionReceipts, ...]


class Acknowledged(msgspec.Struct, frozen=True, gc=False):
    """All was taken but these, (partition, offset), whose receipts are over."""

    refused: tuple[tuple[int, int], ...] = ()


class OpenRetry(Command, frozen=True, gc=False):
    """Make the group's retry subject, with one partition per delay, if it is not there. Answered with the Subject."""

    subject: str
    group: str
    levels: int


class OpenDeadLetters(Command, frozen=True, gc=False):
    """Make the group's dead-letter subject, with one partition, if it is not there. Answered with the Subject."""

    subject: str
    group: str


class Move(Command, frozen=True, gc=False):
    """Store messages that failed in the group's retry or dead-letter subject, under the lease of their partition.

    Answered when they are durable: only then are they done where they came from. A repeated Move stores them again.
    In a shared group it is done under the receipts of the messages, all of them or none (ReceiptExpired names those
    that are over); they are to be acknowledged afterwards.
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


class ReadLot(Command, frozen=True, gc=False):
    """Read the parking lot of a key, under the lease of the partition, behind a position."""

    subject: str
    group: str
    partition: int
    member: str
    epoch: int
    key: bytes
    after: int
    max_bytes: int


class LotContent(msgspec.Struct, frozen=True, gc=False):
    messages: tuple[ParkedMessage, ...]
    is_end: bool  # nothing is behind the last of them


class Read(Command, frozen=True, gc=False):
    """Read without a lease or a commit."""

    subject: str
    partition: int
    offset: int
    max_bytes: int
    wait_s: float = 0.0
    slots: bytes = b""  # a SlotSet: messages of other slots are left out (see `inturn.model.batch.chosen`)
    tags: str = ""  # an expression: messages with other tags are left out
    group: str = ""  # that of the member that reads, if one does: then its right to consume counts


# Looking and steering


class CreateSubject(Command, frozen=True, gc=False):
    """Answered with the Subject. The same again is no error; other settings are (AlreadyExists)."""

    name: str
    partitions: int
    routing: str
    strategy: str
    limits: Limits
    keyless: str = "independent"
    # Of the partitions, in turns; none given: over two that are available, or one if there is one.
    broker_groups: tuple[str, ...] = ()


class GrowSubject(Command, frozen=True, gc=False):
    """Give a subject that routes by slots more partitions. Answered with the Subject; the same again is no error."""

    name: str
    partitions: int


class FindSubject(Command, frozen=True, gc=False):
    name: str


class ListSubjects(Command, frozen=True, gc=False):
    pass


class SubjectList(msgspec.Struct, frozen=True, gc=False):
    subjects: tuple[Subject, ...]


class DescribeSubject(Command, frozen=True, gc=False):
    name: str


class PartitionDescription(msgspec.Struct, frozen=True, gc=False):
    index: int
    partition: Partition
    start_offset: int
    end_offset: int
    size_bytes: int
    state: str  # "ok", "stopped", "damaged"
    appended_per_s: float = 0.0  # messages, over the last ten seconds


class SubjectDescription(msgspec.Struct, frozen=True, gc=False):
    subject: Subject
    partitions: tuple[PartitionDescription, ...]


class DescribeNode(Command, frozen=True, gc=False):
    """How the node itself is: whether it is ready, its clock, its disk, and leases that do not come to rest."""


class ReadyPart(msgspec.Struct, frozen=True, gc=False):
    """One part of a node: "work" (it takes new work), "logs", "state" (the database), of meta "brokers". `why` says
    what is the matter, also where that does not keep the part from being ready."""

    name: str
    is_ready: bool
    why: str = ""


class DiskRoom(msgspec.Struct, frozen=True, gc=False):
    """Below the reserve, appends are refused."""

    free_bytes: int
    reserve_bytes: int


class RestlessLease(msgspec.Struct, frozen=True, gc=False):
    """A lease that was granted again and again in the last ten minutes."""

    subject: str
    group: str
    partition: int
    grant_count: int


class NodeDescription(msgspec.Struct, frozen=True, gc=False):
    software: str
    now_ms: int  # on the node's clock
    up_s: float
    parts: tuple[ReadyPart, ...]
    disk: DiskRoom | None = None  # None: there is none to speak of, or it cannot be asked
    restless: tuple[RestlessLease, ...] = ()

    @property
    def is_ready(self) -> bool:
        return all(part.is_ready for part in self.parts)


class ResolvePosition(Command, frozen=True, gc=False):
    """The offset of a start position in every partition of the subject."""

    subject: str
    position: str
    group: str = ""  # as in Read


class Offsets(msgspec.Struct, frozen=True, gc=False):
    offsets: tuple[int, ...]


class ListGroups(Command, frozen=True, gc=False):
    pass


class GroupName(msgspec.Struct, frozen=True, gc=False):
    subject: str
    group: str


class GroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[GroupName, ...]


class DescribeGroup(Command, frozen=True, gc=False):
    subject: str
    group: str


class ShutGate(msgspec.Struct, frozen=True, gc=False):
    """A partition is not open to a group yet: older messages of its keys are unfinished in this parent."""

    parent: int
    offset: int | None = None  # of the first of them, if known


class GroupPartition(msgspec.Struct, frozen=True, gc=False):
    partition: int
    committed: int
    end_offset: int
    owner: str | None
    epoch: int
    remaining_s: float | None  # until the lease ends unless it is renewed
    finished_count: int = 0  # above `committed`, done all the same
    done_per_s: float = 0.0  # over the last ten seconds
    blocking: KeyDescription | None = None  # of the keys that fail, are blocked or parked: most waits behind it
    gate: ShutGate | None = None
    outstanding: int = 0  # shared groups: given out and not acknowledged
    waiting: int = 0  # shared groups: came back, and wait to be given out again
    redeliveries: int = 0  # shared groups: messages given out again since the node was started

    @property
    def lag(self) -> int:
        return max(0, self.end_offset - self.committed - self.finished_count)


class MemberDescription(msgspec.Struct, frozen=True, gc=False):
    """Its name says on which host and in which process it is."""

    name: str
    since_ms: int  # when it came
    assigned: tuple[int, ...]
    held: tuple[int, ...]  # partitions whose leases it has


class ClaimDescription(msgspec.Struct, frozen=True, gc=False):
    """Who works on some slots of a partition under the lease of its owner."""

    partition: int
    claimant: str
    slot_count: int
    done: int  # messages, as far as committed


class GroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`order` and `assignment` are what its members agree on; None if there are none. What a broadcast group has done
    is known to its members only: it has no partitions here."""

    subject: str
    group: str
    members: tuple[str, ...]
    partitions: tuple[GroupPartition, ...]
    member_details: tuple[MemberDescription, ...] = ()  # of the same members, by name
    order: str | None = None
    assignment: str | None = None  # one of AssignmentStrategy
    claims: tuple[ClaimDescription, ...] = ()
    taken_over_by: str | None = None  # the member that all partitions are for
    mode: str = "exclusive"  # one of GroupMode
    set_order: str | None = None  # what somebody decided, whatever the members ask for
    tags: str | None = None  # the expression that its members agree on, empty for all; None if there are none

    @property
    def lag(self) -> int:
        return sum(one.lag for one in self.partitions)


class SetOrder(Command, frozen=True, gc=False):
    """Decide which order the members of a group keep to, whatever they ask for; "" leaves it to them again.

    They follow a stricter one than they asked for, and stop at a weaker one. Answered with Done, once it is durable.
    """

    subject: str
    group: str
    order: str  # one of Order, or nothing


class ResetGroup(Command, frozen=True, gc=False):
    """Move the group to a position in all partitions. Refused with GroupConflict while a lease is live."""

    subject: str
    group: str
    position: str


class SteerKey(Command, frozen=True, gc=False):
    """Ask the holder of a key's partition to park, resume or skip it. Answered with the KeyRequest, once it is durable.

    `partition` is needed only where the route does not tell it. Refused with NotFound if there is nothing to resume
    or to skip. `offset` makes a skip safe to repeat: it is refused unless that is the first message of the key.
    """

    subject: str
    group: str
    key: bytes
    action: str  # one of KeyAction
    by: str
    why: str
    partition: int | None = None
    offset: int | None = None  # skip only


class FindRequest(Command, frozen=True, gc=False):
    """Whether a request was acted upon; held back until then, or until `wait_s` is over."""

    subject: str
    group: str
    id: int
    wait_s: float = 0.0


class RequestState(msgspec.Struct, frozen=True, gc=False):
    """What became of a request: `done_at_ms` is None while nobody has acted upon it."""

    request: KeyRequest
    asked_at_ms: int
    done_at_ms: int | None


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


class ListKeys(Command, frozen=True, gc=False):
    """The keys of a group that do not go on by themselves, or that somebody asked something of."""

    subject: str
    group: str


class KeyDescription(msgspec.Struct, frozen=True, gc=False):
    """`offset` is that of its first message that is not over, `waiting` counts those behind it."""

    key: bytes | None
    partition: int
    # "failing" (repeated by itself), "blocked" (attempts used up), one of LotState, or "requested" (nothing else yet)
    state: str
    offset: int | None
    attempts: int
    error: str
    since_ms: int
    waiting: int
    reason: str = ""
    requests: tuple[KeyRequest, ...] = ()  # not acted upon yet


class KeyList(msgspec.Struct, frozen=True, gc=False):
    keys: tuple[KeyDescription, ...]


class DescribeKey(Command, frozen=True, gc=False):
    """One key of a group, with what is parked of it, from `after` on. NotFound if nothing is the matter with it."""

    subject: str
    group: str
    key: bytes
    after: int = 0
    max_bytes: int = 1 << 20


class KeyDetails(msgspec.Struct, frozen=True, gc=False):
    """A key with what is parked of it, and what was asked of it."""

    description: KeyDescription
    parked: tuple[ParkedMessage, ...]
    parked_is_end: bool
    history: tuple[RequestState, ...]  # who asked what, newest first


# Broker groups


class BrokerGroupDescription(msgspec.Struct, frozen=True, gc=False):
    """`state` is what an operator has set; whether its broker is heard is another thing."""

    name: str
    state: str  # one of BrokerGroupState
    address: str = ""  # where clients reach its broker; empty: it is this node
    is_heard: bool = True
    partition_count: int = 0
    silent_s: float = 0.0  # since its broker was last heard

    @property
    def condition(self) -> str:
        """In one word: the state, or "dead" if its broker is not heard."""
        return self.state if self.is_heard else "dead"


class ListBrokerGroups(Command, frozen=True, gc=False):
    pass


class BrokerGroupList(msgspec.Struct, frozen=True, gc=False):
    groups: tuple[BrokerGroupDescription, ...]


class SetBrokerGroup(Command, frozen=True, gc=False):
    """Make a broker group read-only, unavailable, or available again. Answered with its description, once durable."""

    name: str
    state: str  # one of BrokerGroupState


# Between meta and brokers only


class ReportBroker(Command, frozen=True, gc=False):
    """A broker is alive. Sent every second or so; answered with BrokerOrders."""

    broker_group: str
    identity: str  # of its folder: a broker group is one, and another one of the same name is refused
    address: str  # where clients reach it
    life_s: float  # of its leases; all brokers and meta have the same
    seals: tuple[str, ...] = ()  # growths that it has sealed partitions for, and not heard the end of


class BrokerOrders(msgspec.Struct, frozen=True, gc=False):
    """What a broker has to know. If its catalogue is not `version`, it reads that of meta."""

    number: int  # of the broker group; counts up, and is never given twice
    version: str  # of the catalogue
    state: str  # one of BrokerGroupState
    void: tuple[str, ...] = ()  # growths that came to nothing: their seals are to be broken


class ReadCatalogue(Command, frozen=True, gc=False):
    """All subjects, and the epochs of producers that have a name. Answered with the Catalogue."""


class NamedProducer(msgspec.Struct, frozen=True, gc=False):
    name: str
    producer_id: int
    epoch: int


class Catalogue(msgspec.Struct, frozen=True, gc=False):
    version: str
    subjects: tuple[Subject, ...]
    producers: tuple[NamedProducer, ...]


class LearnSubject(Command, frozen=True, gc=False):
    """To a broker: a subject is new, or has a new route. Answered with Done, once its logs are there."""

    subject: Subject


class LearnProducer(Command, frozen=True, gc=False):
    """To a broker: a producer of this name was opened; from now on older epochs are fenced. Answered with Done."""

    producer: NamedProducer


class SealSubject(Command, frozen=True, gc=False):
    """To a broker: take no more appends by routes before this version. Answered with Sealed, once that is durable.

    It holds until the broker learns of a route of that version, or hears that the growth is void.
    """

    name: str
    version: int
    growth: str  # names this attempt


class Sealed(msgspec.Struct, frozen=True, gc=False):
    """The ends of the broker's partitions of the subject: (partition, offset)."""

    barriers: tuple[tuple[int, int], ...]


class OpenGroup(Command, frozen=True, gc=False):
    """To a broker: a group is joined; it begins at `start` where it is new. Answered with GroupOpened."""

    subject: str
    group: str
    start: str
    mode: str  # one of GroupMode


class GroupOpened(msgspec.Struct, frozen=True, gc=False):
    """How the group was made, and who holds live leases of it at this broker: (member, partitions)."""

    start: str
    mode: str
    holders: tuple[tuple[str, tuple[int, ...]], ...] = ()


class FindGroup(Command, frozen=True, gc=False):
    """To meta: how a group was made. Answered with GroupOpened."""

    subject: str
    group: str


class ForgetMember(Command, frozen=True, gc=False):
    """To a broker: the member has left the group; its leases are free. Answered with Done."""

    subject: str
    group: str
    member: str


class ListRequests(Command, frozen=True, gc=False):
    """To a broker: the key requests of a group that wait for somebody to act upon them. Answered with RequestList."""

    subject: str
    group: str


class RequestList(msgspec.Struct, frozen=True, gc=False):
    requests: tuple[KeyRequest, ...]


class FindMessage(Command, frozen=True, gc=False):
    """To a broker: whether there is a message at this place. Answered with Done, or NotFound that says why not."""

    subject: str
    partition: int
    offset: int


Answer: TypeAlias = (
    Welcome
    | ProducerOpened
    | Appended
    | Assignment
    | Done
    | Granted
    | Renewed
    | Pulled
    | Committed
    | Subject
    | SubjectList
    | SubjectDescription
    | Offsets
    | GroupList
    | GroupDescription
    | LotContent
    | KeyRequest
    | RequestState
    | Trial
    | TrialState
    | KeyList
    | KeyDetails
    | NodeDescription
    | Fetched
    | Acknowledged
    | BrokerGroupDescription
    | BrokerGroupList
    | BrokerOrders
    | Catalogue
    | Sealed
    | GroupOpened
    | RequestList
)
Reply: TypeAlias = Callable[[Answer | InturnError], None]


class Node(Protocol):
    """Where commands go: a node in this process, or a connection to one."""

    def submit(self, command: Command, reply: Reply) -> None:
        """Returns at once. `reply` is called exactly once, from any thread, maybe before this returns."""
        ...
