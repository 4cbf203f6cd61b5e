"""Traces from send to handler, in the terms of OpenTelemetry."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

import inturn
from inturn import Connection, Context, Message, Result, aio
from inturn.tracing import Tracing
from tests.contract.bed import Seen, eventually, quick


class Spans:
    """The exported spans, from a separate SDK of the test."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def of(self, kind: trace.SpanKind) -> list[ReadableSpan]:
        return [span for span in self._exporter.get_finished_spans() if span.kind is kind]

    @property
    def sent(self) -> list[ReadableSpan]:
        return self.of(trace.SpanKind.PRODUCER)

    @property
    def handled(self) -> list[ReadableSpan]:
        return self.of(trace.SpanKind.CONSUMER)

    def wait_for(self, handled: int) -> None:
        eventually(lambda: len(self.handled) == handled, f"{handled} spans of handlers")


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
def mq(tmp_path: Path) -> Iterator[Connection]:
    with inturn.connect(tmp_path / "data", flush="os") as opened:
        opened.create_subject("line", 1)
        yield opened


def context_of(span: ReadableSpan) -> trace.SpanContext:
    found = span.get_span_context()
    assert found is not None
    return found


def test_one_trace_goes_from_the_sender_through_the_log_to_the_handler(mq: Connection, spans: Spans) -> None:
    tracing, tracer = Tracing(spans.provider), spans.provider.get_tracer("test")
    inside: list[trace.SpanContext] = []

    def handle(message: Message, context: Context) -> None:
        inside.append(trace.get_current_span().get_span_context())
        with tracer.start_as_current_span("mine"):
            pass

    with mq.producer("writer", hooks=[tracing]) as producer, tracer.start_as_current_span("request") as request:
        producer.send_sync("line", b"hello", key="k", message_id="m-1", properties={"mine": "1"})
    with mq.consumer("line", "g", handle, settings=quick(), hooks=[tracing]) as consumer:
        spans.wait_for(1)
    (sent,), (handled,) = spans.sent, spans.handled
    assert sent.parent is not None
    assert sent.parent.span_id == request.get_span_context().span_id
    assert handled.parent is not None
    assert handled.parent.span_id == context_of(sent).span_id
    assert handled.parent.is_remote
    assert inside == [context_of(handled)]
    (mine,) = [span for span in spans.of(trace.SpanKind.INTERNAL) if span.name == "mine"]
    assert mine.parent is not None
    assert mine.parent.span_id == context_of(handled).span_id
    assert len({context_of(span).trace_id for span in (sent, handled, mine)}) == 1
    common = {"messaging.system": "inturn", "messaging.destination.name": "line", "messaging.message.id": "m-1"}
    place = {"messaging.destination.partition.id": "0", "messaging.inturn.offset": 0, "messaging.message.body.size": 5}
    assert sent.name == "send line"
    assert dict(sent.attributes or {}) == {
        **common,
        **place,
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.client.id": "writer",
    }
    assert handled.name == "process line"
    assert dict(handled.attributes or {}) == {
        **common,
        **place,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.consumer.group.name": "g",
        "messaging.client.id": consumer.name,
        "messaging.inturn.attempt": 1,
        "messaging.inturn.epoch": 1,
        "messaging.inturn.result": "success",
    }
    assert handled.status.is_unset
    (message,) = mq.reader("line")
    assert message.properties["mine"] == "1"
    assert message.properties["traceparent"].startswith(f"00-{context_of(sent).trace_id:032x}-")


@pytest.mark.usefixtures("_quiet")
def test_every_attempt_has_a_span_that_says_how_it_ended(mq: Connection, spans: Spans) -> None:
    tracing = Tracing(spans.provider, with_keys=True)
    with mq.producer(hooks=[tracing]) as producer:
        producer.send_sync("line", b"x", key="k")

    def handle(message: Message, context: Context) -> object:
        if context.attempt == 1:
            raise ValueError("not yet")
        return inturn.suspend(0.01) if context.attempt == 2 else None

    with mq.consumer("line", "g", handle, settings=quick(), hooks=[tracing]):
        spans.wait_for(3)
    first, second, third = spans.handled
    told = [dict(span.attributes or {}) for span in (first, second, third)]
    assert [one["messaging.inturn.attempt"] for one in told] == [1, 2, 3]
    assert [one["messaging.inturn.result"] for one in told] == ["exception", "failed", "success"]
    assert [one.get("error.type") for one in told] == ["ValueError", "failed", None]
    assert [one["messaging.inturn.message.key"] for one in told] == ["k"] * 3
    assert (first.status.status_code, first.status.description) == (trace.StatusCode.ERROR, "not yet")
    assert [event.name for event in first.events] == ["exception"]
    assert len({span.parent.span_id for span in (first, second, third) if span.parent}) == 1


def test_a_batch_is_linked_to_all_its_messages(mq: Connection, spans: Spans) -> None:
    tracing = Tracing(spans.provider)
    with mq.producer(hooks=[tracing]) as producer:
        for number in range(3):
            producer.send("line", b"%d" % number)
    with mq.producer() as untraced:
        untraced.send_sync("line", b"3")
    settings = quick(batch=10, ack="manual")
    with mq.consumer("line", "g", lambda messages, context: Result.COMMIT, settings=settings, hooks=[tracing]):
        spans.wait_for(1)
    (handled,) = spans.handled
    assert handled.parent is None
    assert {link.context.span_id for link in handled.links} == {context_of(span).span_id for span in spans.sent}
    assert (handled.attributes or {})["messaging.batch.message_count"] == 4


def test_with_links_only_a_handler_has_a_trace_of_its_own(mq: Connection, spans: Spans) -> None:
    tracing = Tracing(spans.provider, links_only=True)
    with mq.producer(hooks=[tracing]) as producer:
        producer.send_sync("line", b"x")
    with mq.consumer("line", "g", Seen(), settings=quick(), hooks=[tracing]):
        spans.wait_for(1)
    (sent,), (handled,) = spans.sent, spans.handled
    assert handled.parent is None
    assert [link.context.span_id for link in handled.links] == [context_of(sent).span_id]
    assert context_of(handled).trace_id != context_of(sent).trace_id


def test_messages_without_a_context_and_with_a_broken_one_are_handled(mq: Connection, spans: Spans) -> None:
    with mq.producer() as producer:
        producer.send_sync("line", b"1")
        producer.send_sync("line", b"2", properties={"traceparent": "00-junk"})
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick(), hooks=[Tracing(spans.provider)]):
        spans.wait_for(2)
    assert seen.bodies == [b"1", b"2"]
    assert [span.parent for span in spans.handled] == [None, None]


def test_a_send_that_fails_ends_its_span_with_the_error(mq: Connection, spans: Spans) -> None:
    fenced = mq.producer("writer", hooks=[Tracing(spans.provider)])
    with mq.producer("writer"), pytest.raises(inturn.errors.ProducerFenced):
        fenced.send_sync("line", b"x")
    with pytest.raises(inturn.errors.InvalidInput):
        fenced.send("line", "text")  # type: ignore[arg-type]
    fenced.close()
    first, second = spans.sent
    assert (first.attributes or {})["error.type"] == "ProducerFenced"
    assert (second.attributes or {})["error.type"] == "InvalidInput"
    assert all(span.status.status_code is trace.StatusCode.ERROR for span in (first, second))


def test_handlers_at_the_same_time_do_not_see_each_others_spans(mq: Connection, spans: Spans) -> None:
    """In threads: both handlers run before either continues."""
    tracing, together = Tracing(spans.provider), threading.Barrier(2)
    inside: dict[bytes, int] = {}

    def handle(message: Message, context: Context) -> None:
        together.wait(10)
        inside[message.body] = trace.get_current_span().get_span_context().trace_id

    with mq.producer(hooks=[tracing]) as producer:
        for key in ("a", "b"):
            producer.send_sync("line", key.encode(), key=key)
    with mq.consumer("line", "g", handle, order="key", settings=quick(), hooks=[tracing]):
        spans.wait_for(2)
    assert [inside[b"a"], inside[b"b"]] == [context_of(span).trace_id for span in spans.sent]
    assert inside[b"a"] != inside[b"b"]


def test_the_same_holds_for_tasks_of_an_event_loop(tmp_path: Path, spans: Spans) -> None:
    tracing, tracer = Tracing(spans.provider), spans.provider.get_tracer("test")
    inside: dict[bytes, int] = {}

    async def main() -> None:
        arrived, both = [0], asyncio.Event()

        async def handle(message: Message, context: Context) -> None:
            arrived[0] += 1
            if arrived[0] == 2:
                both.set()
            await both.wait()
            inside[message.body] = trace.get_current_span().get_span_context().trace_id

        async with aio.connect(tmp_path / "data", flush="os") as mq:
            await mq.create_subject("line", 1)
            async with mq.producer(hooks=[tracing]) as producer:
                for key in ("a", "b"):
                    with tracer.start_as_current_span(key):
                        await producer.send("line", key.encode(), key=key)
            async with mq.consumer("line", "g", handle, order="key", settings=quick(), hooks=[tracing]):
                async with asyncio.timeout(30):
                    while len(spans.handled) < 2:
                        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert [inside[b"a"], inside[b"b"]] == [context_of(span).trace_id for span in spans.sent]
    requests = {context_of(span).trace_id for span in spans.of(trace.SpanKind.INTERNAL)}
    assert requests == set(inside.values())


def test_what_is_not_sampled_stays_so_at_the_handler(mq: Connection, spans: Spans) -> None:
    off = Tracing(TracerProvider(sampler=ALWAYS_OFF))
    with mq.producer(hooks=[off]) as producer:
        producer.send_sync("line", b"x")
    (message,) = mq.reader("line")
    assert int(message.properties["traceparent"].rpartition("-")[2], 16) & 1 == 0
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick(), hooks=[Tracing(spans.provider)]):
        seen.wait_for(1)
    assert spans.handled == []


def test_without_an_sdk_nothing_is_done(mq: Connection) -> None:
    tracing = Tracing()
    with mq.producer(hooks=[tracing]) as producer:
        producer.send_sync("line", b"x")
    (message,) = mq.reader("line")
    assert message.properties == {}
    seen = Seen()
    with mq.consumer("line", "g", seen, settings=quick(), hooks=[tracing]):
        seen.wait_for(1)


def test_the_example_in_the_how_to_runs(tmp_path: Path) -> None:
    text = (Path(__file__).parent.parent.parent / "docs" / "how-to" / "operate.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ran = subprocess.run([sys.executable, "-c", example], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert [ran.stdout.count(f'"name": "{name} orders"') for name in ("send", "process")] == [1, 1]


def test_without_the_extra_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['opentelemetry'] = None; import inturn.tracing"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode == 1
    assert "inturn.tracing needs the extra, opentelemetry is missing: pip install 'inturn[otel]'" in ran.stderr
