"""P8: a message is put in the user's own transaction, through any kind of connection."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import Engine, text

from inturn import Connection, Limits, Outbox
from inturn.errors import InvalidInput, InvalidName, LimitExceeded, OutboxFailed
from inturn.outbox.row import TOKEN
from tests.outbox.conftest import QUICK
from tests.outbox.shop import KINDS, engine_of, made, opened, stored


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_committed_is_sent_and_what_is_rolled_back_never_was(mq: Connection, url: str, kind: str) -> None:
    outbox = made(url)
    with opened(url, kind) as connection:
        outbox.put(connection, "orders", b"no", key="k")
        connection.rollback()
        first = outbox.put(connection, "orders", b"yes", key="k")
        second = outbox.put(connection, "orders", b"and this", key="k")
        assert second > first
        connection.commit()
        if not url.startswith("sqlite"):  # with SQLite no other connection can write meanwhile
            outbox.put(connection, "orders", b"not yet", key="k")
        assert outbox.scan(mq, QUICK).run_once().sent == 2
        connection.rollback()
    assert [message.body for message in stored(mq)] == [b"yes", b"and this"]
    assert outbox.status().waiting == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_row_and_the_users_own_change_are_one_transaction(url: str, kind: str) -> None:
    outbox = made(url)
    with opened(url, kind) as connection:
        _run(connection, "CREATE TABLE orders (id INTEGER PRIMARY KEY)")
        connection.commit()
        _run(connection, "INSERT INTO orders (id) VALUES (1)")
        outbox.put(connection, "orders", b"created", key="1")
        connection.rollback()
        assert _count(connection, "orders") == _count(connection, "inturn_outbox") == 0


def test_all_that_belongs_to_a_message_arrives(mq: Connection, url: str) -> None:
    outbox = made(url)
    with opened(url) as connection:
        outbox.put(
            connection,
            "orders",
            b"\x00\xff body",
            key=b"\xfe\x00",
            tags=("a", "ü"),
            properties={"mine": "ß\u0000"},
            message_id="id-7",
        )
        outbox.put(connection, "orders", bytearray(b"plain"))  # type: ignore[arg-type]
        connection.commit()
    outbox.scan(mq, QUICK).run_once()
    (whole,) = (message for message in stored(mq) if message.key is not None)
    (plain,) = (message for message in stored(mq) if message.key is None)
    assert (whole.body, whole.key, whole.tags, whole.message_id) == (b"\x00\xff body", b"\xfe\x00", ("a", "ü"), "id-7")
    assert whole.properties == {"mine": "ß\u0000", TOKEN: whole.properties[TOKEN]}
    assert plain.body == b"plain"
    assert plain.message_id == plain.properties[TOKEN], "without an id of its own it has the row's"
    assert abs(whole.born_at_ms - plain.born_at_ms) < 60_000


@pytest.mark.parametrize(
    ("subject", "arguments", "error"),
    [
        ("no such name!", {}, InvalidName),
        ("orders", {"body": "text"}, InvalidInput),
        ("orders", {"body": b"x" * 101}, LimitExceeded),
        ("orders", {"key": "k" * 11}, LimitExceeded),
        ("orders", {"key": 7}, InvalidInput),
        ("orders", {"key": "\ud800"}, InvalidInput),
        ("orders", {"tags": "text"}, InvalidInput),
        ("orders", {"properties": {"%mine": "x"}}, InvalidInput),
        ("orders", {"properties": {"a": "x" * 30}}, LimitExceeded),
        ("orders", {"message_id": 7}, InvalidInput),
        ("orders", {"partition": -1}, InvalidInput),
        ("orders", {"partition": True}, InvalidInput),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    tmp_path: Any, subject: str, arguments: dict[str, Any], error: type[Exception]
) -> None:
    url = f"sqlite:///{tmp_path / 'shop.db'}"
    outbox = made(url, limits=Limits(body_bytes=100, key_bytes=10, properties_bytes=20))
    with opened(url) as connection:
        with pytest.raises(error):
            outbox.put(connection, subject, arguments.pop("body", b""), **arguments)
        assert not connection.in_transaction


def test_a_connection_that_nobody_knows_is_refused(tmp_path: Any) -> None:
    outbox = Outbox()
    for wrong in (object(), None, "sqlite:///x.db", engine_of("sqlite://")):
        with pytest.raises(InvalidInput, match=r"SQLAlchemy Connection or Session, a sqlite3\.Connection"):
            outbox.put(wrong, "orders", b"")
    with pytest.raises(InvalidInput, match="has no database"):
        outbox.status()


def test_a_table_that_is_not_there_is_named_with_the_way_to_make_it(mq: Connection, url: str) -> None:
    made(url)
    outbox = Outbox(url, table="letters")
    with pytest.raises(InvalidInput, match=r"no outbox 'letters'.*inturn outbox ddl --dialect"):
        outbox.status()
    with pytest.raises(InvalidInput, match="no outbox"):
        outbox.scan(mq).start()


def test_the_table_may_have_another_name_and_making_it_twice_is_no_error(mq: Connection, url: str) -> None:
    for name in ("letters", "main.letters2" if url.startswith("sqlite") else "public.letters2"):
        made(url, table=name)
        outbox = made(url, table=name)
        with opened(url) as connection:
            outbox.put(connection, "orders", b"hello", key=name)
            connection.commit()
        assert outbox.scan(mq, QUICK).run_once().sent == 1
        assert outbox.status().table == name


def test_an_engine_of_the_users_own_is_used_and_left_open(mq: Connection, url: str) -> None:
    engine = engine_of(url)
    outbox = made(url)
    outbox = Outbox(engine)
    with engine.begin() as connection:
        outbox.put(connection, "orders", b"hello")
    assert outbox.scan(mq, QUICK).run_once().sent == 1
    assert isinstance(engine, Engine)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT 1")).scalar_one() == 1
    engine.dispose()


@pytest.mark.parametrize("wrong", ["mysql://host/db", "nonsense://x", "postgresql:///x?port=a", 7])
def test_a_database_that_cannot_be_used_is_an_error_that_says_so(wrong: Any) -> None:
    with pytest.raises((InvalidInput, OutboxFailed)):
        Outbox(wrong).status()


def test_a_password_is_not_told_with_an_error() -> None:
    with pytest.raises(InvalidInput) as caught:
        Outbox("mysql://user:secret@host/db").status()
    assert "secret" not in str(caught.value)


def test_rows_that_other_programs_insert_are_sent_as_well(mq: Connection, url: str) -> None:
    """Only subject and body are required. An invalid row is refused and named."""
    outbox = made(url)
    with opened(url) as connection:
        _run(connection, "INSERT INTO inturn_outbox (subject, \"key\", body) VALUES ('orders', 'k', 'hello')", url)
        _run(connection, "INSERT INTO inturn_outbox (subject, body, tags) VALUES ('orders', 'x', 'nonsense')", url)
        connection.commit()
    done = outbox.scan(mq, QUICK).run_once()
    assert (done.sent, done.refused) == (1, 1)
    assert [(message.key, message.body) for message in stored(mq)] == [(b"k", b"hello")]
    (refused,) = outbox.status().refused
    assert "JSON array" in refused.error


def _run(connection: Any, statement: str, url: str = "") -> None:
    if url.startswith("sqlite"):
        statement = statement.replace("'k'", "x'6b'").replace("'hello'", "x'68656c6c6f'").replace("'x'", "x'78'")
    is_alchemy = type(connection).__module__.startswith("sqlalchemy")
    connection.execute(text(statement) if is_alchemy else statement)


def _count(connection: Any, table: str) -> int:
    statement = f"SELECT count(*) FROM {table}"
    is_alchemy = type(connection).__module__.startswith("sqlalchemy")
    return int(connection.execute(text(statement) if is_alchemy else statement).fetchone()[0])
