from __future__ import annotations

from pathlib import Path

from inturn.model.settings import Limits, Routing, Strategy
from inturn.protocol.commands import KeyRequest, Progress, RequestState
from inturn.store.database import Database
from inturn.store.groups import Groups
from inturn.store.keys import KeyRequests
from inturn.store.leases import ProgressRows
from inturn.store.subjects import Subjects


def ask(database: Database, group_id: int, partition: int = 0, key: bytes = b"k", now_ms: int = 1) -> KeyRequest:
    return KeyRequests(database).add(group_id, KeyRequest(0, partition, key, "skip", 7, "me", "bad"), now_ms)


def test_a_request_can_be_found_as_it_was_asked(database: Database, group_id: int) -> None:
    request = ask(database, group_id, 2, now_ms=5)
    assert request == KeyRequest(request.id, 2, b"k", "skip", 7, "me", "bad")
    requests = KeyRequests(database)
    assert requests.find(group_id, request.id) == RequestState(request, 5, None)
    assert requests.find(group_id + 1, request.id) is None
    assert requests.find(group_id, request.id + 1) is None


def test_a_request_is_done_once_and_by_its_own_partition(database: Database, group_id: int) -> None:
    rows, requests = ProgressRows(database), KeyRequests(database)
    other = Groups(database).create("orders", "shipping", "first", [0, 0, 0], 1)
    request = ask(database, group_id, 1)
    rows.store(group_id, [Progress(0, 1, 0, 1, requests=(request.id, 99))], 10)
    rows.store(other, [Progress(1, 1, 0, 1, requests=(request.id,))], 10)
    assert requests.waiting() == [(group_id, RequestState(request, 1, None))]
    rows.store(group_id, [Progress(1, 1, 0, 1, requests=(request.id,))], 20)
    rows.store(group_id, [Progress(1, 1, 0, 2, requests=(request.id,))], 30)
    assert requests.find(group_id, request.id) == RequestState(request, 1, 20)
    assert requests.waiting() == []


def test_the_history_of_a_key_is_bounded_and_has_the_newest_first(database: Database, group_id: int) -> None:
    asked = [ask(database, group_id).id for _ in range(4)]
    ask(database, group_id, key=b"other")
    ask(database, group_id, 1)
    history = KeyRequests(database).history(group_id, 0, b"k", 3)
    assert [state.request.id for state in history] == asked[:0:-1]


def test_the_mark_of_a_group_is_its_highest_request_done_or_not(database: Database, group_id: int) -> None:
    requests = KeyRequests(database)
    assert requests.last_ids() == {}
    ask(database, group_id)
    last = ask(database, group_id)
    ProgressRows(database).store(group_id, [Progress(0, 1, 0, 1, requests=(last.id,))], 1)
    assert requests.last_ids() == {group_id: last.id}


def test_who_and_why_may_be_any_text(database: Database, group_id: int) -> None:
    request = KeyRequests(database).add(group_id, KeyRequest(0, 0, b"k", "park", None, "\udc80", "\0"), 1)
    assert KeyRequests(database).find(group_id, request.id) == RequestState(request, 1, None)


def test_ids_never_repeat_across_reopening(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        database = Database.open(tmp_path / "state.db")
        Subjects(database).create("orders", 1, Routing.SLOTS, Strategy.STRICT, Limits(), 1)
        group_id = Groups(database).create("orders", "billing", "first", [0], 1)
        seen += [ask(database, group_id).id, ask(database, group_id).id]
        with database.transaction() as connection:
            KeyRequests(database).clear(connection, group_id)
        database.close()
    assert seen == sorted(set(seen))
