"""Settings of clients, logs, leases and consumers, and the enumerations in them. Immutable, validated when made."""

from __future__ import annotations

import enum
import importlib.util
import math
import os
from dataclasses import dataclass, field
from typing import TypeVar

from inturn.model.errors import InvalidInput
from inturn.model.message import tags_text

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
# The limit of a message and of a gathered batch. Both together must fit into the largest frame of a server (64 MiB),
# or a reader that is connected to a server could never get past the batch.
BATCH_BYTES_MAX = 24 * MIB


class Flush(enum.StrEnum):
    """When an append is acknowledged. This decides whether the append survives a crash.

    ALWAYS: after fdatasync, one sync for all waiting appends. Survives power loss. Readers see only synced messages.
    INTERVAL: at once, synced every `flush_interval_s`. Survives kill -9; power loss takes the last interval.
    OS: at once, synced by the operating system. Survives kill -9, not power loss.
    """

    ALWAYS = "always"
    INTERVAL = "interval"
    OS = "os"


class Routing(enum.StrEnum):
    """How messages of a subject are routed to a partition; fixed when the subject is created."""

    SLOTS = "slots"
    SELECTOR = "selector"


class Strategy(enum.StrEnum):
    """STRICT: no message overtakes a failed message. BEST_EFFORT: after some attempts, later messages overtake."""

    STRICT = "strict"
    BEST_EFFORT = "best-effort"


class Order(enum.StrEnum):
    """Which messages of a group run in sequence: all messages of a partition, messages with the same key, or none."""

    PARTITION = "partition"
    KEY = "key"
    NONE = "none"


class GroupMode(enum.StrEnum):
    """How the members of a group divide its messages; fixed when the group is made.

    EXCLUSIVE: a partition belongs to one member at a time, by a lease; the lease keeps the order. SHARED: all members
    take messages of all partitions, every message is acknowledged alone, and no message waits for other messages.
    BROADCAST: every member receives every message and stores its own offsets.
    """

    EXCLUSIVE = "exclusive"
    SHARED = "shared"
    BROADCAST = "broadcast"


class AssignmentStrategy(enum.StrEnum):
    """How the partitions of a subject are divided among the members of a group.

    AVERAGE: adjacent partitions, as even as possible. CIRCLE: dealt out in turn, as even as possible.
    CONSISTENT_HASH: by a ring; a member that joins or leaves moves no partition between other members, but shares are
    less even. STICKY: as even as possible, and members keep their partitions as far as evenness allows.
    """

    AVERAGE = "average"
    CIRCLE = "circle"
    CONSISTENT_HASH = "consistent-hash"
    STICKY = "sticky"


class Keyless(enum.StrEnum):
    """With order by key: whether messages without a key are independent of each other, or share a lane."""

    INDEPENDENT = "independent"
    ONE_LANE = "one-lane"


class OnExhausted(enum.StrEnum):
    """What happens to a message that failed `max_attempts` times.

    BLOCK: the message stays and blocks its lane until an operator resumes or skips its key. DEAD_LETTER: the message
    moves to the group's dead-letter subject, and its lane continues. PARK: the message and all later messages of its
    key move to the parking lot.
    """

    BLOCK = "block"
    DEAD_LETTER = "dead-letter"
    PARK = "park"


class BrokerGroupState(enum.StrEnum):
    """The state of a broker group, as set by an operator."""

    AVAILABLE = "available"
    READ_ONLY = "read-only"  # appends are refused; stored messages can be read and consumed
    UNAVAILABLE = "unavailable"  # reads are refused, too; lease holders still commit and release


class Role(enum.StrEnum):
    """The role of a server process in its cluster."""

    NODE = ""  # meta and broker in one
    META = "meta"
    BROKER = "broker"


class LotState(enum.StrEnum):
    """The state of a parking lot. PARKED: no message of the key runs. RESUMING: the parked messages run from the head.
    FREE: the parking lot is empty and deleted."""

    PARKED = "parked"
    RESUMING = "resuming"
    FREE = "free"


class KeyAction(enum.StrEnum):
    """The key requests. SKIP drops the key's first message for this group and records operator and reason."""

    PARK = "park"
    RESUME = "resume"
    SKIP = "skip"


# A log remembers this many batches of every producer. With more batches in flight, a repeated batch could be unknown.
IN_FLIGHT_MAX = 16
PULL_BYTES_MAX = 64 * MIB
SPAN_MAX = 4_000_000  # so that the finished set of such a span can be committed
VISIBILITY_S_MIN = 0.1
VISIBILITY_S_MAX = 12 * 3600.0


def _positive(owner: object, *names: str) -> None:
    """Check that fields are above 0. Fields in seconds (`_s`) may have a fraction; other fields are whole numbers."""
    for name in names:
        value = getattr(owner, name)
        is_time = name.endswith("_s") or "_s_" in name
        kinds = int | float if is_time else int
        if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < math.inf:
            what = "a number" if is_time else "a whole number"
            raise InvalidInput(f"{type(owner).__name__}.{name} is {value!r}; it must be {what} above 0")


_Settings = TypeVar("_Settings")


def checked(value: object, kind: type[_Settings], name: str) -> _Settings | None:
    """The value if it has the expected type or is None. Raises InvalidInput."""
    if value is not None and not isinstance(value, kind):
        raise InvalidInput(f"{name}={value!r}: give a {kind.__name__}")
    return value


_Enum = TypeVar("_Enum", bound=enum.StrEnum)


def one_of(kind: type[_Enum], name: str, value: str) -> _Enum:
    """The enumeration member with this value. Raises InvalidInput, which lists the allowed values."""
    try:
        return kind(value)
    except ValueError:
        allowed = ", ".join(repr(one.value) for one in kind)
        raise InvalidInput(f"{name}={value!r}: use {allowed}") from None


def _set_enum(owner: object, name: str, kind: type[enum.StrEnum]) -> None:
    object.__setattr__(owner, name, one_of(kind, f"{type(owner).__name__}.{name}", getattr(owner, name)))


@dataclass(frozen=True, slots=True)
class Limits:
    """The largest message a subject accepts."""

    body_bytes: int = 4 * MIB
    key_bytes: int = 1 * KIB
    properties_bytes: int = 64 * KIB

    def __post_init__(self) -> None:
        _positive(self, "body_bytes", "key_bytes", "properties_bytes")
        if self.body_bytes > GIB:
            raise InvalidInput(f"Limits.body_bytes is {self.body_bytes}; it must not be above {GIB}")


@dataclass(frozen=True, slots=True)
class LogSettings:
    """How logs are stored on disk, for the whole folder."""

    flush: Flush = Flush.ALWAYS
    flush_interval_s: float = 0.1
    segment_bytes: int = 256 * MIB
    index_every_bytes: int = 64 * KIB
    checkpoint_every_bytes: int = 64 * MIB  # bytes between checkpoints: the most that opening scans after a crash
    checkpoint_interval_s: float = 5.0  # with flush "os": the minimum time between checkpoints
    retention_s: float | None = None  # None: keep for ever
    retention_bytes: int | None = None  # per partition
    reserve_bytes: int = 64 * MIB  # appends stop while less space is free, so that commits still fit
    producer_expiry_s: float = 7 * 86400.0  # how long a silent producer's sequence is remembered

    def __post_init__(self) -> None:
        _set_enum(self, "flush", Flush)
        _positive(
            self,
            "flush_interval_s",
            "segment_bytes",
            "index_every_bytes",
            "checkpoint_every_bytes",
            "checkpoint_interval_s",
            "producer_expiry_s",
        )
        _positive(self, *(name for name in ("retention_s", "retention_bytes") if getattr(self, name) is not None))
        if self.reserve_bytes != 0:
            _positive(self, "reserve_bytes")


@dataclass(frozen=True, slots=True)
class LeaseSettings:
    """A lease ends `life_s` after its last renewal. A lease holder renews every `renew_s`."""

    life_s: float = 15.0
    renew_s: float = 5.0
    margin_s: float = 0.5  # a holder stops this long before the end, because clocks differ in speed

    def __post_init__(self) -> None:
        _positive(self, "life_s", "renew_s", "margin_s")
        if self.renew_s + self.margin_s >= self.life_s:
            raise InvalidInput(
                f"LeaseSettings: renew_s {self.renew_s:g} + margin_s {self.margin_s:g} "
                f"must be below life_s {self.life_s:g}"
            )


@dataclass(frozen=True, slots=True)
class ProducerSettings:
    """How a producer gathers messages into batches and sends the batches."""

    batch_bytes: int = 256 * KIB  # a batch is closed at this size, or
    batch_count: int = 4000  # at this number of messages
    in_flight: int = 5  # sent and not acknowledged batches per partition
    buffer_bytes: int = 32 * MIB  # send() waits while this many bytes are not acknowledged
    buffer_wait_s: float = 60.0
    backoff_min_s: float = 0.01
    backoff_max_s: float = 5.0
    tries_max: int = 5  # best effort only; strict tries for ever
    answer_timeout_s: float = 30.0  # an append without an answer is sent again after this time
    compression: str | None = None  # "zstd" needs inturn[zstd]

    def __post_init__(self) -> None:
        _positive(
            self,
            "batch_bytes",
            "batch_count",
            "in_flight",
            "buffer_bytes",
            "buffer_wait_s",
            "backoff_min_s",
            "backoff_max_s",
            "tries_max",
            "answer_timeout_s",
        )
        if self.batch_bytes > BATCH_BYTES_MAX:
            raise InvalidInput(
                f"ProducerSettings.batch_bytes is {self.batch_bytes}; it must not be above {BATCH_BYTES_MAX}"
            )
        if self.in_flight > IN_FLIGHT_MAX:
            raise InvalidInput(f"ProducerSettings.in_flight is {self.in_flight}; it must not be above {IN_FLIGHT_MAX}")
        if self.backoff_min_s > self.backoff_max_s:
            raise InvalidInput(
                f"ProducerSettings.backoff_min_s {self.backoff_min_s:g} is above backoff_max_s {self.backoff_max_s:g}"
            )
        if self.compression not in (None, "zstd"):
            raise InvalidInput(f"ProducerSettings.compression is {self.compression!r}; use None or 'zstd'")
        if self.compression == "zstd" and importlib.util.find_spec("zstandard") is None:
            raise InvalidInput("ProducerSettings.compression='zstd' needs the extra: pip install 'inturn[zstd]'")


@dataclass(frozen=True, slots=True)
class FlowControl:
    """Limits of pulled and unhandled messages per partition. Above a limit, pulling pauses and resumes by itself."""

    buffered_count: int = 20_000
    buffered_bytes: int = 16 * MIB
    span: int = 100_000  # offsets between the lowest unfinished and the highest pulled

    def __post_init__(self) -> None:
        _positive(self, "buffered_count", "buffered_bytes", "span")
        if self.span > SPAN_MAX:
            raise InvalidInput(f"FlowControl.span is {self.span}; it must not be above {SPAN_MAX}")


def _default_levels_s() -> tuple[float, ...]:
    minutes = [60.0 * number for number in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)]
    return (1.0, 5.0, 10.0, 30.0, *minutes)


@dataclass(frozen=True, slots=True)
class RetryDelays:
    """Best effort only: the delays before the first retry of a failed message, the second retry, and so on.

    The first retry waits `levels_s[first_level]`, every later retry waits the next level, up to the last. The number
    of levels is fixed for a group at the first use.
    """

    levels_s: tuple[float, ...] = field(default_factory=_default_levels_s)
    first_level: int = 2

    def __post_init__(self) -> None:
        if not self.levels_s or not all(isinstance(one, int | float) and 0 < one < math.inf for one in self.levels_s):
            raise InvalidInput(f"RetryDelays.levels_s is {self.levels_s!r}; give one or more times above 0")
        if not 0 <= self.first_level < len(self.levels_s):
            raise InvalidInput(
                f"RetryDelays.first_level is {self.first_level}; it must be 0 to {len(self.levels_s) - 1}"
            )

    def level(self, attempt: int) -> int:
        """The level of a message that failed for the `attempt`-th time."""
        return min(self.first_level + attempt - 1, len(self.levels_s) - 1)


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """How a consumer pulls, handles and commits."""

    concurrency: int = 8  # handlers that run at once
    workers: str = "threads"  # or "processes": handlers run in worker processes, for CPU-bound handlers
    batch: int = 1  # above 1: the handler receives a list of up to this many messages
    ack: str = "auto"  # or "manual"
    strategy: Strategy = Strategy.STRICT
    max_attempts: int | None = None  # None: attempts are repeated until the handler succeeds
    on_exhausted: OnExhausted = OnExhausted.BLOCK  # with max_attempts
    suspend_s: float = 1.0  # how long a lane waits after a rollback, or without a manual acknowledgement
    backoff_min_s: float = 0.01  # how long a lane waits after the first exception; doubled after every further one,
    backoff_max_s: float = 30.0  # up to this limit
    commit_interval_s: float = 0.1
    pull_bytes: int = 256 * KIB
    pull_wait_s: float = 15.0
    heartbeat_s: float = 5.0
    idle_s_max: float = 120.0  # a partition that was not pulled for this long is dropped and acquired again
    handler_timeout_s: float = 900.0  # slower calls are reported as timeouts, and not interrupted
    answer_timeout_s: float = 10.0  # a command without an answer is sent again after this time
    flow: FlowControl = field(default_factory=FlowControl)
    retry: RetryDelays = field(default_factory=RetryDelays)  # best effort only
    assignment: AssignmentStrategy = AssignmentStrategy.STICKY  # the same for all members of a group
    trace: str | None = None  # a folder for traces of the handled messages, for an audit
    # Shared groups: a message without an acknowledgement is delivered again this long after its delivery.
    visibility_s: float = 30.0
    tags: str | None = None  # a tag expression: "paid || shipped"; the same for all members of a group

    def __post_init__(self) -> None:
        _set_enum(self, "strategy", Strategy)
        _set_enum(self, "on_exhausted", OnExhausted)
        _set_enum(self, "assignment", AssignmentStrategy)
        if self.max_attempts is not None:
            _positive(self, "max_attempts")
        _positive(
            self,
            "concurrency",
            "batch",
            "suspend_s",
            "commit_interval_s",
            "pull_bytes",
            "pull_wait_s",
            "heartbeat_s",
            "backoff_min_s",
            "backoff_max_s",
            "idle_s_max",
            "handler_timeout_s",
            "answer_timeout_s",
            "visibility_s",
        )
        if not VISIBILITY_S_MIN <= self.visibility_s <= VISIBILITY_S_MAX:
            raise InvalidInput(
                f"ConsumerSettings.visibility_s is {self.visibility_s!r}; "
                f"it must be {VISIBILITY_S_MIN:g} to {VISIBILITY_S_MAX:g} seconds"
            )
        for name, kind in (("flow", FlowControl), ("retry", RetryDelays)):
            if not isinstance(getattr(self, name), kind):
                raise InvalidInput(f"ConsumerSettings.{name} is {getattr(self, name)!r}; give a {kind.__name__}")
        if self.trace is not None:
            if not isinstance(self.trace, str | os.PathLike) or not os.fspath(self.trace):
                raise InvalidInput(f"ConsumerSettings.trace is {self.trace!r}; give the path of a folder")
            object.__setattr__(self, "trace", os.fspath(self.trace))
        if self.workers not in ("threads", "processes"):
            raise InvalidInput(f"ConsumerSettings.workers is {self.workers!r}; use 'threads' or 'processes'")
        object.__setattr__(self, "tags", tags_text(self.tags) or None)
        if self.ack not in ("auto", "manual"):
            raise InvalidInput(f"ConsumerSettings.ack is {self.ack!r}; use 'auto' or 'manual'")
        if self.pull_bytes > PULL_BYTES_MAX:
            raise InvalidInput(f"ConsumerSettings.pull_bytes is {self.pull_bytes}; the limit is {PULL_BYTES_MAX}")
        for name in ("suspend_s", "backoff_min_s", "backoff_max_s"):
            if not 0.01 <= getattr(self, name) <= 30:
                raise InvalidInput(f"ConsumerSettings.{name} is {getattr(self, name)!r}; it must be 0.01 to 30 seconds")
        if self.backoff_min_s > self.backoff_max_s:
            raise InvalidInput(
                f"ConsumerSettings.backoff_min_s {self.backoff_min_s:g} is above backoff_max_s {self.backoff_max_s:g}"
            )
