"""inturn: ordered messaging. Messages of one key are handled in order; messages of different keys run in parallel."""

from inturn import errors
from inturn.client import Connection, connect
from inturn.client.dead_letters import DeadLetter, DeadLetters
from inturn.client.group import Group
from inturn.client.reader import Reader
from inturn.consumer.consumer import Consumer
from inturn.consumer.context import Context, Hook
from inturn.consumer.statistics import Blocking, ConsumerStatistics
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.offsets import Position
from inturn.model.result import Result, ResultKind, suspend
from inturn.model.routing import SLOT_COUNT, slot_of
from inturn.model.settings import (
    AssignmentStrategy,
    ConsumerSettings,
    FlowControl,
    Flush,
    GroupMode,
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
from inturn.model.subject import Subject
from inturn.outbox.outbox import Outbox, OutboxStatus, RefusedRow
from inturn.outbox.scanner import Scanner, ScannerStatistics
from inturn.outbox.table import OutboxSettings
from inturn.producer.producer import Producer, ProducerStatistics
from inturn.producer.send_batch import Kept, SendHandle, Stored
from inturn.producer.send_hook import SendHook, Sending
from inturn.protocol.commands import KeyDescription, KeyDetails, KeyRequest, RequestState, Trial, TrialState
from inturn.security.credentials import token_from_environment
from inturn.security.settings import TlsSettings
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
    "Group",
    "GroupMode",
    "Hook",
    "InturnError",
    "Kept",
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
    "Outbox",
    "OutboxSettings",
    "OutboxStatus",
    "Position",
    "Producer",
    "ProducerSettings",
    "ProducerStatistics",
    "Reader",
    "RefusedRow",
    "RequestState",
    "Result",
    "ResultKind",
    "RetryDelays",
    "Routing",
    "Scanner",
    "ScannerStatistics",
    "SendHandle",
    "SendHook",
    "Sending",
    "Stored",
    "Strategy",
    "Subject",
    "TlsSettings",
    "Trial",
    "TrialState",
    "__version__",
    "connect",
    "errors",
    "slot_of",
    "suspend",
    "token_from_environment",
]
