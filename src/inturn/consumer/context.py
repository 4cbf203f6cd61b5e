"""The context that a handler gets with a message, and hooks around handler calls: for tracing, metrics, context
variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inturn.model.message import Message
from inturn.model.result import ResultKind


@dataclass(slots=True)
class Context:
    """One object per run of a partition, valid only during the call of the handler.

    `epoch` rises whenever the partition changes its holder. Pass `epoch` to the systems that the handler writes to, and
    let them refuse lower epochs: then a handler that still runs after its lease was lost does no harm. In a shared
    group, `epoch` rises when the node has forgotten its deliveries, and `attempt` counts the deliveries of the message.
    """

    subject: str
    group: str
    partition: int
    consumer: str
    epoch: int
    attempt: int = 1  # counts from 1 per message
    is_acknowledged: bool = False
    # A call by request (`Group.try_message`): out of turn, without a lease, and so with epoch 0.
    is_direct: bool = False

    def ack(self) -> None:
        """With `ack="manual"`: this message and all messages before are finished."""
        self.is_acknowledged = True


class Hook:
    """Override the methods you need. Called in the worker's thread, right before and after the handler.

    `after` also runs when the handler raised; `error` is then the exception. An exception in a hook is logged and
    changes nothing.
    """

    def before(self, messages: Sequence[Message], context: Context) -> None:
        pass

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        pass
