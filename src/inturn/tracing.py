"""OpenTelemetry traces from send to handler: `pip install 'inturn[otel]'`.

tracing = inturn.tracing.Tracing()
mq.producer(hooks=[tracing])
mq.consumer("orders", "billing", handle, hooks=[tracing])

A producer span lasts from the send to the acknowledgement, a consumer span covers every call of a handler. The W3C
trace context travels in the properties `traceparent` and `tracestate`. Names and attributes follow the semantic
conventions for messaging. Without a configured SDK, tracing does nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token

from inturn.consumer.context import Context, Hook
from inturn.model.errors import InvalidInput
from inturn.model.message import Message
from inturn.model.result import ResultKind
from inturn.producer.send_batch import Stored
from inturn.producer.send_hook import SendHook, Sending

try:
    from opentelemetry import context as contexts
    from opentelemetry import trace
    from opentelemetry.propagators.textmap import TextMapPropagator
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    from opentelemetry.util.types import AttributeValue
except ModuleNotFoundError as error:
    raise InvalidInput(
        f"inturn.tracing needs the extra, {error.name} is missing: pip install 'inturn[otel]'"
    ) from error

SYSTEM = "inturn"
_SUCCEEDED = frozenset((ResultKind.SUCCESS, ResultKind.TIMEOUT))
_NO_CONTEXT = contexts.Context()


class Tracing(Hook, SendHook):
    """A hook for consumers and for producers.

    The span of a handler is the child of the span that sent the message, so a trace goes from end to end. A handler
    that takes a batch has a separate trace, with a link to every message. With `links_only` every handler has a
    separate trace: for backlogs too old for the trace of the sender. Every attempt has a separate span. Keys can be
    personal data: keys are left out unless `with_keys`.
    """

    def __init__(
        self,
        provider: trace.TracerProvider | None = None,
        *,
        propagator: TextMapPropagator | None = None,
        links_only: bool = False,
        with_keys: bool = False,
    ) -> None:
        """The default provider is the global provider; the default propagator is W3C."""
        self._tracer = trace.get_tracer("inturn", tracer_provider=provider)
        self._propagator = propagator if propagator is not None else TraceContextTextMapPropagator()
        self._links_only = links_only
        self._with_keys = with_keys
        self._handling: ContextVar[tuple[trace.Span, Token[contexts.Context]] | None] = ContextVar(
            "inturn_handling", default=None
        )

    # Sending

    def before_send(self, sending: Sending) -> object:
        attributes = _attributes("send", "send", sending.subject)
        attributes["messaging.message.body.size"] = len(sending.body)
        if sending.message_id is not None:
            attributes["messaging.message.id"] = sending.message_id
        if sending.producer is not None:
            attributes["messaging.client.id"] = sending.producer
        if self._with_keys and sending.key is not None:
            attributes["messaging.inturn.message.key"] = _text(sending.key)
        span = self._tracer.start_span(f"send {sending.subject}", kind=trace.SpanKind.PRODUCER, attributes=attributes)
        self._propagator.inject(sending.properties, trace.set_span_in_context(span))
        return span

    def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
        if not isinstance(begun, trace.Span):
            return
        if stored is not None:
            begun.set_attribute("messaging.destination.partition.id", str(stored.partition))
            begun.set_attribute("messaging.inturn.offset", stored.offset)
        if error is not None:
            _failed(begun, error)
        begun.end()

    # Handling

    def before(self, messages: Sequence[Message], context: Context) -> None:
        sent = [self._context_of(message) for message in messages]
        is_child = len(messages) == 1 and not self._links_only
        span = self._tracer.start_span(
            f"process {context.subject}",
            context=sent[0] if is_child else _NO_CONTEXT,
            kind=trace.SpanKind.CONSUMER,
            attributes=self._handling_attributes(messages, context),
            links=[] if is_child else _links(sent),
        )
        self._handling.set((span, contexts.attach(trace.set_span_in_context(span))))

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        handling = self._handling.get()
        if handling is None:
            return
        self._handling.set(None)
        span, token = handling
        contexts.detach(token)
        span.set_attribute("messaging.inturn.result", kind.value)
        if error is not None:
            _failed(span, error)
        elif kind not in _SUCCEEDED:
            span.set_attribute("error.type", kind.value)
            span.set_status(trace.StatusCode.ERROR, f"the handler's result: {kind.value}")
        span.end()

    def _context_of(self, message: Message) -> contexts.Context:
        return self._propagator.extract(message.properties, _NO_CONTEXT)

    def _handling_attributes(self, messages: Sequence[Message], context: Context) -> dict[str, AttributeValue]:
        attributes = _attributes("process", "process", context.subject)
        attributes["messaging.consumer.group.name"] = context.group
        attributes["messaging.client.id"] = context.consumer
        attributes["messaging.destination.partition.id"] = str(context.partition)
        attributes["messaging.inturn.offset"] = messages[0].offset
        attributes["messaging.inturn.attempt"] = context.attempt
        attributes["messaging.inturn.epoch"] = context.epoch
        if len(messages) > 1:
            attributes["messaging.batch.message_count"] = len(messages)
        else:
            attributes["messaging.message.id"] = messages[0].id
            attributes["messaging.message.body.size"] = len(messages[0].body)
        if self._with_keys and messages[0].key is not None:
            attributes["messaging.inturn.message.key"] = _text(messages[0].key)
        return attributes


def _attributes(name: str, kind: str, subject: str) -> dict[str, AttributeValue]:
    return {
        "messaging.system": SYSTEM,
        "messaging.operation.name": name,
        "messaging.operation.type": kind,
        "messaging.destination.name": subject,
    }


def _links(sent: Sequence[contexts.Context]) -> list[trace.Link]:
    spans = (trace.get_current_span(one).get_span_context() for one in sent)
    return [trace.Link(span) for span in spans if span.is_valid]


def _failed(span: trace.Span, error: BaseException) -> None:
    span.record_exception(error)
    span.set_attribute("error.type", type(error).__qualname__)
    span.set_status(trace.StatusCode.ERROR, str(error))


def _text(key: str | bytes) -> str:
    return key if isinstance(key, str) else bytes(key).decode(errors="backslashreplace")
