"""`mq.group(subject, name)`, and the connection methods that the group handle replaces."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import inturn
import inturn.aio
from inturn import Connection, Group
from inturn.client.deprecated import DeprecatedGroupMethods
from inturn.errors import Closed, NotFound
from tests.contract.bed import eventually


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Connection]:
    with inturn.connect(tmp_path / "data", flush="os") as mq:
        mq.create_subject("orders", partitions=1)
        with mq.consumer("orders", "billing", lambda message, context: None):
            eventually(mq.groups, "the consumer has joined")
        yield mq


def test_the_handle_asks_the_node_only_in_its_methods(folder: Connection) -> None:
    billing = folder.group("orders", "billing")
    assert (billing.subject, billing.name) == ("orders", "billing")
    assert repr(billing) == "Group(subject='orders', name='billing')"
    assert billing.describe().lag == 0
    nosuch = folder.group("orders", "nosuch")
    with pytest.raises(NotFound, match="nosuch"):
        nosuch.describe()
    folder.close()
    with pytest.raises(Closed):
        billing.describe()


def test_the_old_methods_still_work_and_warn(folder: Connection) -> None:
    with pytest.warns(DeprecationWarning, match=r"use mq\.group\(subject, name\)\.describe\(\)") as caught:
        assert folder.describe_group("orders", "billing") == folder.group("orders", "billing").describe()
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="keys"):
        assert folder.keys("orders", group="billing") == []
    with pytest.warns(DeprecationWarning, match="resume"), pytest.raises(NotFound, match="order-7"):
        folder.resume_key("orders", "billing", "order-7", why="a test", wait_s=0)
    with pytest.warns(DeprecationWarning, match="skip"), pytest.raises(TypeError, match="until"):
        folder.skip_key("orders", "billing", "order-7", until=5)  # type: ignore[call-arg]


def test_every_old_method_names_its_successor() -> None:
    old = [
        function
        for name, function in vars(DeprecatedGroupMethods).items()
        if inspect.isfunction(function) and name != "group"
    ]
    assert len(old) == 12
    for function in old:
        successor = (
            (inspect.getdoc(function) or "").partition(".")[2].partition("(")[2].partition(").")[2].partition("(")
        )
        assert hasattr(Group, successor[0]), function.__name__


def test_the_same_with_asyncio(tmp_path: Path) -> None:
    async def scene() -> None:
        async with inturn.aio.connect(tmp_path / "data", flush="os") as mq:
            await mq.create_subject("orders", partitions=1)
            async with mq.consumer("orders", "billing", lambda message, context: None):
                while not await mq.groups():  # until the consumer has joined
                    await asyncio.sleep(0.01)
            billing = mq.group("orders", "billing")
            assert (await billing.describe()).lag == 0
            assert await billing.keys() == []
            assert await (await billing.dead_letters()).list() == []
            with pytest.warns(DeprecationWarning, match=r"use mq\.group\(subject, name\)\.describe\(\)") as caught:
                assert (await mq.describe_group("orders", "billing")).lag == 0
            assert caught[0].filename == __file__
            with pytest.raises(NotFound, match="nosuch"):
                await mq.group("orders", "nosuch").describe()

    asyncio.run(scene())
