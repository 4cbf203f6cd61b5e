"""Databases for outboxes, and a node to send to."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

import inturn
from inturn import Connection, LeaseSettings, OutboxSettings
from tests.contract.bed import STEADY_LEASE
from tests.outbox.postgres import PostgresServer, find_programs

QUICK = OutboxSettings(
    poll_s=0.01, retry_s=0.1, stuck_s=0.1, lease=LeaseSettings(life_s=0.6, renew_s=0.15, margin_s=0.05)
)
STEADY = dataclasses.replace(QUICK, lease=STEADY_LEASE)  # for tests without a dead scanner: the lease must not be lost


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    programs = find_programs()
    missing = "PostgreSQL (apt-get install postgresql)" if programs is None else None
    if importlib.util.find_spec("psycopg") is None:
        missing = "psycopg (pip install 'psycopg[binary]')"
    if missing is not None:
        if os.environ.get("CI") == "true":
            pytest.fail(f"the outbox is tested with {missing}, which is not there")
        pytest.skip(f"{missing} is not there")
    assert programs is not None
    with PostgresServer(programs) as server:
        yield server


@pytest.fixture
def postgres_url(postgres: PostgresServer) -> str:
    """A database without tables, the same for all tests: creating a database takes longer than most tests."""
    import psycopg

    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("SET lock_timeout = '30s'")
        connection.execute("DROP SCHEMA public CASCADE")
        connection.execute("CREATE SCHEMA public")
    return postgres.url()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A database of every kind."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'shop.db'}"
    found: str = request.getfixturevalue("postgres_url")
    return found


@pytest.fixture
def mq(tmp_path: Path) -> Iterator[Connection]:
    """An open connection with the subject "orders" of four partitions."""
    with inturn.connect(tmp_path / "data", flush="os") as connection:
        connection.create_subject("orders", partitions=4)
        yield connection


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Rows are refused and scanners are fenced on purpose: log nothing."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
