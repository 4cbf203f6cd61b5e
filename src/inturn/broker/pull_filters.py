"""Filtering of pulled batches by tags, and cutting of fetched batches for members of shared groups.

Both decode batches, which may take a millisecond, and so both run in the reply, outside of the node's lock.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from pyroaring import BitMap64

from inturn.model.batch import chosen, cut, tagged
from inturn.model.errors import InturnError
from inturn.model.message import TagFilter
from inturn.model.routing import ALL_SLOTS, SlotSet
from inturn.model.settings import MIB
from inturn.protocol.commands import Answer, Fetched, Pulled, Reply
from inturn.protocol.request import WrappedReply

FILTERED_BYTES = 1 * MIB  # per read: a range without wanted messages is passed in small steps


class Unfiltered(Pulled, frozen=True, gc=False, array_like=True):
    """The batches as read. `FilteringReply` makes a Pulled without the messages that are filtered out."""

    slots: SlotSet = ALL_SLOTS


class FilteringReply(WrappedReply):
    """The reply to a pull with tags. Called without a lock, like all replies."""

    __slots__ = ("_tags",)

    def __init__(self, reply: Reply, tags: TagFilter) -> None:
        super().__init__(reply)
        self._tags = tags

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(filtered(answer, self._tags) if isinstance(answer, Unfiltered) else answer)


def filtered(pulled: Unfiltered, tags: TagFilter) -> Pulled:
    """Filter by tags first, then by slots. A batch without wanted messages is not sent, whatever the slots of its
    messages: any reader reports its offsets as finished."""
    batches, filtered_out = [], BitMap64()
    for batch in pulled.batches:
        kept, left_out = tagged(batch, tags)
        if isinstance(left_out, range):
            filtered_out.add_range(left_out.start, left_out.stop)
        else:
            filtered_out.update(left_out)
        if kept is not None:
            batches.append(kept if pulled.slots.is_all else chosen(kept, pulled.slots))
    return Pulled(
        tuple(batches),
        pulled.next_offset,
        pulled.end_offset,
        pulled.now_ms,
        filtered_out.serialize() if filtered_out else b"",
    )


class Uncut(Fetched, frozen=True, gc=False, array_like=True):
    """Deliveries in whole batches. `CuttingReply` makes a Fetched with only the delivered messages."""

    kept: tuple[Sequence[int], ...] = ()  # by batch: the delivered offsets, in rising order


class CuttingReply(WrappedReply):
    """The reply to a fetch. Called without a lock, like all replies."""

    __slots__ = ()

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(_fetched(answer) if isinstance(answer, Uncut) else answer)


def _fetched(uncut: Uncut) -> Fetched:
    batches = tuple(cut(batch, offsets) for batch, offsets in zip(uncut.pulled.batches, uncut.kept, strict=True))
    pulled = msgspec.structs.replace(uncut.pulled, batches=batches)
    return Fetched(uncut.epoch, uncut.deliveries, pulled, uncut.waited_s)
