"""P8: the pure parts of the scanner: settled id, lease, recovery, and which rows are sent when."""

from __future__ import annotations

import random

import pytest

from inturn.errors import InvalidInput
from inturn.model.settings import LeaseSettings
from inturn.outbox.recovery import RecoveryOffsets
from inturn.outbox.row import Row
from inturn.outbox.scan_core import Hold, Horizon, LeaseWatch, ScanCore, ScanLease, settled_id
from inturn.outbox.table import OutboxSettings, check_table_name, ddl


def row(row_id: int, key: str | None = "k", subject: str = "orders") -> Row:
    encoded = None if key is None else key.encode()
    return Row(row_id, f"t{row_id}", subject, encoded, b"", "[]", "{}", None, None, 0, 0)


def by_key(one: Row) -> object:
    return one.key


def ids(rows: list[Row]) -> list[int]:
    return [one.id for one in rows]


# The settled id


def test_a_mark_is_settled_when_all_that_was_open_at_its_time_has_ended() -> None:
    horizon = Horizon(0)
    assert horizon.advance(5, ["a", "b"]) == 0
    assert horizon.advance(9, ["b", "c"]) == 0
    assert horizon.advance(12, ["c"]) == 5, "neither a nor b is open any more; c began after 5"
    assert horizon.advance(13, ["d"]) == 12
    assert horizon.advance(20, []) == 20


def test_the_horizon_moves_though_something_is_open_all_the_time() -> None:
    horizon = Horizon(0)
    settled = [horizon.advance(number, [number, number + 1]) for number in range(1, 100)]
    assert settled[-1] >= 95


def test_no_id_above_what_an_open_transaction_began_with_is_settled() -> None:
    assert settled_id(9, []) == 9
    assert settled_id(9, [4, 7]) == 4
    assert settled_id(9, [12]) == 9, "it got its ids later"
    big = 5 * 2**32 + 3
    assert settled_id(big, [(big - 10) % 2**32]) == big - 10, "only the lowest bits are told"


@pytest.mark.parametrize("seed", range(20))
def test_the_settled_id_never_passes_one_that_is_still_open(seed: int) -> None:
    """Transactions get ids in order and end in any order."""
    chance = random.Random(seed)
    newest = 2**32 - 50
    opened: dict[int, list[int]] = {}  # per transaction: the newest id at the start, then the row ids
    for step in range(300):
        if chance.random() < 0.5 or not opened:
            opened[step] = [newest]
        elif chance.random() < 0.6:
            newest += 1
            opened[chance.choice(list(opened))].append(newest)
        else:
            del opened[chance.choice(list(opened))]
        settled = settled_id(newest, [begun % 2**32 for begun, *_ in opened.values()])
        assert all(settled < one for _, *ids in opened.values() for one in ids)
        assert opened or settled == newest


# The lease


def lease(owner: str | None, epoch: int = 1, beat: int = 0) -> ScanLease:
    return ScanLease("x", owner, epoch, beat, 1000, {})


def test_a_lease_is_taken_over_only_after_its_full_life_without_a_renewal_was_seen() -> None:
    watch = LeaseWatch()
    assert not watch.may_take(lease("a"), 100.0)
    assert not watch.may_take(lease("a"), 100.9)
    assert not watch.may_take(lease("a", beat=1), 100.99), "a renewal begins a new life"
    assert not watch.may_take(lease("a", beat=1), 101.9)
    assert watch.may_take(lease("a", beat=1), 102.0)
    assert LeaseWatch().may_take(lease(None), 0.0), "one that was given back is free"


def test_the_holder_counts_from_before_it_asked_and_stops_earlier_than_anybody_may_take_over() -> None:
    hold = Hold(1, LeaseSettings(1.0, 0.2, 0.1), 100.0)
    assert hold.is_live(100.89)
    assert not hold.is_live(100.91)
    assert not hold.is_due(100.1)
    assert hold.is_due(100.2)
    hold.renewed(101.0)
    assert hold.is_live(101.5)


# RecoveryOffsets


def test_marks_cover_what_is_on_its_way_and_go_when_nothing_is() -> None:
    recovery = RecoveryOffsets({})
    recovery.learn("orders", [10, 20])
    assert recovery.to_store({1, 2}) == {"orders": [10, 20]}
    recovery.acknowledged("orders", 0, 10)
    assert recovery.to_store({2, 3}) == {"orders": [10, 20]}, "2 may stand before what was acknowledged"
    recovery.acknowledged("orders", 1, 20)
    assert recovery.to_store({3, 4}) == {"orders": [10, 20]}
    recovery.acknowledged("orders", 0, 11)
    assert recovery.to_store({5}) == {"orders": [11, 21]}, "all that was on its way then is accounted for"
    assert recovery.to_store(set()) == {}
    assert not recovery.knows("orders"), "others write there: what was its end is long ago"


def test_what_the_scanner_before_has_left_is_kept_until_it_was_recalled() -> None:
    recovery = RecoveryOffsets({"orders": [3]})
    recovery.learn("orders", [50])
    recovery.learn("bills", [7])
    assert recovery.to_store({"recovering"}) == {"orders": [3], "bills": [7]}
    assert recovery.to_store({"recovering", 9}) == {"orders": [3], "bills": [7]}


def test_a_partition_that_came_later_is_marked_from_its_beginning() -> None:
    recovery = RecoveryOffsets({})
    recovery.learn("orders", [5])
    recovery.acknowledged("orders", 2, 8)
    assert recovery.to_store({1}) == {"orders": [5]}
    assert recovery.to_store({2}) == {"orders": [5, 0, 9]}


# Which rows are sent


def scan_core(**settings: float) -> ScanCore:
    return ScanCore(OutboxSettings(**settings))  # type: ignore[arg-type]


def test_rows_are_sent_in_the_order_of_their_ids_and_once() -> None:
    core = scan_core()
    assert ids(core.choose([row(1), row(2), row(4)], by_key, 0.0).send) == [1, 2, 4]
    assert core.cursor == 4
    core.choose([], by_key, 0.0, up_to=9)
    assert core.cursor == 9


def test_a_refused_row_holds_back_its_key_and_nobody_else() -> None:
    core = scan_core()
    (first, *_) = core.choose([row(1)], by_key, 0.0).send
    core.refused(first)
    assert ids(core.choose([row(2), row(3, "other"), row(4, None)], by_key, 0.0).send) == [3, 4]
    core.retry()
    assert core.cursor == 0
    again = core.choose([row(1), row(2), row(3, "other"), row(4, None), row(5)], by_key, 0.0)
    assert ids(again.send) == [1, 2, 5], "3 and 4 are on their way"


def test_a_refused_row_without_a_key_is_not_tried_before_its_time() -> None:
    core = scan_core()
    (first,) = core.choose([row(1, None)], by_key, 0.0).send
    core.refused(first)
    assert core.choose([row(1, None), row(2, None)], by_key, 0.0).send == [row(2, None)]


def test_rows_of_a_key_are_put_back_when_one_before_them_is_refused_while_sending() -> None:
    core = scan_core()
    one, two, other = core.choose([row(1), row(2), row(3, "other")], by_key, 0.0).send
    core.refused(one)
    assert (core.is_held(two), core.is_held(other)) == (True, False)
    core.put_back(two)
    assert core.in_flight == 1
    core.retry()
    assert ids(core.choose([row(1), row(2), row(3, "other")], by_key, 0.0).send) == [1, 2]


def test_a_partition_that_stores_nothing_is_passed_over_until_it_does() -> None:
    core = scan_core(lane=2, stuck_s=1.0)
    stuck = [row(number, "stuck") for number in range(1, 6)]
    assert ids(core.choose(stuck, by_key, 0.0).send) == [1, 2]
    assert core.cursor == 2, "not stuck yet: what is behind waits"
    rest = [*stuck[2:], row(6, "free")]
    assert ids(core.choose(rest, by_key, 0.5).send) == []
    assert ids(core.choose(rest, by_key, 1.0).send) == [6]
    core.stored(1, 1.1)
    assert ids(core.choose([*stuck, row(6, "free")], by_key, 1.1).send) == [3], "from the first one passed over"


def test_what_was_passed_over_is_not_overtaken_by_its_own_key() -> None:
    core = scan_core(lane=4, stuck_s=1.0)
    core.choose([row(number) for number in range(1, 6)], by_key, 0.0)
    core.choose([row(5)], by_key, 1.0)
    core.stored(1, 1.1)
    assert core.choose([row(6)], by_key, 1.1).send == [], "there is room again, but 5 waits still"


def test_what_the_logs_have_is_not_sent_again() -> None:
    core = ScanCore(OutboxSettings(), ["t1", "t3"], recovered_until=3)
    assert core.unaccounted() == {"recovering"}
    choice = core.choose([row(1), row(2)], by_key, 0.0)
    assert (choice.stored, ids(choice.send)) == ([1], [2])
    assert "recovering" in core.unaccounted()
    choice = core.choose([row(3), row(4)], by_key, 0.0)
    assert (choice.stored, ids(choice.send)) == ([3], [4])
    assert core.unaccounted() == {2, 4}


def test_a_row_that_is_stored_and_not_deleted_yet_is_not_sent_again_when_rows_are_read_again() -> None:
    core = scan_core()
    core.choose([row(1), row(2, "bad")], by_key, 0.0)
    core.stored(1, 0.0)
    core.refused(row(2, "bad"))
    core.retry()
    assert ids(core.choose([row(1), row(2, "bad")], by_key, 0.0).send) == [2]


def test_what_failed_on_its_way_stays_unaccounted() -> None:
    core = scan_core()
    core.choose([row(1)], by_key, 0.0)
    core.failed(row(1))
    assert (core.in_flight, core.has_lost, core.unaccounted()) == (0, True, {1})


@pytest.mark.parametrize("seed", range(30))
def test_rows_of_a_key_never_overtake_each_other_whatever_happens(seed: int) -> None:
    """Rows are refused, stuck and retried.

    Still the log gets the rows of every key in the order of ids, every row once.
    """
    chance = random.Random(seed)
    core = scan_core(lane=3, stuck_s=0.5, batch=5, in_flight=8)
    rows = {number: row(number, chance.choice("abcd")) for number in range(1, 80)}
    table = dict(rows)
    sent: list[Row] = []  # in the order of arrival at a partition
    stored: list[int] = []
    now_s = 0.0
    for _ in range(2000):
        now_s += chance.random() * 0.3
        newest = [one for number, one in sorted(table.items()) if number > core.cursor][: max(core.room, 0)]
        up_to = 100 if len(newest) < core.room else None
        for one in core.choose(newest, by_key, now_s, up_to).send:
            if core.is_held(one):
                core.put_back(one)
            elif chance.random() < 0.1:
                core.refused(one)
            else:
                sent.append(one)
        if sent and chance.random() < 0.7:
            key = chance.choice(sent).key
            first = next(one for one in sent if one.key == key)
            sent.remove(first)
            stored.append(first.id)
            core.stored(first.id, now_s)
            if chance.random() < 0.5:
                del table[first.id]
                core.deleted([first.id])
        if chance.random() < 0.2:
            core.retry()
    assert sorted(stored) == sorted(rows)
    for key in (b"a", b"b", b"c", b"d"):
        of_key = [number for number in stored if rows[number].key == key]
        assert of_key == sorted(of_key)


# Names and statements


@pytest.mark.parametrize("name", ["", "a b", "Orders", "x;drop", "a.b.c", "1a", "a" * 49, None, "a."])
def test_a_table_name_that_would_need_quotes_is_refused(name: object) -> None:
    with pytest.raises(InvalidInput, match="table name"):
        check_table_name(name)


def test_the_statements_name_the_table_and_its_schema() -> None:
    statements = ddl("postgresql", "shop.letters")
    assert any("CREATE TABLE IF NOT EXISTS shop.letters (" in one for one in statements)
    assert any("shop.inturn_outbox_open()" in one for one in statements)
    with pytest.raises(InvalidInput, match="mysql"):
        ddl("mysql")


@pytest.mark.parametrize("bad", [{"poll_s": 0}, {"batch": 1.5}, {"lane": True}, {"lease": 3}])
def test_settings_are_checked(bad: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="OutboxSettings"):
        OutboxSettings(**bad)  # type: ignore[arg-type]
