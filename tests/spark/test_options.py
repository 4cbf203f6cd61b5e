from __future__ import annotations

import os
import pickle

import pytest

from inturn.errors import InvalidInput, InvalidName
from inturn.model.settings import Order
from inturn.security.credentials import Credentials
from inturn.security.settings import TlsSettings
from inturn.spark.source.offsets import Bound
from inturn.spark.source.options import NAMES, credential_options, parse_options

HERE = {"server": "inturn://127.0.0.1:4242", "subject": "order.book"}


def test_what_is_not_said_has_its_default() -> None:
    options = parse_options(HERE)
    assert (options.target, options.subject, options.group) == ("inturn://127.0.0.1:4242", "order.book", None)
    assert options.start("earliest") == Bound("earliest")
    assert options.ending == Bound("latest")
    assert options.slots.is_all
    assert options.fail_on_data_loss
    assert options.max_messages_per_trigger is None
    assert options.min_partitions is None


def test_names_come_in_lower_case() -> None:
    options = parse_options({**HERE, "startingoffsets": "latest", "failondataloss": "FALSE", "minpartitions": "9"})
    assert options.starting == Bound("latest")
    assert not options.fail_on_data_loss
    assert options.min_partitions == 9


def test_a_group_starts_where_it_stands_unless_told_otherwise() -> None:
    assert parse_options({**HERE, "group": "billing"}).start("earliest") == Bound("committed")
    assert parse_options({**HERE, "group": "billing", "startingOffsets": "latest"}).start("earliest").kind == "latest"


@pytest.mark.parametrize(
    ("given", "meant"),
    [("startingoffset", "startingOffsets"), ("servr", "server"), ("topic", "path"), ("maxmessagespertriger", "max")],
)
def test_an_unknown_option_is_refused_with_the_nearest_known(given: str, meant: str) -> None:
    with pytest.raises(InvalidInput, match=f"no option '{given}'.*{meant}"):
        parse_options({**HERE, given: "1"})


def test_an_option_that_is_like_none_is_told_all() -> None:
    with pytest.raises(InvalidInput) as refused:
        parse_options({**HERE, "zzz": "1"})
    assert all(name in str(refused.value) for name in NAMES)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"subject": None}, "subject is missing"),
        ({"server": None}, "server is missing"),
        ({"path": "data"}, "server and path"),
        ({"startingOffsets": "earliest", "startingTimestamp": "2026-01-31"}, "startingOffsets and startingTimestamp"),
        ({"startingOffsets": "committed"}, "group"),
        ({"startingOffsets": "first"}, "startingOffsets='first'.*earliest"),
        ({"startingOffsets": "12"}, "startingOffsets='12'.*JSON"),
        ({"startingTimestamp": "yesterday"}, "startingTimestamp='yesterday'.*2026"),
        ({"startingOffsets": '{"other": {"0": 1}}'}, "'other'.*'order.book'"),
        ({"startingOffsets": '{"0": "1"}'}, "JSON"),
        ({"startingOffsets": '{"0": -3}'}, "JSON"),
        ({"startingOffsets": "{}"}, "JSON"),
        ({"startingOffsets": "{nothing"}, "JSON"),
        ({"endingOffsets": "earliest"}, "endingOffsets.*latest"),
        ({"endingOffsets": '{"0": -2}'}, "endingOffsets.*latest"),
        ({"maxMessagesPerTrigger": "0"}, "maxMessagesPerTrigger='0'"),
        ({"minPartitions": "many"}, "minPartitions='many'"),
        ({"slots": "0-1024"}, "0 to 1023"),
        ({"slots": "9-3"}, "'9-3' ends before"),
        ({"slots": ""}, "0 to 1023"),
        ({"failOnDataLoss": "perhaps"}, "failOnDataLoss='perhaps'"),
        ({"server": "kafka://x"}, "kafka"),
    ],
)
def test_what_is_wrong_is_named(wrong: dict[str, str | None], told: str) -> None:
    given = {name: value for name, value in {**HERE, **wrong}.items() if value is not None}
    with pytest.raises(InvalidInput, match=told):
        parse_options(given)


def test_a_subject_has_to_be_a_name() -> None:
    with pytest.raises(InvalidName, match="a/b"):
        parse_options({**HERE, "subject": "a/b"})


def test_options_of_the_other_kind_of_query_are_not_ignored() -> None:
    with pytest.raises(InvalidInput, match="endingOffsets"):
        parse_options({**HERE, "endingOffsets": "latest"}, is_streaming=True)
    with pytest.raises(InvalidInput, match="maxMessagesPerTrigger"):
        parse_options({**HERE, "maxMessagesPerTrigger": "5"}, is_streaming=False)
    with pytest.raises(InvalidInput, match="roundSeconds"):
        parse_options({**HERE, "handler": "a:b", "group": "g", "roundSeconds": "5"}, is_streaming=False)


def test_a_stream_of_rows_with_a_group_may_say_its_order() -> None:
    given = {**HERE, "group": "etl"}
    assert parse_options(given, is_streaming=True).order is None
    assert parse_options({**given, "order": "partition"}, is_streaming=True).order is Order.PARTITION
    assert parse_options({**given, "order": "key"}).order is Order.KEY, "before Spark has asked for a batch or a stream"
    for wrong in ({"order": "key"}, {"group": "etl", "order": "key"}):
        with pytest.raises(InvalidInput, match="order is for"):
            parse_options({**HERE, **wrong}, is_streaming=False)
    with pytest.raises(InvalidInput, match="rows have no handler"):
        parse_options({**given, "order": "none"}, is_streaming=True)


def test_a_stream_that_commits_gives_all_that_it_commits() -> None:
    given = {**HERE, "group": "etl"}
    with pytest.raises(InvalidInput, match="slots"):
        parse_options({**given, "slots": "0-5"}, is_streaming=True)
    with pytest.raises(InvalidInput, match="group reset"):
        parse_options({**given, "startingOffsets": '{"0": 5}'}, is_streaming=True)
    assert parse_options({**given, "slots": "0-5", "startingOffsets": '{"0": 5}'}, is_streaming=False).group == "etl"


def test_slots_are_ranges_and_numbers() -> None:
    assert set(parse_options({**HERE, "slots": "0-2, 512"}).slots) == {0, 1, 2, 512}


def test_a_folder_is_the_same_wherever_a_task_runs() -> None:
    assert parse_options({"path": "data", "subject": "s"}).target == os.path.abspath("data")


def test_credentials_are_not_shown() -> None:
    options = parse_options({**HERE, "token": "tok-secret", "password": "pw-secret"})
    assert (options.credentials.token, options.password) == ("tok-secret", "pw-secret")
    assert "secret" not in repr(options)
    assert "secret" not in str(options)
    assert pickle.loads(pickle.dumps(options)) == options


def test_a_token_for_a_folder_is_a_mistake() -> None:
    with pytest.raises(InvalidInput, match="a folder needs neither"):
        parse_options({"path": "./data", "subject": "order.book", "token": "tok-secret"})


def test_credentials_become_options_and_back() -> None:
    credentials = Credentials("tok-secret", TlsSettings("ca.pem", "cert.pem", "key.pem"))
    options = parse_options({**HERE, **credential_options(credentials)})
    assert options.credentials == credentials
    assert parse_options({**HERE, **credential_options(Credentials())}).credentials == Credentials()
