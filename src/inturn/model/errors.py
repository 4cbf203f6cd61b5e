"""All errors that inturn raises, as a tree:

InturnError
├── InvalidInput            a value that cannot be accepted; nothing was changed
│   ├── InvalidName         a subject, group or producer name outside its alphabet
│   └── LimitExceeded       a body, key or properties larger than allowed
├── NotFound                no such subject, group or partition
├── AlreadyExists           the subject is there, with other settings
├── FolderInUse             another process has the folder open
├── SchemaMismatch          the folder was written by another version
├── StorageError            the log of one partition
│   ├── DiskFull            no free space; the append was refused, no bytes were written (retriable)
│   ├── LogStopped          a sync failed: the log refuses appends until the folder is opened again
│   └── LogDamaged          a checksum does not fit in the middle of the log
├── LeaseError              consuming without a valid lease
│   ├── LeaseHeld           another member holds the lease (retriable)
│   │   └── GateClosed      older messages of the same keys come first (retriable)
│   ├── StaleEpoch          the epoch is not the current one
│   └── ReceiptExpired      a shared group: the message was, or will be, delivered again
├── ProducerError
│   ├── ProducerFenced      a newer producer of the same name took over
│   ├── OutOfSequence       a batch before this one is missing (retriable)
│   ├── RouteChanged        the batch was routed by another route version (retriable)
│   ├── BufferFull          the producer's buffer has no free space (retriable)
│   ├── SendTimeout         not acknowledged in time; the message may still be stored
│   └── SendFailed          the producer has given the message up
├── BrokerGroupClosed       a broker group is read-only, unavailable, or its broker is dead (retriable)
├── GroupConflict           members of a group with different settings, or a reset of a group with active members
├── OffsetsUnusable         a broadcast consumer's own offsets cannot be read, or are not of this log
├── HandlerError            a handler returned a value that is no result
├── OutboxError
│   ├── OutboxFailed        the database of an outbox cannot be read or written (retriable)
│   ├── OutboxHeld          another scanner has the lease of the outbox (retriable)
│   └── OutboxLost          another scanner has taken the outbox over
├── HandlerRaised           a handler raised in a worker process; the class has the name of the handler's exception
├── WorkerDied              a worker process ended while a handler ran
├── TrialTimeout            a member did not report the outcome of a trial in time
├── AccessDenied            the principal lacks the permission
├── QuotaExceeded           the principal has used up its quota (retriable)
├── WireError               between a client and a server
│   ├── ConnectionLost      the server cannot be reached, or the answer did not come (retriable)
│   ├── ServerStopping      the server is about to end and accepts no new commands (retriable)
│   ├── VersionMismatch     client and server have no common version of the protocol
│   ├── AuthenticationFailed  the server cannot authenticate the client
│   └── ProtocolError       bytes that are no frame, or an unknown frame
└── Closed                  the connection, producer or consumer was closed

`retriable` states whether the same call may succeed later without any change by a person.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence


class InturnError(Exception):
    """Base of all errors. The message names the thing, the limit and the next step."""

    retriable = False

    def __reduce__(self) -> tuple[Callable[..., InturnError], tuple[object, ...]]:
        """For copy and pickle: `args` has the message, while most constructors take fields."""
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(kind: type[InturnError], args: tuple[object, ...], fields: dict[str, object]) -> InturnError:
    error = kind.__new__(kind, *args)
    error.args = args  # a class that is also an OSError sets `args` in __init__
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
        super().__init__(f"{kind} {name!r} exists with {difference}; use the existing {kind}, or choose another name")


class FolderInUse(InturnError):
    def __init__(self, folder: str, pid: int | None) -> None:
        self.folder, self.pid = folder, pid
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"folder {folder!r} is open in {who}; close it there first, or use another folder")


class SchemaMismatch(InturnError):
    def __init__(self, found: int, known: int) -> None:
        self.found, self.known = found, known
        super().__init__(
            f"the folder has schema version {found}, this inturn knows {known}; open the folder with the version of "
            "inturn that wrote it"
        )


class StorageError(InturnError):
    """An error of the log of one partition."""

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
            f"the disk is full{left}: the append was refused, reads and commits work; "
            "free some space and appends resume by themselves",
        )


class LogStopped(StorageError):
    def __init__(self, partition: str, cause: str) -> None:
        self.cause = cause
        super().__init__(
            partition, f"the log stopped, because {cause}; check the disk, then close and open the folder again"
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
    """The subject has grown, and earlier messages of the keys that moved to this partition are not finished yet."""

    def __init__(self, group: str, partition: str, parent: int, offset: int | None) -> None:
        self.group, self.partition, self.parent, self.offset = group, partition, parent, offset
        self.owner = ""
        what = "older messages" if offset is None else f"offset {offset} and maybe later messages"
        Exception.__init__(
            self,
            f"partition {partition} is not open to group {group!r} yet: {what} in partition {parent} must be finished "
            f"first; consume partition {parent}, or list the keys that are in the way: `inturn key list`",
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
            f"the receipt for offset {which} of partition {partition}, group {group!r} has expired: nothing was "
            "changed, and the message is delivered again; acknowledge within ConsumerSettings.visibility_s, or raise "
            "visibility_s"
        )


class ProducerError(InturnError):
    pass


class ProducerFenced(ProducerError):
    def __init__(self, producer: str, epoch: int, current: int) -> None:
        self.producer, self.epoch, self.current = producer, epoch, current
        super().__init__(
            f"producer {producer} (epoch {epoch}) was replaced by a newer one of the same name (epoch {current}); "
            "stop this producer, or open the producer again to take over"
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
            f"subject {subject!r} is at route version {current}, the batch came with {sent}; route the batch again"
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
            "the message stays queued in order and may still be stored"
        )


class SendFailed(ProducerError):
    def __init__(self, subject: str, partition: str, cause: str) -> None:
        self.subject, self.partition, self.cause = subject, partition, cause
        super().__init__(f"a message for {subject!r} could not be stored in partition {partition}: {cause}")


class BrokerGroupClosed(InturnError):
    """`condition` is "read-only" or "unavailable" as set by an operator, or "dead" without heartbeats of the broker."""

    retriable = True

    def __init__(self, broker_group: str, condition: str, next_step: str = "") -> None:
        self.broker_group, self.condition = broker_group, condition
        if not next_step:
            next_step = (
                "start its broker again"
                if condition == "dead"
                else f"`inturn broker-group set {broker_group} available`"
            )
        super().__init__(
            f"broker group {broker_group!r} is {condition}; the call waits until the broker group is back: {next_step}"
        )


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
    """An error of an outbox or its scanners."""


class OutboxFailed(OutboxError):
    retriable = True

    def __init__(self, table: str, why: str) -> None:
        self.table, self.why = table, why
        super().__init__(
            f"outbox {table!r}: the database reported {why!r}; the rows stay in the outbox; check the database"
        )


class OutboxHeld(OutboxError):
    retriable = True

    def __init__(self, table: str, owner: str, waited_s: float) -> None:
        self.table, self.owner, self.waited_s = table, owner, waited_s
        super().__init__(
            f"outbox {table!r} is scanned by {owner} (waited {waited_s:g} s for the lease); leave the outbox to that "
            "scanner, or stop that scanner"
        )


class OutboxLost(OutboxError):
    def __init__(self, table: str) -> None:
        self.table = table
        super().__init__(
            f"outbox {table!r} was taken over by another scanner, because this scanner was silent for too long; the "
            "other scanner sends the rows"
        )


class HandlerRaised(InturnError):
    """The exception of a handler that ran in a worker process, rebuilt in the consumer's process."""


class WorkerDied(InturnError):
    def __init__(self, pid: int, why: str) -> None:
        self.pid, self.why = pid, why
        super().__init__(f"worker process {pid}: {why}; the attempt counts as failed, a new process takes over")


class TrialTimeout(InturnError):
    def __init__(self, member: str, place: str, waited_s: float) -> None:
        self.member, self.place, self.waited_s = member, place, waited_s
        super().__init__(
            f"member {member} has not reported the trial of {place} within {waited_s:g} s; the handler may still run, "
            "or run another trial; wait longer, or check the member"
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
            f"principal {principal!r} has {limit} {what}, as many as the quota allows; close some, or raise the quota "
            "in the server's access file"
        )


class WireError(InturnError):
    """An error between a client and a server."""


class ConnectionLost(WireError, ConnectionError):
    retriable = True

    def __init__(self, address: str, why: str) -> None:
        self.address, self.why = address, why
        super().__init__(
            f"no connection to {address}: {why}; is the server running? Start the server with `inturn serve`, or wait"
        )


class ServerStopping(WireError):
    retriable = True

    def __init__(self) -> None:
        super().__init__("the server is stopping, and refuses commands; try again after a restart")


class VersionMismatch(WireError):
    def __init__(self, theirs: tuple[int, int], ours: tuple[int, int], software: str) -> None:
        self.theirs, self.ours, self.software = theirs, ours, software
        super().__init__(
            f"the client speaks protocol versions {theirs[0]} to {theirs[1]}, the server ({software}) {ours[0]} to "
            f"{ours[1]}; install versions of inturn with a common protocol version"
        )


class AuthenticationFailed(WireError):
    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(
            f"authentication failed: {why}; give connect() a token that `inturn token create` has made for this server "
            "(commands read INTURN_TOKEN), or a client certificate if the server requires a certificate"
        )


class ProtocolError(WireError):
    def __init__(self, why: str) -> None:
        self.why = why
        super().__init__(f"{why}; the other end is no inturn client or server, or the stream is damaged")


class Closed(InturnError):
    def __init__(self, what: str) -> None:
        self.what = what
        super().__init__(f"the {what} is closed; open a new one")
