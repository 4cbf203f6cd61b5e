"""Keyword options: an unknown option raises a TypeError that names the option, before any effect."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import inturn
import inturn.aio
from inturn import Context, Message


def handle(message: Message, context: Context) -> None:
    raise AssertionError("nothing was sent")


def test_unknown_options_raise_a_type_error_that_names_them(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"kye": "k"}
    outbox = inturn.Outbox()
    with inturn.connect(tmp_path / "data", flush="os") as mq, mq.producer() as producer:
        mq.create_subject("orders", partitions=1)
        for call in (
            lambda: producer.send("orders", b"x", **unknown),
            lambda: producer.send_sync("orders", b"x", **unknown),
            lambda: outbox.put(sqlite3.connect(":memory:"), "orders", b"x", **unknown),
            lambda: mq.consumer("orders", "g", handle, **unknown),
            lambda: mq.handler("orders", "g", **unknown),
        ):
            with pytest.raises(TypeError, match="kye"):
                call()
        for name in ("born_at_ms", "reserved"):
            internal: dict[str, Any] = {name: 5}
            with pytest.raises(TypeError, match=name):
                producer.send("orders", b"x", **internal)
        producer.flush(10)
        assert producer.statistics().acknowledged_count == 0


@pytest.mark.parametrize("name", ["lease", "retries_of"])
def test_options_that_the_connection_sets_are_refused(tmp_path: Path, name: str) -> None:
    internal: dict[str, Any] = {name: None}
    with inturn.connect(tmp_path / "data", flush="os") as mq:
        mq.create_subject("orders", partitions=1)
        with pytest.raises(TypeError, match=name):
            mq.consumer("orders", "g", handle, **internal)


@pytest.mark.parametrize("name", ["loop", "duty", "lease"])
def test_a_handler_takes_fewer_options_than_a_consumer(tmp_path: Path, name: str) -> None:
    internal: dict[str, Any] = {name: None}
    with inturn.connect(tmp_path / "data", flush="os") as mq, pytest.raises(TypeError, match=name):
        mq.handler("orders", "g", **internal)


def test_unknown_options_with_asyncio(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"ordre": "key"}

    async def scene() -> None:
        async with inturn.aio.connect(tmp_path / "data", flush="os") as mq:
            await mq.create_subject("orders", partitions=1)
            with pytest.raises(TypeError, match="ordre"):
                mq.consumer("orders", "g", handle, **unknown)
            async with mq.producer() as producer:
                with pytest.raises(TypeError, match="ordre"):
                    await producer.send("orders", b"x", **unknown)

    asyncio.run(scene())
