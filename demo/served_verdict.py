"""How the third act ended: the order checker's verdict over what all processes wrote down."""

from __future__ import annotations

import msgspec

from demo.orders import SERVED_GROUP, SUBJECT, Ledger, ServedScale
from demo.served_board import ServedBoard
from demo.served_story import ServedStory
from demo.violations import count_violations
from inturn.testing.checker import check
from inturn.testing.history import HandlerEnd, History


class TakeOverResult(msgspec.Struct, frozen=True):
    partition: int
    after: str
    epoch: int
    offset: int
    took_s: float  # from the kill to the first handler in the other process


class ServedActResult(msgspec.Struct, frozen=True):
    """The third act, in `served` of what `inturn demo --json` prints."""

    ok: bool
    is_complete: bool
    elapsed_s: float
    group: str
    address: str
    pids: dict[str, int]  # of the server and the consumers
    lease_s: float
    killed: str | None
    take_overs: list[TakeOverResult]
    orders: int
    orders_in_order: int
    messages_sent: int
    messages_handled: int
    handler_calls: int
    handled_by: dict[str, int]
    duplicates: int
    out_of_order: int
    overlapping: int
    lost: int
    skipped: int
    other_violations: int
    violations: list[str]
    events: list[str]


def judge_served(story: ServedStory, board: ServedBoard, scale: ServedScale, elapsed_s: float) -> ServedActResult:
    """Only after the act is over."""
    history = board.history()
    verdict = check(
        history,
        subject=SUBJECT,
        group=SERVED_GROUP,
        order="key",
        stored=story.stored if story.is_complete else None,
    )
    counts = count_violations(verdict)
    in_order = _ledger(history).complete_count
    is_all = verdict.sent == scale.messages and in_order == scale.orders
    look = board.look()
    pids = {} if look.server_pid is None else {"server": look.server_pid}
    return ServedActResult(
        ok=verdict.ok and story.is_complete and is_all and bool(board.take_overs),
        is_complete=story.is_complete,
        elapsed_s=round(elapsed_s, 2),
        group=SERVED_GROUP,
        address=look.address,
        pids={**pids, **{one.name: one.pid for one in look.processes}},
        lease_s=scale.lease_s,
        killed=board.killed,
        take_overs=[
            TakeOverResult(one.partition, one.after, one.epoch, one.offset, round(one.took_s, 3))
            for one in board.take_overs
        ],
        orders=scale.orders,
        orders_in_order=in_order,
        messages_sent=verdict.sent,
        messages_handled=verdict.finished - verdict.duplicates,
        handler_calls=verdict.started,
        handled_by={one.name: one.handled for one in look.processes},
        duplicates=verdict.duplicates,
        out_of_order=counts.out_of_order,
        overlapping=counts.overlapping,
        lost=counts.lost,
        skipped=counts.skipped,
        other_violations=counts.other_violations,
        violations=[str(violation) for violation in verdict.violations],
        events=[f"{one.at_s:.1f} s: {one.text}" for one in look.events],
    )


def _ledger(history: History) -> Ledger:
    """The steps as all processes together finished them; the id of a message is its order and step."""
    ledger = Ledger()
    for event in history:
        if isinstance(event, HandlerEnd) and event.result == "success" and event.message_id is not None:
            order, _, step = event.message_id.partition("/")
            ledger.note(int(order), step)
    return ledger
