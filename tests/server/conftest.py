from __future__ import annotations

import logging
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import structlog
from prometheus_client.parser import text_string_to_metric_families

from inturn import Flush, LeaseSettings, LogSettings
from inturn.server.server import Server
from inturn.transport.address import Address
from tests.cli.conftest import _logging_as_it_was as _logging_as_it_was
from tests.cli.conftest import cli as cli
from tests.cli.conftest import orders as orders

LEASE = LeaseSettings(life_s=3.0, renew_s=0.5, margin_s=0.1)


@dataclass(frozen=True, slots=True)
class Got:
    status: int
    text: str
    content_type: str


def get(url: str, accept: str = "", method: str = "GET") -> Got:
    """The response, with any status."""
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return Got(answer.status, answer.read().decode(), answer.headers["Content-Type"])
    except urllib.error.HTTPError as error:
        with error:
            return Got(error.code, error.read().decode(), error.headers["Content-Type"])


class Figures:
    """A scrape: `figures("inturn_logs", state="ok")` is the value of a series."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, frozenset(labels.items())]

    def count(self, name: str) -> int:
        return sum(found == name for found, _ in self.samples)


def scrape(url: str) -> Figures:
    got = get(f"{url}/metrics")
    assert got.status == 200, got.text
    return Figures(got.text)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Server]:
    """A server in this process, with HTTP."""
    made = Server(
        tmp_path / "served",
        address=Address("127.0.0.1"),
        log=LogSettings(flush=Flush.OS),
        lease=LEASE,
        http=("127.0.0.1", 0),
    )
    yield made
    made.close(grace_s=0.0)


@pytest.fixture
def _quiet() -> Iterator[None]:
    """Do not log handlers that fail on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()
