"""The settings of a history, chosen by chance once per history."""

from __future__ import annotations

import random
from dataclasses import dataclass

from inturn.model.settings import (
    ConsumerSettings,
    FlowControl,
    Flush,
    LeaseSettings,
    LogSettings,
    OnExhausted,
    Order,
    ProducerSettings,
)
from simulator.faults import LEASE_LIFE_S

SUBJECT = "order.book"
GROUP = "notify"
WANTED = "wanted"  # a tag
TAGS_SHARE = 0.1  # share of histories with a group that filters by this tag
QUICK_SHARE = 0.4


@dataclass(frozen=True, slots=True)
class SimSettings:
    is_local: bool  # local clients die with the node's process; remote clients and their leases survive
    has_streams: bool  # between remote clients and the node
    loses_power: bool
    promises_all: bool  # acknowledged messages survive every fault
    log: LogSettings
    lease: LeaseSettings
    producer: ProducerSettings
    order: Order
    consumer: ConsumerSettings
    handler_s_max: float
    sync_s_max: float

    def names(self) -> list[str]:
        """For the coverage."""
        return [
            f"flush {self.log.flush.value}",
            f"clients {'local' if self.is_local else 'remote'}",
            f"ack {self.consumer.ack}",
            f"order {self.order.value}",
            f"network of {'streams' if self.has_streams else 'commands'}",
        ]


def choose_settings(rng: random.Random, *, has_tags: bool) -> SimSettings:
    is_local = rng.random() < 0.4
    has_streams = not is_local and rng.random() < 0.6
    flush = Flush.ALWAYS if rng.random() < 0.65 else Flush.OS
    # Without a sync before the acknowledgement, only a lost process is survived without losing messages.
    loses_power = flush is Flush.ALWAYS or (is_local and rng.random() < 0.8)
    promises_all = flush is Flush.ALWAYS or not loses_power
    log = _choose_log(rng, flush)
    producer = ProducerSettings(
        batch_count=rng.choice((1, 3, 20)), in_flight=rng.choice((1, 2, 5)), answer_timeout_s=0.5, backoff_max_s=0.5
    )
    order = rng.choice((Order.PARTITION, Order.KEY, Order.KEY))
    # A rollback by a message that is lost later would be missing in the judged history.
    ack = rng.choice(("auto", "auto", "manual")) if promises_all else "auto"
    return SimSettings(
        is_local,
        has_streams,
        loses_power,
        promises_all,
        log,
        LeaseSettings(life_s=LEASE_LIFE_S, renew_s=0.4, margin_s=0.1),
        producer,
        order,
        _choose_consumer(rng, order, ack, WANTED if has_tags else None),
        # With slow handlers there is always a backlog: leases change amid work.
        handler_s_max=rng.choice((0.0005, 0.01, 0.01, 0.05)),
        # On a slow disk more is written and not yet synced when the power goes.
        sync_s_max=rng.choice((0.008, 0.15)),
    )


def _choose_log(rng: random.Random, flush: Flush) -> LogSettings:
    return LogSettings(
        flush=flush,
        segment_bytes=rng.choice((2_000, 10_000, 1_000_000)),
        index_every_bytes=500,
        checkpoint_every_bytes=rng.choice((1_500, 20_000)),
        checkpoint_interval_s=0.05,
        reserve_bytes=1,
    )


def _choose_consumer(rng: random.Random, order: Order, ack: str, tags: str | None) -> ConsumerSettings:
    return ConsumerSettings(
        concurrency=rng.choice((1, 2, 4)),
        ack=ack,
        max_attempts=rng.choice((None, 1, 2, 3)),
        on_exhausted=_choose_on_exhausted(rng, order, ack),
        suspend_s=0.05,
        backoff_min_s=0.02,
        backoff_max_s=0.2,
        commit_interval_s=0.2,
        pull_bytes=rng.choice((300, 2_000, 100_000)),
        pull_wait_s=0.7,
        heartbeat_s=0.7,
        answer_timeout_s=0.5,
        flow=FlowControl(buffered_count=rng.choice((5, 40, 1000)), span=rng.choice((15, 100, 100_000))),
        tags=tags,
    )


def _choose_on_exhausted(rng: random.Random, order: Order, ack: str) -> OnExhausted:
    """Parking repeats handled but uncommitted messages; the checker allows repeats for rollbacks only."""
    if ack == "manual":
        return OnExhausted.BLOCK
    choices = list(OnExhausted) if order is Order.KEY else [OnExhausted.BLOCK, OnExhausted.DEAD_LETTER]
    return rng.choice(choices)


def quick_chance(seed: int) -> random.Random | None:
    """The chance by which consumers take their handlers for quick; None if never."""
    rng = random.Random(f"quick {seed}")
    return rng if rng.random() < QUICK_SHARE else None


def tags_chance(seed: int) -> random.Random | None:
    """The chance of the tags of this history; None if the group consumes all messages. Histories without tags do
    not change; the 44 keeps the histories unchanged that tests know by their seeds."""
    rng = random.Random(f"tags 44 {seed}")
    return rng if rng.random() < TAGS_SHARE else None
