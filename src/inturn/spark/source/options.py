"""The options of the data source: names, parsing and validation."""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from inturn.model.errors import InvalidInput
from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet
from inturn.model.settings import ConsumerSettings, Order, one_of
from inturn.model.subject import check_name
from inturn.security.credentials import NONE, Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.ordered.task import ROUND_S, TASK_SETTINGS
from inturn.spark.source.offsets import EARLIEST, Bound, parse_bound, parse_time
from inturn.transport.address import is_address, parse_address

# Names as users write them; Spark passes names in lower case. Options of Spark's Kafka source mean the same here.
NAMES = (
    "server",
    "path",
    "subject",
    "group",
    "startingOffsets",
    "startingTimestamp",
    "endingOffsets",
    "endingTimestamp",
    "maxMessagesPerTrigger",
    "minPartitions",
    "slots",
    "failOnDataLoss",
    "handler",
    "order",
    "concurrency",
    "consumerSettings",
    "takeOver",
    "roundSeconds",
    "token",
    "tlsCa",
    "tlsCert",
    "tlsKey",
    "password",
)
_BY_LOWER = {name.lower(): name for name in NAMES}
TLS_FILES = ("tlsCa", "tlsCert", "tlsKey")  # at the same path on every host with tasks
BATCH_ONLY = ("endingOffsets", "endingTimestamp")
STREAM_ONLY = ("maxMessagesPerTrigger", "takeOver", "roundSeconds")
HANDLER_ONLY = ("concurrency", "consumerSettings", "takeOver", "roundSeconds")
LATEST_BOUND = Bound("latest")


@dataclass(frozen=True, slots=True)
class HandlerOptions:
    """Options of a query with a handler: tasks handle the messages instead of returning rows."""

    name: str
    order: Order = Order.KEY
    consumer: ConsumerSettings = TASK_SETTINGS
    takes_over: bool = False
    round_s: float = ROUND_S
    start: str = "first"  # position of a new group


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """The parsed options of a query. The repr shows no credentials."""

    target: str  # an address or a folder
    subject: str
    group: str | None = None
    starting: Bound | None = None  # None: see `start`
    ending: Bound = LATEST_BOUND
    starting_option: str = "startingOffsets"  # name of the given option, for error texts
    ending_option: str = "endingOffsets"
    max_messages_per_trigger: int | None = None
    min_partitions: int | None = None
    slots: SlotSet = ALL_SLOTS
    fail_on_data_loss: bool = True
    handler: HandlerOptions | None = None
    order: Order | None = None  # for a stream of rows with a group; None: the order of the members
    credentials: Credentials = NONE
    password: str | None = field(default=None, repr=False)  # reserved: servers accept tokens and certificates only

    def start(self, otherwise: str) -> Bound:
        """The start of the query. Without a start option, a query with a group starts at the committed offsets, any
        other query at `otherwise`."""
        if self.starting is not None:
            return self.starting
        return Bound("committed" if self.group is not None else otherwise)


def parse_options(options: Mapping[str, str], *, is_streaming: bool | None = None) -> ReadOptions:
    """Raises InvalidInput for unknown, missing or wrong options. `is_streaming` is None while Spark asks for the
    schema."""
    given: dict[str, str] = {}
    for name, value in options.items():
        if name.lower() not in _BY_LOWER:
            raise InvalidInput(f"no option {name!r}; {_nearest(name)}")
        given[_BY_LOWER[name.lower()]] = value
    for name in {True: BATCH_ONLY, False: STREAM_ONLY, None: ()}[is_streaming]:
        if name in given:
            where = "only batch queries have an end" if is_streaming else "only streams have this option"
            raise InvalidInput(f"option {name}: {where}; leave the option out")
    subject = _subject(given)
    group = check_name("group", given["group"]) if "group" in given else None
    starting, starting_option = _bound(given, "starting", subject)
    ending, ending_option = _bound(given, "ending", subject)
    _check_bounds(starting, ending, ending_option, group)
    handler = _handler(given, group, starting)
    if handler is None and is_streaming and group is not None:
        _check_member(given, starting)
    return ReadOptions(
        target=_target(given),
        subject=subject,
        group=group,
        starting=starting,
        ending=ending if ending is not None else LATEST_BOUND,
        starting_option=starting_option,
        ending_option=ending_option,
        max_messages_per_trigger=_count(given, "maxMessagesPerTrigger"),
        min_partitions=_count(given, "minPartitions"),
        slots=_slots(given["slots"]) if "slots" in given else ALL_SLOTS,
        fail_on_data_loss=_flag(given, "failOnDataLoss", default=True),
        handler=handler,
        order=_order(given, group, is_streaming) if handler is None else None,
        credentials=_credentials(given),
        password=given.get("password"),
    )


def credential_options(credentials: Credentials) -> dict[str, str]:
    """The options of the data source for these credentials."""
    tls = credentials.tls
    files = (None, None, None) if tls is None else (tls.ca_file, tls.cert_file, tls.key_file)
    named = zip(("token", *TLS_FILES), (credentials.token, *files), strict=True)
    return {name: value for name, value in named if value is not None}


def _credentials(given: Mapping[str, str]) -> Credentials:
    files = [given.get(name) for name in TLS_FILES]
    tls = TlsSettings(*files) if any(files) else None
    credentials = Credentials(given.get("token"), tls)
    if credentials != NONE and not is_address(given.get("server") or given.get("path")):
        raise InvalidInput("the options token and tls… are for servers; a folder needs neither")
    return credentials


def handler_options(
    handler: str, order: Order | str, consumer: ConsumerSettings | None, *, takes_over: bool, round_s: float
) -> dict[str, str]:
    """The options of the data source for a query with this handler."""
    settings = consumer if consumer is not None else TASK_SETTINGS
    return {
        "handler": handler,
        "order": one_of(Order, "order", order).value,
        "consumerSettings": msgspec.json.encode(settings).decode(),
        "takeOver": str(takes_over).lower(),
        "roundSeconds": str(round_s),
    }


def _handler(given: Mapping[str, str], group: str | None, starting: Bound | None) -> HandlerOptions | None:
    if "handler" not in given:
        for name in HANDLER_ONLY:
            if name in given:
                raise InvalidInput(f"option {name} is for queries with a handler; give the option handler, too")
        return None
    if group is None:
        raise InvalidInput("option handler: a handler works for a group; give the option group, too")
    if "slots" in given:
        raise InvalidInput("option slots: a query with a handler handles all slots of its group; leave the option out")
    _check_start(starting, "a handler")
    settings = _settings(given.get("consumerSettings", "{}"), _count(given, "concurrency"))
    return HandlerOptions(
        given["handler"],
        one_of(Order, "order", given.get("order", Order.KEY.value)),
        settings,
        _flag(given, "takeOver", default=False),
        _seconds(given, "roundSeconds", ROUND_S),
        "last" if starting is not None and starting.kind == "latest" else "first",
    )


def _check_start(starting: Bound | None, who: str) -> None:
    if starting is not None and starting.kind not in ("earliest", "latest", "committed"):
        raise InvalidInput(
            f"option startingOffsets: {who} starts at the group's committed offsets; 'earliest' or 'latest' is for a "
            "new group, `inturn group reset` moves an existing group"
        )


def _check_member(given: Mapping[str, str], starting: Bound | None) -> None:
    """Check a stream of rows that commits: the stream must return all messages below a committed offset."""
    _check_start(starting, "a stream with a group")
    if "slots" in given:
        raise InvalidInput("option slots: a stream with a group reads all slots of its group; leave slots or group out")


def _order(given: Mapping[str, str], group: str | None, is_streaming: bool | None) -> Order | None:
    if "order" not in given:
        return None
    if group is None or is_streaming is False:
        raise InvalidInput(
            "option order is for queries with a handler, and for streams with a group; leave the option out"
        )
    order = one_of(Order, "order", given["order"])
    if order is Order.NONE:
        raise InvalidInput(
            "option order='none': failed messages are handled again, and rows have no handler; use 'key'"
        )
    return order


def _settings(text: str, concurrency: int | None) -> ConsumerSettings:
    """Parse fields of ConsumerSettings from JSON. Missing fields have the defaults of HandlerOptions."""
    try:
        fields = msgspec.json.decode(text, type=dict[str, object])
        fields = {"concurrency": TASK_SETTINGS.concurrency, **fields}
        if concurrency is not None:
            fields["concurrency"] = concurrency
        return msgspec.convert(fields, ConsumerSettings)
    except msgspec.MsgspecError as error:
        raise InvalidInput(f"option consumerSettings={text!r}: not ConsumerSettings as JSON: {error}") from None


def _seconds(given: Mapping[str, str], name: str, default: float) -> float:
    text = given.get(name, str(default))
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < math.inf:
        raise InvalidInput(f"option {name}={text!r}: use a number of seconds above 0")
    return seconds


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name.lower(), _BY_LOWER, 1)
    return f"did you mean {_BY_LOWER[near[0]]!r}?" if near else f"there are {', '.join(NAMES)}"


def _subject(given: Mapping[str, str]) -> str:
    if "subject" not in given:
        raise InvalidInput('the option subject is missing; name the subject: .option("subject", "order.book")')
    return check_name("subject", given["subject"], reserved=True)


def _target(given: Mapping[str, str]) -> str:
    server, path = given.get("server"), given.get("path")
    if server is not None and path is not None:
        raise InvalidInput("the options server and path are given; use one of them")
    if server is not None:
        parse_address(server)
        return server
    if path is None:
        raise InvalidInput(
            'the option server is missing; give the address: .option("server", "inturn://host:port"), or on a local '
            "master the path of a folder: .load(path)"
        )
    if is_address(path):
        parse_address(path)
        return path
    return os.path.abspath(path)  # a task may run in a different working directory


def _bound(given: Mapping[str, str], prefix: str, subject: str) -> tuple[Bound | None, str]:
    by_offset, by_time = f"{prefix}Offsets", f"{prefix}Timestamp"
    if by_offset in given and by_time in given:
        raise InvalidInput(f"the options {by_offset} and {by_time} are given; use one of them")
    if by_time in given:
        return Bound("timestamp", parse_time(by_time, given[by_time].strip())), by_time
    if by_offset in given:
        return parse_bound(by_offset, given[by_offset], subject), by_offset
    return None, by_offset


def _check_bounds(starting: Bound | None, ending: Bound | None, ending_option: str, group: str | None) -> None:
    for name, bound in (("startingOffsets", starting), ("endingOffsets", ending)):
        if bound is not None and bound.kind == "committed" and group is None:
            raise InvalidInput(
                f"option {name}='committed': committed offsets belong to a group; give the option group, too"
            )
    if ending is not None and (ending.kind == "earliest" or any(offset == EARLIEST for _, offset in ending.offsets)):
        raise InvalidInput(
            f"option {ending_option}: a query cannot end at the earliest; use 'latest', a time or an offset"
        )


def _count(given: Mapping[str, str], name: str) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**63):
        raise InvalidInput(f"option {name}={text!r}: use a whole number, 1 or more")
    return int(text)


def _flag(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    text = given.get(name, str(default)).lower()
    if text not in ("true", "false"):
        raise InvalidInput(f"option {name}={given[name]!r}: use true or false")
    return text == "true"


def _slots(text: str) -> SlotSet:
    """Parse slots such as "0-127,512". Both ends of a range are included."""
    slots: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        numbers = [first, last] if dash else [first]
        if not all(one.isascii() and one.isdigit() and int(one) < SLOT_COUNT for one in numbers):
            raise InvalidInput(f"option slots={text!r}: use slots from 0 to {SLOT_COUNT - 1}, as '0-127,512'")
        if int(numbers[0]) > int(numbers[-1]):
            raise InvalidInput(f"option slots={text!r}: {part.strip()!r} ends before it begins")
        slots.update(range(int(numbers[0]), int(numbers[-1]) + 1))
    return SlotSet.of(slots)
