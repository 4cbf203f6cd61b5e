"""Leaving out what a reader does not want by its tags: outside of the node's lock, for it may take a millisecond.

Parts of batches for members of shared groups, cut outside of the node's lock: a batch has to be opened for that.
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
from inturn.protocol.reply import WrappedReply

FILTERED_BYTES = 1 * MIB  # at once: so a stretch without anything to send is gone through in small steps


class Unfiltered(Pulled, frozen=True, gc=False, array_like=True):
    """What was read, before anything was left out of it. `FilteringReply` makes a Pulled of it."""

    slots: SlotSet = ALL_SLOTS


class FilteringReply(WrappedReply):
    """The reply to a pull with tags. Called, as all replies, without a lock. `session` is that of the reply."""

    __slots__ = ("_tags",)

    def __init__(self, reply: Reply, tags: TagFilter) -> None:
        super().__init__(reply)
        self._tags = tags

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(filtered(answer, self._tags) if isinstance(answer, Unfiltered) else answer)


def filtered(pulled: Unfiltered, tags: TagFilter) -> Pulled:
    """Tags come first: of a batch that nobody wants nothing is sent, whatever the slots of its messages; whoever
    passes by tells that they are done."""
    batches, unwanted = [], BitMap64()
    for batch in pulled.batches:
        kept, left_out = tagged(batch, tags)
        if isinstance(left_out, range):
            unwanted.add_range(left_out.start, left_out.stop)
        else:
            unwanted.update(left_out)
        if kept is not None:
            batches.append(kept if pulled.slots.is_all else chosen(kept, pulled.slots))
    return Pulled(
        tuple(batches),
        pulled.next_offset,
        pulled.end_offset,
        pulled.now_ms,
        unwanted.serialize() if unwanted else b"",
    )


class Uncut(Fetched, frozen=True, gc=False, array_like=True):
    """What is given out, in whole batches. `CuttingReply` makes a Fetched of it."""

    kept: tuple[Sequence[int], ...] = ()  # by batch: the offsets that are given out, in rising order


class CuttingReply(WrappedReply):
    """The reply to a fetch. Called, as all replies, without a lock. `session` is that of the reply."""

    __slots__ = ()

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(_fetched(answer) if isinstance(answer, Uncut) else answer)


def _fetched(uncut: Uncut) -> Fetched:
    batches = tuple(cut(batch, offsets) for batch, offsets in zip(uncut.pulled.batches, uncut.kept, strict=True))
    pulled = msgspec.structs.replace(uncut.pulled, batches=batches)
    return Fetched(uncut.epoch, uncut.deliveries, pulled, uncut.waited_s)
