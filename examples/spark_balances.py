"""Ordered, stateful aggregation on Spark: the balance of every account, folded move by move in order.

Interest makes order matter: interest is paid on the current balance. The balances are in a separate database. The
offset of the last included message stands next to the balance, so handling a message twice changes nothing.

    pip install 'inturn[spark]'
    python spark_balances.py
"""

from __future__ import annotations

import json
import random
import sqlite3
import tempfile
from collections.abc import Callable
from pathlib import Path

import inturn
import inturn.spark

ACCOUNTS, MOVES = 50, 1_000


def fold(balance: int, move: dict[str, int]) -> int:
    """Return the new balance in cents. Interest is in percent of the current balance."""
    return balance * (100 + move["percent"]) // 100 if "percent" in move else balance + move["amount"]


def handler_for(database: str) -> Callable[[inturn.Message, inturn.Context], None]:
    """Return a handler that stores balances in `database`. Every Python worker of Spark opens a separate connection."""

    def handle(message: inturn.Message, context: inturn.Context) -> None:
        account, move = message.key_text, json.loads(message.body)
        with sqlite3.connect(database, timeout=60) as db:
            db.execute("BEGIN IMMEDIATE")
            row = db.execute("SELECT balance, up_to FROM balances WHERE account = ?", (account,)).fetchone()
            balance, up_to = row or (0, -1)
            if message.offset > up_to:
                values = (account, fold(balance, move), message.offset)
                db.execute("INSERT OR REPLACE INTO balances VALUES (?, ?, ?)", values)
        db.close()

    return handle


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, inturn.connect(Path(folder) / "data") as mq:
        mq.create_subject("account.moves", partitions=2)
        rng, expected = random.Random(7), dict.fromkeys((f"account-{n}" for n in range(ACCOUNTS)), 0)
        with mq.producer() as producer:
            for _ in range(MOVES):
                account = rng.choice(sorted(expected))
                move = {"percent": 3} if rng.random() < 0.2 else {"amount": rng.randint(-5_000, 10_000)}
                expected[account] = fold(expected[account], move)
                producer.send("account.moves", json.dumps(move).encode(), key=account)

        database = str(Path(folder) / "balances.db")
        with sqlite3.connect(database) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("CREATE TABLE balances (account TEXT PRIMARY KEY, balance INTEGER, up_to INTEGER)")
        db.close()

        spark = inturn.spark.session(master="local[2]")
        try:
            report = inturn.spark.for_each(
                spark, mq.target, "account.moves", "balances", handler_for(database), order="key", start="first"
            )
        finally:
            spark.stop()
        db = sqlite3.connect(database)
        found = dict(db.execute("SELECT account, balance FROM balances"))
        db.close()
        assert found == {name: cents for name, cents in expected.items() if name in found}, "out of order"
        print(f"{report.done} moves of {len(found)} accounts in {report.rounds} round(s): every balance is right")


if __name__ == "__main__":
    main()
