"""A scanner as a separate process, until killed: `python scanner_child.py DATABASE ADDRESS`."""

from __future__ import annotations

import logging
import sys

import structlog

import inturn


def main() -> None:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    database, address = sys.argv[1:]
    lease = inturn.LeaseSettings(life_s=0.6, renew_s=0.15, margin_s=0.05)
    settings = inturn.OutboxSettings(poll_s=0.01, batch=25, in_flight=100, lease=lease)
    with inturn.connect(address) as mq, inturn.Outbox(database).scan(mq, settings):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        sys.stdin.read()


if __name__ == "__main__":
    main()
