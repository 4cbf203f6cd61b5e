"""How the demo ended: the order checker's verdict, and what became of each order."""

from __future__ import annotations

import msgspec

from demo.board import Board
from demo.incident_verdict import IncidentActResult
from demo.key_verdict import KeyActResult
from demo.orders import GROUP, SUBJECT, Scale
from demo.served_verdict import ServedActResult
from demo.story import LATE_CONSUMER, Story
from demo.violations import count_violations
from inturn.testing.checker import check


class HandOverResult(msgspec.Struct, frozen=True):
    partition: int
    before: str
    after: str
    epoch: int
    offset: int
    repeated: int
    is_after_crash: bool
    took_s: float


class DemoResult(msgspec.Struct, frozen=True):
    """What `inturn demo --json` prints: the first act, in `by_key` the second and in `served` the third; `ok` and
    `elapsed_s` are of all.

    `duplicates` are messages that were handled again after the crash.
    """

    ok: bool
    is_complete: bool  # False: it was ended before everything was handled
    elapsed_s: float
    orders: int
    orders_in_order: int  # those that saw all five steps, each in its turn
    messages_sent: int
    messages_handled: int
    handler_calls: int
    retries: int
    duplicates: int
    out_of_order: int
    overlapping: int
    lost: int
    skipped: int
    other_violations: int
    violations: list[str]
    died: str | None
    joined: str
    hand_overs: list[HandOverResult]
    handled_by: dict[str, int]
    events: list[str]
    by_key: KeyActResult | None = None  # None: it did not come to the second act
    served: ServedActResult | None = None  # None: it did not come to the third act
    incident: IncidentActResult | None = None  # None: it did not come to the last act, or that was left out
    left_out: str | None = None  # why the last act was left out, and what to do about it

    def with_second_act(self, by_key: KeyActResult, elapsed_s: float) -> DemoResult:
        ok, is_complete = self.ok and by_key.ok, self.is_complete and by_key.is_complete
        return msgspec.structs.replace(
            self, ok=ok, is_complete=is_complete, elapsed_s=round(elapsed_s, 2), by_key=by_key
        )

    def with_third_act(self, served: ServedActResult, elapsed_s: float) -> DemoResult:
        ok, is_complete = self.ok and served.ok, self.is_complete and served.is_complete
        return msgspec.structs.replace(
            self, ok=ok, is_complete=is_complete, elapsed_s=round(elapsed_s, 2), served=served
        )

    def with_last_act(self, incident: IncidentActResult, elapsed_s: float) -> DemoResult:
        ok, is_complete = self.ok and incident.ok, self.is_complete and incident.is_complete
        return msgspec.structs.replace(
            self, ok=ok, is_complete=is_complete, elapsed_s=round(elapsed_s, 2), incident=incident
        )

    def without_last_act(self, why: str) -> DemoResult:
        return msgspec.structs.replace(self, left_out=why)


def judge(story: Story, board: Board, scale: Scale, elapsed_s: float) -> DemoResult:
    """The first act, only after it is over."""
    is_complete = story.is_complete
    verdict = check(
        board.recorder.snapshot(),
        subject=SUBJECT,
        group=GROUP,
        order="partition",
        stored=story.stored if is_complete else None,
    )
    counts = count_violations(verdict)
    look = board.look()
    in_order = board.ledger.complete_count
    took_over = any(one.is_after_crash for one in board.hand_overs)
    return DemoResult(
        ok=verdict.ok and is_complete and took_over and verdict.sent == scale.messages and in_order == scale.orders,
        is_complete=is_complete,
        elapsed_s=round(elapsed_s, 2),
        orders=scale.orders,
        orders_in_order=in_order,
        messages_sent=verdict.sent,
        messages_handled=verdict.finished - verdict.duplicates,
        handler_calls=verdict.started,
        retries=sum(one.retries for one in look.consumers),
        duplicates=verdict.duplicates,
        out_of_order=counts.out_of_order,
        overlapping=counts.overlapping,
        lost=counts.lost,
        skipped=counts.skipped,
        other_violations=counts.other_violations,
        violations=[str(violation) for violation in verdict.violations],
        died=story.victim,
        joined=LATE_CONSUMER,
        hand_overs=[
            HandOverResult(
                *(one.partition, one.before, one.after, one.epoch, one.offset, one.repeated, one.is_after_crash),
                took_s=round(one.took_s, 3),
            )
            for one in board.hand_overs
        ],
        handled_by={one.name: one.handled for one in look.consumers},
        events=[f"{one.at_s:.1f} s: {one.text}" for one in look.events],
    )
