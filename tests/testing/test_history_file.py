from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from inturn.testing.checker import check
from inturn.testing.history import (
    ClaimEnded,
    ClaimGranted,
    Committed,
    ConsumerCrashed,
    Event,
    GroupFiltered,
    HandlerEnd,
    HandlerStart,
    History,
    KeyResumed,
    KeySkipped,
    LeaseEnded,
    LeaseGranted,
    OffsetsReset,
    ProcessRestarted,
    SendAcknowledged,
)

ONE_OF_EACH: list[Event] = [
    SendAcknowledged("s", 0, 1, b"\x00\xff", "m", at_s=0.5),
    SendAcknowledged("s", 0, 2),
    LeaseGranted("s", "g", 0, "a", 1, at_s=1.0),
    HandlerStart("s", "g", 0, 1, b"\x00\xff", "a", 1, "m"),
    HandlerEnd("s", "g", 0, 1, b"\x00\xff", "a", 1, "m", "exception"),
    Committed("s", "g", 0, "a", 1, 1),
    HandlerStart("s", "g", 0, 2, None, "a", 1, attempt=3),
    Committed("s", "g", 0, "a", 1, 1, (4, 2**40), ((0, 1), (7, 2)), ((0, 3),)),
    KeySkipped("s", "g", 0, 1, b"\x00\xff"),
    GroupFiltered("s", "g", "paid || shipped", {0: (1, 2), 3: ()}),
    SendAcknowledged("s", 0, 7, b"k", "id", ("paid", "late")),
    KeyResumed("s", "g", 0, b"\x00\xff"),
    ClaimGranted("s", "g", 0, "b", 1, bytes(127) + b"\xff"),
    ClaimGranted("s", "g", 0, "c", 1),
    ClaimEnded("s", "g", 0, "b", 1),
    ConsumerCrashed("a"),
    LeaseEnded("s", "g", 0, "a", 1, "gone"),
    OffsetsReset("s", "g", {0: 7, 12: 0}),
    ProcessRestarted(at_s=9.25),
]


def test_a_history_comes_back_from_its_file_as_it_was(tmp_path: Path) -> None:
    history = History(ONE_OF_EACH)
    history.save(tmp_path / "history.jsonl")
    again = History.load(tmp_path / "history.jsonl")
    assert again == history
    assert check(again, order="key") == check(history, order="key")


def test_a_file_has_one_readable_line_per_event(tmp_path: Path) -> None:
    History(ONE_OF_EACH).save(tmp_path / "history.jsonl")
    lines = (tmp_path / "history.jsonl").read_text().splitlines()
    assert len(lines) == len(ONE_OF_EACH)
    assert lines[-1] == '{"event":"ProcessRestarted","at_s":9.25}'


def test_a_file_from_before_there_were_finished_sets_and_attempts_can_be_read(tmp_path: Path) -> None:
    place = '"subject":"s","group":"g","partition":0'
    lines = (
        f'{{"event":"HandlerStart","at_s":1.0,{place},"offset":1,"key":"AP8=","consumer":"a","epoch":1}}',
        f'{{"event":"Committed","at_s":2.0,{place},"owner":"a","epoch":1,"offset":2}}',
    )
    (tmp_path / "history.jsonl").write_text("\n".join(lines))
    assert list(History.load(tmp_path / "history.jsonl")) == [
        HandlerStart("s", "g", 0, 1, b"\x00\xff", "a", 1, None, None, at_s=1.0),
        Committed("s", "g", 0, "a", 1, 2, (), (), (), at_s=2.0),
    ]


def test_a_line_that_is_no_event_is_refused(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_text('{"event":"SomethingElse","at_s":1}\n')
    with pytest.raises(msgspec.DecodeError):
        History.load(tmp_path / "history.jsonl")


def test_a_result_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    History(ONE_OF_EACH).save(tmp_path / "history.jsonl")
    text = (tmp_path / "history.jsonl").read_text().replace('"exception"', '"perhaps"')
    (tmp_path / "history.jsonl").write_text(text)
    with pytest.raises(msgspec.ValidationError, match="perhaps"):
        History.load(tmp_path / "history.jsonl")


def test_an_empty_history_has_an_empty_file(tmp_path: Path) -> None:
    History().save(tmp_path / "history.jsonl")
    assert len(History.load(tmp_path / "history.jsonl")) == 0
