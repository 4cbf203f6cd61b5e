"""Everything inturn raises, one tree:

InturnError
├── InvalidInput            a value that cannot be accepted; nothing was changed
│   ├── InvalidName         a subject, group or producer name outside its alphabet
│   └── LimitExceeded       a body, key or properties larger than allowed
├── NotFound                no such subject, group or partition
├── AlreadyExists           the subject is there, with other settings
├── FolderInUse             another process has the folder open
├── SchemaMismatch          the folder was written by another version
├── StorageError            the log of one partition
│   ├── DiskFull            no room; refused, nothing written (retriable)
│   ├── LogStopped          a sync failed: the log takes no more appends until it is reopened
│   └── LogDamaged          a checksum does not fit in the middle of the log
├── LeaseError              consuming without the right to
│   ├── LeaseHeld           another member holds the lease (retriable)
│   │   └── GateClosed      older messages of the same keys come first (retriable)
│   ├── StaleEpoch          the epoch is not the current one
│   └── ReceiptExpired      a shared group: the message was, or will be, given to somebody else
├── ProducerError
│   ├── ProducerFenced      a newer producer of the same name took over
│   ├── OutOfSequence       a batch before this one is missing (retriable)
│   ├── RouteChanged        the batch was routed by another route version (retriable)
│   ├── BufferFull          the producer's buffer has no room (retriable)
│   ├── SendTimeout         not acknowledged in time; it may still be stored
│   └── SendFailed          given up
├── BrokerGroupClosed       a broker group is read-only, unavailable, or its broker is dead (retriable)
├── GroupConflict           members of one group that ask for different things, or a reset of a group at work
├── OffsetsUnusable         a broadcast consumer's own offsets cannot be read, or are not of this log
├── HandlerError            a handler returned something that is not a result
├── OutboxError
│   ├── OutboxFailed        the database of an outbox cannot be read or written (retriable)
│   ├── OutboxHeld          another scanner has the lease of the outbox (retriable)
│   └── OutboxLost          another scanner has taken the outbox over
├── HandlerRaised           a handler raised in a worker process; its class is named as what it raised
├── WorkerDied              a worker process ended while a handler ran in it
├── TrialTimeout            a member did not tell in time what became of a message that it was to try
├── AccessDenied            the principal may not do this here
├── QuotaExceeded           the principal has as much as it may have at once (retriable)
├── WireError               between a client and a server
│   ├── ConnectionLost      the server cannot be reached, or the answer did not come (retriable)
│   ├── ServerStopping      the server takes no new work, it is about to end (retriable)
│   ├── VersionMismatch     client and server know no common version of the protocol
│   ├── AuthenticationFailed  the server does not know who the client is
│   └── ProtocolError       bytes that are no frame, or a frame that nobody knows
└── Closed                  the connection, producer or consumer was closed

`retriable` says whether the same call may succeed later without anybody changing anything.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class InturnError(Exception):
    """Base of all errors. The message names the thing, the limit and the next step."""

    retriable = False

    def __reduce__(self) -> tuple[Callable[..., InturnError], tuple[object, ...]]:
        """Copies and pickles: the arguments of most errors are not what they are made from."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[InturnError], args: tuple[object, ...], fields: dict[str, object]) -> InturnError:
    error = kind.__new__(kind, *args)
    error.args = args  # those that are an OSError, too, take theirs in __init__
    error.__dict__.update(fields)
    return error


class InvalidInput(InturnError, ValueError):
    """A value that cannot be accepted. Nothing was changed."""


class InvalidName(InvalidInput):
    def __init__(self, kind: str, name: object, why: str) -> None:
        self.kind, self.name, self.why = kind, name, why
        super().__init__(f"{kind} name {name!r} {why}; use 1 to 200 of the characters A-Z a-z 0-9 . _ -")


class LimitExceeded(InvalidInput):
    def __init__(self, what: str, size: int, limit: int, setting: str) -> None:
        self.what, self.size, self.limit, self.setting = what, size, limit, setting
        super().__init__(
            f"{what} has {size} bytes, the limit is {limit}; send less, or raise {setting} where the subject is created"
        )


class NotFound(InturnError, LookupError):
    def __init__(self, kind: str, name: str, next_step: str) -> None:
        self.kind, self.name = kind, name
        super().__init__(f"no {kind} {name!r}; {next_step}")


class AlreadyExists(InturnError):
    def __init__(self, kind: str, name: str, difference: str) -> None:
        self.kind, self.name, self.difference = kind, name, difference
        super().__init__(f"{kind} {name!r} exists with {difference}; use it as it is, or another name")


class FolderInUse(InturnError):
    def __init__(self, folder: str, pid: int | None) -> None:
        self.folder, self.pid = folder, pid
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"folder {folder!r} is open in {who}; close it there first, or use another folder")


class SchemaMismatch(InturnError):
    def __init__(self, found: int, known: int) -> None:
        self.found, self.known = found, known
        super().__init__(
            f"the folder has schema version {found}, this inturn knows {known}; open it with the inturn that wrote it"
        )


class StorageError(InturnError):
    """Something about the log of one partition."""

    def __init__(self, partition: str, message: str) -> None:
        self.partition = partition
        super().__init__(f"partition {partition}: {message}")


class DiskFull(StorageError):
    retriable = True

    def __init__(self, partition: str, free_bytes: int | None = None) -> None:
        self.free_bytes = free_bytes
        left = "" if free_bytes is None else f" ({free_bytes} bytes left)"
        super().__init__(
            partition,
            f"the disk is full{left}: the append was refused, reads and commits go on; "
            "free some room and appends resume by themselves",
        )


class LogStopped(StorageError):
    def __init__(self, partition: str, cause: str) -> None:
        self.cause = cause
        super().__init__(
            partition, f"the log is stopped since {cause}; check the disk, then close and open the folder again"
        )


class LogDamaged(StorageError):
    def __init__(self, partition: str, offset: int, detail: str) -> None:
        self.offset, self.detail = offset, detail
        super().__init__(
            partition,
            f"damaged at offset {offset}: {detail}; other partitions go on; run `inturn doctor`, then restore this one",
        )


class LeaseError(InturnError):
    pass


class LeaseHeld(LeaseError):
    retriable = True

    def __init__(self, group: str, partition: str, owner: str) -> None:
        self.group, self.partition, self.owner = group, partition, owner
        super().__init__(
            f"the lease of partition {partition} for group {group!r} is held by {owner}; wait for its release or expiry"
        )


class GateClosed(LeaseHeld):
    """The subject has grown, and what was stored before of the keys that moved here is not finished yet."""

    def __init__(self, group: str, partition: str, parent: int, offset: int | None) -> None:
        self.group, self.partition, self.parent, self.offset = group, partition, parent, offset
        self.owner = ""
        what = "what it waits for" if offset is None else f"offset {offset} and maybe more"
        Exception.__init__(
            self,
            f"partition {partition} is not open to group {group!r} yet: {what} in partition {parent} comes first; "
            "consume that one, or see which keys are in its way: `inturn key list`",
        )


class StaleEpoch(LeaseError):
    def __init__(self, group: str, partition: str, epoch: int, current: int) -> None:
        self.group, self.partition, self.epoch, self.current = group, partition, epoch, current
        super().__init__(
            f"epoch {epoch} of partition {partition}, group {group!r} is over (current: {current}); "
            "acquire the lease again and continue from the committed offset"
        )


class ReceiptExpired(LeaseError):
    def __init__(self, group: str, partition: str, offsets: tuple[int, ...]) -> None:
        self.group, self.partition, self.offsets = group, partition, offsets
        which = ", ".join(map(str, offsets[:5])) + (f" and {len(offsets) - 5} more" if len(offsets) > 5 else "")
        super().__init__(
            f"the receipt for offset {which} of partition {partition}, group {group!r} is over: nothing was changed, "
            "and the message comes again; acknowledge within ConsumerSettings.visibility_s, or raise it"
        )


class ProducerError(InturnError):
    pass


class ProducerFenced(ProducerError):
    def __init__(self, producer: str, epoch: int, current: int) -> None:
        self.producer, self.epoch, self.current = producer, epoch, current
        super().__init__(
            f"producer {producer} (epoch {epoch}) was replaced by a newer one of the same name (epoch {current}); "
            "stop this one, or open it again to take over"
        )


class OutOfSequence(ProducerError):
    retriable = True

    def __init__(self, partition: str, expected: int, got: int) -> None:
        self.partition, self.expected, self.got = partition, expected, got
        super().__init__(
            f"partition {partition}: expected sequence {expected}, got {got}; send the missing batch first"
        )


class RouteChanged(ProducerError):
    retriable = True

    def __init__(self, subject: str, sent: int, current: int) -> None:
        self.subject, self.sent, self.current = subject, sent, current
        super().__init__(
            f"subject {subject!r} is at route version {current}, the batch came with {sent}; route it again"
        )


class BufferFull(ProducerError):
    retriable = True

    def __init__(self, limit_bytes: int, waited_s: float) -> None:
        self.limit_bytes, self.waited_s = limit_bytes, waited_s
        super().__init__(
            f"the producer's buffer of {limit_bytes} bytes stayed full for {waited_s:g} s; "
            "send slower, or raise ProducerSettings.buffer_bytes"
        )


class SendTimeout(ProducerError):
    def __init__(self, subject: str, waited_s: float, last_error: str | None) -> None:
        self.subject, self.waited_s, self.last_error = subject, waited_s, last_error
        because = f" (last error: {last_error})" if last_error else ""
        super().__init__(
            f"a message for {subject!r} was not acknowledged within {waited_s:g} s{because}; "
            "it stays queued in order and may still be stored"
        )


class SendFailed(ProducerError):
    def __init__(self, subject: str, partition: str, cause: str) -> None:
        self.subject, self.partition, self.cause = subject, partition, cause
        super().__init__(f"a message for {subject!r} could not be stored in partition {partition}: {cause}")


class BrokerGroupClosed(InturnError):
    """`condition` is "read-only" or "unavailable" as an operator has set it, or "dead" if its broker is not heard."""

    retriable = True

    def __init__(self, broker_group: str, condition: str, next_step: str = "") -> None:
        self.broker_group, self.condition = broker_group, condition
        if not next_step:
            next_step = (
                "start its broker again"
                if condition == "dead"
                else f"`inturn broker-group set {broker_group} available`"
            )
        super().__init__(f"broker group {broker_group!r} is {condition}; this waits until it is back: {next_step}")


class GroupConflict(InturnError):
    def __init__(self, group: str, why: str) -> None:
        self.group, self.why = group, why
        super().__init__(f"group {group!r}: {why}")


class OffsetsUnusable(InturnError):
    def __init__(self, path: str, why: str, next_step: str) -> None:
        self.path, self.why = path, why
        super().__init__(f"offsets in {path!r}: {why}; {next_step}")


class HandlerError(InturnError):
    def __init__(self, handler: str, returned: object, allowed: Sequence[str]) -> None:
        self.handler, self.returned = handler, returned
        super().__init__(f"handler {handler} returned {returned!r}; return one of {', '.join(allowed)}")


class OutboxError(InturnError):
    """Something about an outbox and its scanners."""


class OutboxFailed(OutboxError):
    retriable = True

    def __init__(self, table: str, why: str) -> None:
        self.table, self.why = table, why
        super().__init__(f"outbox {table!r}: the database said {why!r}; what is in it stays, look at the database")


class OutboxHeld(OutboxError):
    retriable = True

    def __init__(self, table: str, owner: str, waited_s: float) -> None:
        self.table, self.owner, self.waited_s = table, owner, waited_s
        super().__init__(
            f"outbox {table!r} is scanned by {owner} (waited {waited_s:g} s for it); leave it to that one, or stop it"
        )


class OutboxLost(OutboxError):
    def __init__(self, table: str) -> None:
        self.table = table
        super().__init__(f"outbox {table!r} was taken over by another scanner, since this one was silent for too long")


class HandlerRaised(InturnError):
    """Made in the consumer's process of what a handler raised in its own."""


class WorkerDied(InturnError):
    def __init__(self, pid: int, why: str) -> None:
        self.pid, self.why = pid, why
        super().__init__(f"worker process {pid}: {why}; the attempt counts as failed, another process takes its place")


class TrialTimeout(InturnError):
    def __init__(self, member: str, place: str, waited_s: float) -> None:
        self.member, self.place, self.waited_s = member, place, waited_s
        super().__init__(
            f"member {member} has not told within {waited_s:g} s what became of {place}; its handler may still run, or "
            "run another trial: wait longer, or look at the member itself"
        )


class AccessDenied(InturnError):
    def __init__(self, principal: str, what: str, next_step: str) -> None:
        self.principal, self.what = principal, what
        super().__init__(f"principal {principal!r} may not {what}; {next_step}")


class QuotaExceeded(InturnError):
    retriable = True

    def __init__(self, principal: str, what: str, limit: int) -> None:
        self.principal, self.what, self.limit = principal, what, limit
        super().__init__(
            f"principal {principal!r} has {limit} {what}, as many as its quota allows; close some, or raise the quota "
            "in the server's access file"
        )


class WireError(InturnError):
    """Something between a client and a server."""


class ConnectionLost(WireError, ConnectionError):
    retriable = True

    def __init__(self, address: str, why: str) -> None:
        self.address, self.why = address, why
        super().__init__(
            f"no connection to {address}: {why}; is the server running? Start it with `inturn serve`, or wait for it"
        )


class ServerStopping(WireError):
    retriable = True

    def __init__(self) -> None:
        super().__init__("the server is stopping and takes no new work; try again when it is back")


class VersionMismatch(WireError):
    def __init__(self, theirs: tuple[int, int], ours: tuple[int, int], software: str) -> None:
        self.theirs, self.ours, self.software = theirs, ours, software
        super().__init__(
            f"the client speaks protocol versions {theirs[0]} to {theirs[1]}, the server ({software}) {ours[0]} to "
            f"{ours[1]}; install versions of inturn that have one in common"
        )


class AuthenticationFailed(WireError):
    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"authentication failed: {why}; give connect() a token that `inturn token create` has made for this server "
            "(commands take it from INTURN_TOKEN), or a client certificate if it asks for one"
        )


class ProtocolError(WireError):
    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why}; the other end is no inturn of this kind, or the stream is damaged")


class Closed(InturnError):
    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"the {what} is closed; open a new one")
