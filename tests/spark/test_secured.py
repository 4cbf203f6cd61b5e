"""Spark with a server that authenticates clients: the token reaches the tasks, and no output shows the token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from inturn import Flush, LeaseSettings, LogSettings, TlsSettings, connect
from inturn.errors import AuthenticationFailed
from inturn.security.settings import SecuritySettings, ServerTlsSettings
from inturn.security.tokens import TokenFile
from inturn.server.server import Server
from inturn.spark.ordered.drain import Drain
from inturn.spark.ordered.task import disconnect
from inturn.transport.address import Address
from tests.security.bed import Certificates
from tests.spark.noting import Noted, Noting

RULES = """
[[allow]]
principals = "spark"
actions = ["read", "consume", "describe"]
subjects = "orders"
groups = "billing"

[[allow]]
principals = "shop"
actions = ["produce", "create"]
subjects = "orders"
"""
LEASE = LeaseSettings(life_s=3.0, renew_s=0.5, margin_s=0.2)


class Secured:
    """A server with TLS, and two principals: a producer and Spark."""

    def __init__(self, folder: Path) -> None:
        certificates = Certificates(folder / "certificates")
        file = TokenFile(folder / "tokens.json")
        self.shop, self.token = file.create("shop", 0), file.create("spark", 0)
        (folder / "access.toml").write_text(RULES)
        tls = ServerTlsSettings(*certificates.issue("server", "127.0.0.1"))
        security = SecuritySettings(str(file.path), str(folder / "access.toml"), tls)
        log = LogSettings(flush=Flush.OS)
        self.service = Server(folder / "data", address=Address("127.0.0.1"), log=log, lease=LEASE, security=security)
        self.address = str(self.service.address)
        self.tls = TlsSettings(ca_file=certificates.ca_file)
        with connect(self.address, token=self.shop, tls=self.tls) as mq, mq.producer() as producer:
            mq.create_subject("orders", partitions=2)
            for number in range(40):
                producer.send("orders", b"%d" % number, key=f"k{number % 4}")

    @property
    def options(self) -> dict[str, str]:
        return {"server": self.address, "subject": "orders", "tlsCa": str(self.tls.ca_file)}


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    made = Secured(tmp_path)
    yield made
    disconnect(made.address)
    made.service.close(grace_s=0.0)


def test_rows_are_read_with_a_token_that_no_plan_and_no_error_shows(spark: SparkSession, secured: Secured) -> None:
    frame = spark.read.format("inturn").options(**secured.options, token=secured.token).load()
    secret = secured.token.rpartition("_")[2]
    assert sorted(int(bytes(row.body)) for row in frame.select("body").collect()) == list(range(40))
    assert secret not in frame._jdf.queryExecution().toString()
    wrong = spark.read.format("inturn").options(**secured.options, token=f"inturn_0_{secret[::-1]}")
    with pytest.raises(PySparkException, match="AuthenticationFailed") as failed:
        wrong.load().count()
    assert secret[::-1] not in str(failed.value)


def test_a_drain_takes_its_token_to_the_tasks(spark: SparkSession, secured: Secured, tmp_path: Path) -> None:
    """Driver and tasks are the same principal, so the tasks may claim under the driver's lease. No other token may."""
    with pytest.raises(AuthenticationFailed):
        Drain(spark, secured.address, "orders", "billing", Noting(tmp_path), start="first", tls=secured.tls).run()
    notes = tmp_path / "notes"
    notes.mkdir()
    drain = Drain(
        spark,
        secured.address,
        "orders",
        "billing",
        Noting(notes),
        start="first",
        token=secured.token,
        tls=secured.tls,
    )
    report = drain.run()
    assert (report.ended, report.done, report.lag) == ("end", 40, 0)
    noted = Noted(notes)
    assert sorted(noted.handled().values()) == [1] * 40
    for key in (b"k0", b"k1", b"k2", b"k3"):
        offsets = [one.offset for one in noted.starts if one.key == key]
        assert offsets == sorted(offsets)
    assert secured.token not in repr(vars(drain))
