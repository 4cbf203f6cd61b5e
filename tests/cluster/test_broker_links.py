"""Streams to brokers that refuse the stream, or whose files cannot be read for a moment."""

from __future__ import annotations

import pytest

from inturn.cluster import broker_links as links
from inturn.cluster.broker_links import REFUSED_S, BrokerStreams
from inturn.model.errors import InvalidInput
from inturn.security.credentials import NONE
from inturn.testing.clock import FakeClock


class Refusable:
    def __init__(self, *_: object, **__: object) -> None:
        self.is_refused = False


def test_a_stream_that_was_refused_is_made_anew_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """M1: a broker gets a token, or is upgraded, and no other process has to be restarted."""
    monkeypatch.setattr(links, "RemoteNode", Refusable)
    clock = FakeClock()
    made = BrokerStreams(lambda _: "inturn://127.0.0.1:1", clock, NONE)
    first = made.to("east")
    assert made.to("east") is first
    first.is_refused = True  # type: ignore[misc]
    assert made.to("east") is first, "not for every command"
    clock.advance(REFUSED_S)
    second = made.to("east")
    assert second is not first
    assert made.to("east") is second


def test_files_that_cannot_be_read_for_a_moment_do_not_end_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(*_: object) -> None:
        raise InvalidInput("ca.pem is empty")

    monkeypatch.setattr(links, "dialled", unreadable)
    made = BrokerStreams(lambda _: "inturns://127.0.0.1:1", FakeClock(), NONE)
    with pytest.raises(OSError, match=r"ca\.pem is empty"):
        made._dial("east", 1.0)
