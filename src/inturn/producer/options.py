"""The keyword options of a message, in one place for producers, asyncio producers and outboxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias, TypedDict

from inturn.model.message import Outgoing
from inturn.model.routing import Partition

# Called with the partitions of the subject, the message and `arg`; returns the index of a partition.
Selector: TypeAlias = Callable[[Sequence[Partition], Outgoing, object], int]


class MessageOptions(TypedDict, total=False):
    """Options of `Outbox.put`. Every option may be left out."""

    key: str | bytes | None  # messages of one key are stored in order; None (default): no order
    tags: tuple[str, ...]  # consumers and readers can filter by tags; default ()
    properties: dict[str, str] | None  # headers; names must not begin with "%"
    message_id: str | None  # your own id; by default the id is made of partition and offset


class SendOptions(MessageOptions, total=False):
    """Options of `Producer.send`, `Producer.send_sync` and `AsyncProducer.send`. Every option may be left out."""

    selector: Selector | None  # chooses the partition; only for subjects with routing "selector"
    arg: object  # given to the selector; also the key, unless `key` is given
