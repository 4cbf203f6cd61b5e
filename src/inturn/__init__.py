"""inturn: ordered messaging. What belongs together is handled in the order it happened; the rest runs in parallel."""

from inturn import errors
from inturn.connection import Connection, connect
from inturn.consumer.consumer import Blocking, Consumer, ConsumerStatistics
from inturn.consumer.context import Context
from inturn.consumer.hook import Hook
from inturn.dead_letters import DeadLetter, DeadLetters
from inturn.model.commands import KeyDescription, KeyDetails, KeyRequest, RequestState
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.position import Position
from inturn.model.result import Result, ResultKind, suspend
from inturn.model.settings import (
    AssignmentStrategy,
    ConsumerSettings,
    FlowControl,
    Flush,
    Keyless,
    LeaseSettings,
    Limits,
    LogSettings,
    OnExhausted,
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
from inturn.security.credentials import token_from_environment
from inturn.security.tls import TlsSettings
from inturn.version import VERSION

__version__ = VERSION

__all__ = [
    "SLOT_COUNT",
    "AssignmentStrategy",
    "Blocking",
    "Connection",
    "Consumer",
    "ConsumerSettings",
    "ConsumerStatistics",
    "Context",
    "DeadLetter",
    "DeadLetters",
    "FlowControl",
    "Flush",
    "Hook",
    "InturnError",
    "KeyDescription",
    "KeyDetails",
    "KeyRequest",
    "Keyless",
    "LeaseSettings",
    "Limits",
    "LogSettings",
    "Message",
    "OnExhausted",
    "Order",
    "Position",
    "Producer",
    "ProducerSettings",
    "Reader",
    "RequestState",
    "Result",
    "ResultKind",
    "RetryDelays",
    "Routing",
    "SendHandle",
    "Stored",
    "Strategy",
    "Subject",
    "TlsSettings",
    "__version__",
    "connect",
    "errors",
    "slot_of",
    "suspend",
    "token_from_environment",
]
