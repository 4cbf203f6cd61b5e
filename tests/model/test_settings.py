"""Settings are validated once, on creation. An error names the field."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from inturn.model.errors import InvalidInput
from inturn.model.result import SUSPEND_DEFAULT_S, Suspend, suspend
from inturn.model.settings import (
    GIB,
    ConsumerSettings,
    FlowControl,
    LeaseSettings,
    Limits,
    LogSettings,
    ProducerSettings,
    Strategy,
)

Make = Callable[..., object]

POSITIVE: list[tuple[Make, str]] = [
    *((Limits, name) for name in ("body_bytes", "key_bytes", "properties_bytes")),
    *((LogSettings, name) for name in ("flush_interval_s", "segment_bytes", "index_every_bytes", "producer_expiry_s")),
    *((LeaseSettings, name) for name in ("life_s", "renew_s", "margin_s")),
    *((ProducerSettings, name) for name in ("batch_bytes", "batch_count", "in_flight", "buffer_bytes", "tries_max")),
    *((FlowControl, name) for name in ("buffered_count", "buffered_bytes", "span")),
    *((ConsumerSettings, name) for name in ("concurrency", "batch", "commit_interval_s", "pull_bytes", "heartbeat_s")),
]


@pytest.mark.parametrize(("make", "name"), POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("nan"), True, "5", None])
def test_a_number_must_be_above_zero(make: Make, name: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=name):
        make(**{name: value})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (ConsumerSettings, "concurrency"),
        (ConsumerSettings, "batch"),
        (ProducerSettings, "batch_count"),
        (ProducerSettings, "in_flight"),
        (Limits, "body_bytes"),
    ],
)
def test_a_count_must_be_a_whole_number(make: Make, name: str) -> None:
    with pytest.raises(InvalidInput, match=name):
        make(**{name: 1.5})


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (LogSettings, "flush", "sometimes"),
        (LogSettings, "retention_s", -1.0),
        (LogSettings, "retention_s", "1 day"),
        (LogSettings, "retention_bytes", -1),
        (LogSettings, "reserve_bytes", -1),
        (ConsumerSettings, "strategy", "sloppy"),
        (ConsumerSettings, "ack", "later"),
        (ConsumerSettings, "suspend_s", 0.001),
        (ConsumerSettings, "suspend_s", 31),
        (ProducerSettings, "compression", "gzip"),
    ],
)
def test_a_value_that_cannot_be_is_refused_with_the_name_of_the_field(make: Make, field: str, value: object) -> None:
    with pytest.raises(InvalidInput, match=field):
        make(**{field: value})


def test_more_in_flight_than_a_log_remembers_is_refused() -> None:
    """P4: a log recognises the last 16 batches of a producer. An older batch sent again would never be accepted."""
    with pytest.raises(InvalidInput, match="in_flight"):
        ProducerSettings(in_flight=17)


def test_the_shortest_backoff_is_not_above_the_longest() -> None:
    with pytest.raises(InvalidInput, match="backoff"):
        ProducerSettings(backoff_min_s=10.0, backoff_max_s=1.0)


def test_a_lease_must_be_renewed_before_it_ends() -> None:
    """B2."""
    with pytest.raises(InvalidInput, match=r"renew_s 10 \+ margin_s 0\.5 must be below life_s 10"):
        LeaseSettings(life_s=10.0, renew_s=10.0)
    LeaseSettings(life_s=0.6, renew_s=0.15, margin_s=0.05)


def test_a_body_is_never_larger_than_a_gibibyte() -> None:
    Limits(body_bytes=GIB)
    with pytest.raises(InvalidInput, match="body_bytes"):
        Limits(body_bytes=GIB + 1)


def test_names_of_choices_may_be_given_as_text() -> None:
    assert ConsumerSettings(strategy="best-effort").strategy is Strategy.BEST_EFFORT  # type: ignore[arg-type]


def test_settings_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        ConsumerSettings().batch = 2  # type: ignore[misc]


@pytest.mark.parametrize("seconds", [0.01, 1, 29.5, 30])
def test_a_suspend_time_from_ten_milliseconds_to_half_a_minute_is_taken(seconds: float) -> None:
    """C9."""
    assert suspend(seconds) == Suspend(float(seconds))


@pytest.mark.parametrize("seconds", [0, 0.009, 30.001, -1, float("nan"), float("inf"), "1", None])
def test_any_other_suspend_time_is_refused(seconds: object) -> None:
    """C9."""
    with pytest.raises(InvalidInput, match=r"0\.01 to 30 seconds"):
        suspend(seconds)  # type: ignore[arg-type]


def test_a_suspend_lasts_a_second_unless_told() -> None:
    """C9."""
    assert suspend().for_s == SUSPEND_DEFAULT_S == 1.0
