"""Hooks around sending: for tracing, metrics, and properties of every message."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from inturn.model.logs import get_logger
from inturn.producer.send_batch import SendHandle, Stored

_log = get_logger("inturn.producer")


@dataclass(slots=True)
class Sending:
    """A message before queueing. Hooks may add `properties`; all other fields are for information."""

    subject: str
    body: bytes
    key: str | bytes | None
    tags: tuple[str, ...]
    properties: dict[str, str]
    message_id: str | None
    producer: str | None  # its name


class SendHook:
    """Called around every message of a producer. Override the methods you need.

    `before_send` is called in the sender's thread, before the message is queued. The result is passed to `after_send`,
    which is called once the message is stored or has failed, for one message after the other, in a thread that sends:
    the hook may use the producer, and delays sending while running. `close` returns after the last call. An exception
    in a hook is logged and changes nothing. Properties of a hook that cannot be sent, or would make the message too
    large, are left out.
    """

    def before_send(self, sending: Sending) -> object:
        return None

    def after_send(self, begun: object, stored: Stored | None, error: BaseException | None) -> None:
        pass


class _Begun:
    """The results of `before_send` for one message."""

    __slots__ = ("results",)

    def __init__(self, results: list[tuple[SendHook, object]]) -> None:
        self.results = results


class HookedSends:
    """Calls the hooks of a producer.

    Finished messages are recorded under the producer's lock. `tell` calls the hooks and must be called without the
    lock, so that a hook may take time and use the producer.
    """

    def __init__(self, hooks: Sequence[SendHook]) -> None:
        self._hooks = tuple(hooks)
        self._ended: deque[tuple[_Begun, SendHandle]] = deque()
        self._telling = threading.Lock()
        self._teller: int | None = None  # the thread that calls hooks now

    @property
    def has_ended(self) -> bool:
        """Finished messages wait for `tell`."""
        return bool(self._ended)

    def before(self, sending: Sending) -> _Begun:
        results = []
        for hook in self._hooks:
            try:
                results.append((hook, hook.before_send(sending)))
            except Exception as error:
                _log.error("producer.hook_failed", hook=type(hook).__qualname__, error=repr(error))
        return _Begun(results)

    def follow(self, begun: _Begun, handle: SendHandle) -> None:
        """The message is queued: call `after_send` once the message is over."""
        handle.when_done(lambda: self._ended.append((begun, handle)))
        self.tell()

    def tell(self, *, waits: bool = False) -> None:
        """Call `after_send` for finished messages, in one thread at a time.

        If another thread is calling, that thread also calls for the rest, and this call returns at once unless `waits`.
        """
        if self._teller == threading.get_ident():
            return  # a hook uses the producer: the outer call continues afterwards
        while (waits or self._ended) and self._telling.acquire(blocking=waits):
            waits = False
            self._teller = threading.get_ident()
            try:
                while self._ended:
                    begun, handle = self._ended.popleft()
                    error = handle.error
                    self.after(begun, handle.result(0) if error is None else None, error)
            finally:
                self._teller = None
                self._telling.release()

    def after(self, begun: _Begun, stored: Stored | None, error: BaseException | None) -> None:
        for hook, result in reversed(begun.results):
            try:
                hook.after_send(result, stored, error)
            except Exception as failed:
                _log.error("producer.hook_failed", hook=type(hook).__qualname__, error=repr(failed))
