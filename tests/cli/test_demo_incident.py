"""The last act of the demo, and the page. `test_demo.py` plays the act together with the other acts."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from demo.act import Events
from demo.incident import IncidentAct, IncidentBoard, SparkStart
from demo.incident_verdict import Handled, HandledCounts, history_of, judge_incident, read_handled, who_of
from demo.orders import INCIDENT_GROUP, INCIDENT_SUBJECT, QUICK_INCIDENT, Inbox, notification_id, notifications
from demo.report import overlaps
from inturn import ConsumerSettings, Context, Message, connect
from inturn.model.message import Origin
from inturn.model.violation import ViolationKind
from inturn.producer.send_batch import Stored
from inturn.spark.audit.verdict import AuditVerdict, GroupAudit
from inturn.spark.ordered.drain_report import DrainReport
from inturn.testing.checker import check

ADA, TASK = "ada-1f", "drain-order.book-2e-r1-t0-3d"


def test_every_customer_is_sent_its_notifications_in_order_and_some_far_more_than_others() -> None:
    coming = notifications(100)
    sent: Counter[str] = Counter()
    for _ in range(5000):
        key, number = next(coming)
        sent[key] += 1
        assert number == sent[key]
    assert sent["customer-1"] > 4 * sent["customer-100"] > 0


def test_the_inbox_finds_who_was_told_something_too_early() -> None:
    inbox = Inbox()
    for number in (1, 2, 2, 1, 3):  # a repetition does no harm
        inbox.note(notification_id("customer-1", number))
    for number in (1, 3, 2):
        inbox.note(notification_id("customer-2", number))
    assert (inbox.customers, inbox.in_order) == (2, 1)


def test_owners_of_traces_have_names_for_people() -> None:
    assert who_of(ADA) == "ada"
    assert who_of(TASK) == "task 0"
    assert who_of("drain-order.book-2e") == "drain"


def test_what_a_consumer_recorded_is_read_back(tmp_path: Path) -> None:
    done: list[tuple[int, int]] = []
    is_over, failed = threading.Event(), threading.Event()

    def handle(message: Message, context: Context) -> None:
        if not failed.is_set():
            failed.set()
            raise ValueError("once")
        done.append((message.partition, message.offset))
        if len(done) == 200:
            is_over.set()

    with connect(tmp_path / "data") as mq:
        mq.create_subject(INCIDENT_SUBJECT, 2)
        with mq.producer() as producer:
            for number in range(200):
                producer.send(INCIDENT_SUBJECT, b"", key=f"customer-{number % 7}")
        settings = ConsumerSettings(trace=str(tmp_path / "traces"))
        counts = HandledCounts(tmp_path / "traces")
        with mq.consumer(INCIDENT_SUBJECT, INCIDENT_GROUP, handle, order="key", settings=settings, name="ada"):
            assert is_over.wait(30)
            counts.read()  # while the trace is being written
        handled = read_handled(tmp_path / "traces")
        stored = {(one.partition, one.offset): one for one in mq.reader(INCIDENT_SUBJECT)}
    assert counts.read() == counts.read() == {"ada": 201}
    assert sorted((one.partition, one.offset) for one in handled if one.result == "success") == sorted(done)
    assert [one.attempt for one in handled if one.result == "exception"] == [1]
    assert max(one.attempt for one in handled) == 2
    verdict = check(history_of(handled, stored, [], INCIDENT_GROUP), order="key")
    verdict.raise_if_bad()
    assert (verdict.started, verdict.finished) == (201, 200)


def _messages(count: int) -> dict[tuple[int, int], Message]:
    """Messages of a single customer."""
    origin = Origin(INCIDENT_SUBJECT, 0)
    return {
        (0, offset): Message(
            b"", key=b"customer-1", message_id=notification_id("customer-1", offset + 1), offset=offset, origin=origin
        )
        for offset in range(count)
    }


def _run(offset: int, owner: str, start_s: float, end_s: float, epoch: int = 1) -> Handled:
    return Handled(owner, 0, offset, epoch, 1, "success", start_s, end_s)


IN_ORDER = (_run(0, ADA, 1.0, 1.1), _run(1, TASK, 2.0, 2.1, 2), _run(2, TASK, 2.1, 2.2, 2), _run(3, ADA, 3.0, 3.1, 3))
TOO_EARLY = (*IN_ORDER[:2], _run(2, ADA, 2.05, 2.2, 3), IN_ORDER[3])


def test_a_handler_that_starts_before_the_one_before_is_over_is_found_across_processes() -> None:
    assert check(history_of(IN_ORDER, _messages(4), [], INCIDENT_GROUP), order="key").ok
    verdict = check(history_of(TOO_EARLY, _messages(4), [], INCIDENT_GROUP), order="key")
    assert ViolationKind.OVERLAP in verdict.kinds()
    assert overlaps(IN_ORDER) == 0
    assert overlaps(TOO_EARLY) == 1


def _audit(broken: dict[ViolationKind, int], unseen_epochs: int = 0) -> AuditVerdict:
    counts: dict[str, Any] = {one.name: 0 for one in dataclasses.fields(GroupAudit)}
    counts |= {"subject": INCIDENT_SUBJECT, "group": INCIDENT_GROUP, "started": 4, "finished": 4}
    return AuditVerdict((GroupAudit(**{**counts, "unseen_epochs": unseen_epochs, "broken": broken}),))


def _played(tmp_path: Path, handled: Sequence[Handled], audit: AuditVerdict | None) -> bool:
    """Whether the verdict on such an act is good."""
    board = IncidentBoard(QUICK_INCIDENT, Events(time.monotonic()), tmp_path)
    act = IncidentAct(QUICK_INCIDENT, tmp_path, board, SparkStart())
    act.stored, act.handled, act.audit = _messages(4), list(handled), audit
    for offset in range(4):
        board.acknowledged(Stored(INCIDENT_SUBJECT, 0, offset), "customer-1", notification_id("customer-1", offset + 1))
    names = (INCIDENT_SUBJECT, INCIDENT_GROUP, "key", "end")
    act.drain = DrainReport(*names, 2, 1, 0, 0, 0, 0.1, 0.2, 0.1)
    return judge_incident(act, board, 1.0).ok


@pytest.mark.parametrize(
    ("handled", "audit", "ok"),
    [
        (IN_ORDER, _audit({}), True),
        (TOO_EARLY, _audit({}), False),  # only the order checker finds the violation
        (IN_ORDER, _audit({ViolationKind.SKIPPED: 1}), False),  # only the audit finds the violation
        (IN_ORDER, _audit({}, unseen_epochs=1), False),  # a lease without a trace
        (IN_ORDER, None, False),
        (IN_ORDER[:3], _audit({}), False),  # a message was lost: no consumer continued after the hand-back
    ],
)
def test_the_act_is_good_only_if_the_audit_and_the_order_checker_both_say_so(
    tmp_path: Path, handled: Sequence[Handled], audit: AuditVerdict | None, ok: bool
) -> None:
    assert _played(tmp_path, handled, audit) is ok
