"""Writes and checks histories, for the tests of the order checker."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, TypeAlias

from inturn.model.routing import SlotSet
from inturn.testing.checker import Verdict, ViolationKind, check
from inturn.testing.history import (
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    HandlerEnd,
    HandlerResult,
    HandlerStart,
    History,
    KeyResumed,
    KeySkipped,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    SendAcknowledged,
)

Order: TypeAlias = Literal["partition", "key", "none"]


class Story:
    """Writes a history of the subject "s" and the group "g" in few words."""

    def __init__(self, *sent: int, key: bytes | None = b"k") -> None:
        self.history = History()
        self.keys: dict[int, bytes | None] = {}
        self.sent(*sent, key=key)

    def sent(self, *offsets: int, key: bytes | None = b"k") -> Story:
        for offset in offsets:
            self.keys[offset] = key
            self.history.record(SendAcknowledged("s", 0, offset, key, f"m{offset}"))
        return self

    def grant(self, owner: str, epoch: int) -> Story:
        self.history.record(LeaseGranted("s", "g", 0, owner, epoch))
        return self

    def lease_end(self, owner: str, epoch: int, why: LeaseEnd = "expired") -> Story:
        self.history.record(LeaseEnded("s", "g", 0, owner, epoch, why))
        return self

    def start(self, who: str, epoch: int, *offsets: int, attempt: int | None = None) -> Story:
        for offset in offsets:
            key = self.keys.get(offset, b"k")
            self.history.record(HandlerStart("s", "g", 0, offset, key, who, epoch, f"m{offset}", attempt))
        return self

    def end(self, who: str, epoch: int, offset: int, result: HandlerResult = "success") -> Story:
        key = self.keys.get(offset, b"k")
        self.history.record(HandlerEnd("s", "g", 0, offset, key, who, epoch, f"m{offset}", result))
        return self

    def run(
        self, who: str, epoch: int, *offsets: int, result: HandlerResult = "success", attempt: int | None = None
    ) -> Story:
        for offset in offsets:
            self.start(who, epoch, offset, attempt=attempt).end(who, epoch, offset, result)
        return self

    def fail(self, who: str, epoch: int, offset: int, attempt: int | None = None) -> Story:
        return self.run(who, epoch, offset, result="failed", attempt=attempt)

    def crash(self, who: str) -> Story:
        self.history.record(ConsumerCrashed(who))
        return self

    def commit(
        self, owner: str, epoch: int, offset: int, *finished: int, park: Iterable[int] = (), unpark: Iterable[int] = ()
    ) -> Story:
        lots = (tuple((0, one) for one in park), tuple((0, one) for one in unpark))
        self.history.record(Committed("s", "g", 0, owner, epoch, offset, finished, *lots))
        return self

    def skip(self, offset: int) -> Story:
        self.history.record(KeySkipped("s", "g", 0, offset, self.keys[offset]))
        return self

    def resume(self, key: bytes = b"k") -> Story:
        self.history.record(KeyResumed("s", "g", 0, key))
        return self

    def reset(self, offset: int) -> Story:
        self.history.record(OffsetsReset("s", "g", {0: offset}))
        return self

    def claim(self, who: str, slots: SlotSet, epoch: int = 1) -> Story:
        self.history.record(ClaimGranted("s", "g", 0, who, epoch, slots.to_bytes()))
        return self

    def give_back(self, who: str, epoch: int = 1) -> Story:
        self.history.record(ClaimEnded("s", "g", 0, who, epoch))
        return self

    def takeover(self, old: str, old_epoch: int, new: str, new_epoch: int) -> Story:
        return self.lease_end(old, old_epoch).grant(new, new_epoch)

    def check(self, order: Order = "partition", **more: Any) -> Verdict:
        return check(self.history, order=order, **more)


def kept(story: Story, order: Order = "partition", **more: Any) -> Verdict:
    verdict = story.check(order, **more)
    assert verdict.ok, str(verdict)
    return verdict


def broken(story: Story, *kinds: ViolationKind, order: Order = "partition", **more: Any) -> Verdict:
    verdict = story.check(order, **more)
    assert verdict.kinds() == set(kinds), str(verdict)
    return verdict
