"""What a handler is told beside the message.

Hooks around handling: for tracing, metrics, context variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inturn.model.message import Message
from inturn.model.result import ResultKind


@dataclass(slots=True)
class Context:
    """One per run of a partition: valid during the call of the handler only.

    `epoch` rises whenever the partition changes hands. Give it to whatever you write to, and let that refuse lower
    ones: so a handler that ran on after its lease was lost cannot do harm. In a shared group it rises when the node has
    forgotten what it gave out, and `attempt` counts how often the message was given out.
    """

    subject: str
    group: str
    partition: int
    consumer: str
    epoch: int
    attempt: int = 1  # counts from 1 for each message
    is_acknowledged: bool = False
    # Somebody asked for this very call (`Group.try_message`): out of turn, without a lease, and so with epoch 0.
    is_direct: bool = False

    def ack(self) -> None:
        """With `ack="manual"`: this message and all before it are done."""
        self.is_acknowledged = True


class Hook:
    """Override what you need. Called in the worker's thread, right before and after the handler.

    `after` runs even when the handler raised; `error` is then what it raised. An exception in a hook is logged and
    changes nothing.
    """

    def before(self, messages: Sequence[Message], context: Context) -> None:
        pass

    def after(
        self, messages: Sequence[Message], context: Context, kind: ResultKind, error: BaseException | None
    ) -> None:
        pass
