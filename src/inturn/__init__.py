"""inturn: ordered messaging. What belongs together is handled in the order it happened; the rest runs in parallel."""

from inturn import errors
from inturn.connection import Connection, connect
from inturn.consumer.consumer import Consumer, ConsumerStatistics
from inturn.consumer.context import Context
from inturn.consumer.hook import Hook
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.position import Position
from inturn.model.result import Result, ResultKind, suspend
from inturn.model.settings import (
    ConsumerSettings,
    FlowControl,
    Flush,
    LeaseSettings,
    Limits,
    LogSettings,
    Order,
    ProducerSettings,
    RetryDelays,
    Routing,
    Strategy,
)
from inturn.model.slot import SLOT_COUNT, slot_of
from inturn.model.subject import Subject
from inturn.producer.flight import SendHandle, Stored
from inturn.producer.producer import Producer
from inturn.reader import Reader

__version__ = "0.1.0"

__all__ = [
    "SLOT_COUNT",
    "Connection",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatistics",
    "Context",
    "FlowControl",
    "Flush",
    "Hook",
    "InturnError",
    "LeaseSettings",
    "Limits",
    "LogSettings",
    "Message",
    "Order",
    "Position",
    "Producer",
    "ProducerSettings",
    "Reader",
    "Result",
    "ResultKind",
    "RetryDelays",
    "Routing",
    "SendHandle",
    "Stored",
    "Strategy",
    "Subject",
    "__version__",
    "connect",
    "errors",
    "slot_of",
    "suspend",
]
