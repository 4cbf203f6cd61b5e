"""How the second act ended: the order checker's verdict by key, and what became of the poisoned key."""

from __future__ import annotations

import msgspec

from demo.key_board import KeyBoard
from demo.key_story import KeyStory
from demo.orders import CONCURRENCY, KEY_GROUP, LATER_STEPS, STEPS, SUBJECT, Scale, key_of
from demo.violations import count_violations
from inturn.testing.checker import check


class PoisonedKey(msgspec.Struct, frozen=True):
    """As it was listed while it was parked, and the steps of its order as they were handled in the end."""

    key: str
    attempts: int
    error: str
    waiting: int  # behind the message that failed
    steps: list[str]
    is_in_order: bool


class KeyActResult(msgspec.Struct, frozen=True):
    """The second act, in `by_key` of what `inturn demo --json` prints."""

    ok: bool
    is_complete: bool
    elapsed_s: float
    group: str
    orders: int
    orders_in_order: int
    messages_sent: int
    messages_handled: int
    handler_calls: int
    failed_attempts: int
    concurrency: int
    running_max: int  # handlers at once, until all keys but the parked one were done; the mean of the same
    running_mean: float
    rate: float  # messages per second in that time
    first_act_rate: float  # of the first act at its best, one handler at a time in each partition
    poisoned: PoisonedKey | None  # None: nothing was parked
    still_held_back: list[str]  # keys, in the end
    duplicates: int
    out_of_order: int
    overlapping: int
    lost: int
    skipped: int
    other_violations: int
    violations: list[str]
    events: list[str]


def judge_by_key(
    story: KeyStory, board: KeyBoard, scale: Scale, first_act_rate: float, elapsed_s: float
) -> KeyActResult:
    """Only after the act is over."""
    verdict = check(
        board.recorder.snapshot(),
        subject=SUBJECT,
        group=KEY_GROUP,
        order="key",
        stored=story.stored if story.is_complete else None,
    )
    counts = count_violations(verdict)
    poisoned, flood, in_order = _poisoned(story, board), board.flood, board.ledger.complete_count
    is_resumed = poisoned is not None and poisoned.is_in_order and not story.left and verdict.parked == 0
    is_all = verdict.sent == scale.messages + len(LATER_STEPS) and in_order == scale.orders
    return KeyActResult(
        ok=verdict.ok and story.is_complete and is_resumed and is_all,
        is_complete=story.is_complete,
        elapsed_s=round(elapsed_s, 2),
        group=KEY_GROUP,
        orders=scale.orders,
        orders_in_order=in_order,
        messages_sent=verdict.sent,
        messages_handled=verdict.finished - verdict.duplicates,
        handler_calls=verdict.started,
        failed_attempts=board.failed_attempts,
        concurrency=CONCURRENCY,
        running_max=0 if flood is None else flood.running_max,
        running_mean=0.0 if flood is None else round(flood.running_mean, 1),
        rate=0.0 if flood is None else round(flood.rate, 1),
        first_act_rate=first_act_rate,
        poisoned=poisoned,
        still_held_back=[(one.key or b"").decode(errors="backslashreplace") for one in story.left],
        duplicates=verdict.duplicates,
        out_of_order=counts.out_of_order,
        overlapping=counts.overlapping,
        lost=counts.lost,
        skipped=counts.skipped,
        other_violations=counts.other_violations,
        violations=[str(violation) for violation in verdict.violations],
        events=[f"{one.at_s:.1f} s: {one.text}" for one in board.events.so_far()],
    )


def _poisoned(story: KeyStory, board: KeyBoard) -> PoisonedKey | None:
    parked = story.parked
    if parked is None:
        return None
    steps = list(board.poisoned_steps)
    return PoisonedKey(
        *(key_of(board.poisoned), parked.attempts, parked.error, parked.waiting, steps),
        is_in_order=steps == [*STEPS, *LATER_STEPS],
    )
