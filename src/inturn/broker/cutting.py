"""Parts of batches for members of shared groups, cut outside of the node's lock: a batch has to be opened for that."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from inturn.model.batch import cut
from inturn.model.commands import Answer, Fetched, Reply
from inturn.model.errors import InturnError


class Uncut(Fetched, frozen=True, gc=False, array_like=True):
    """What is given out, in whole batches. `CuttingReply` makes a Fetched of it."""

    kept: tuple[Sequence[int], ...] = ()  # by batch: the offsets that are given out, in rising order


class CuttingReply:
    """The reply to a fetch. Called, as all replies, without a lock. `session` is that of the reply."""

    __slots__ = ("_reply", "session")

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        self.session = getattr(reply, "session", None)

    def __call__(self, answer: Answer | InturnError) -> None:
        self._reply(_fetched(answer) if isinstance(answer, Uncut) else answer)


def _fetched(uncut: Uncut) -> Fetched:
    batches = tuple(cut(batch, offsets) for batch, offsets in zip(uncut.pulled.batches, uncut.kept, strict=True))
    pulled = msgspec.structs.replace(uncut.pulled, batches=batches)
    return Fetched(uncut.epoch, uncut.deliveries, pulled, uncut.waited_s)
