"""Methods of the connection that `mq.group(subject, name)` replaces. They stay for one version, with a warning."""

from __future__ import annotations

import functools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import datetime
from typing import ParamSpec, TypedDict, TypeVar, Unpack

from inturn.client.dead_letters import DeadLetters
from inturn.client.group import Group
from inturn.model.message import Message
from inturn.model.offsets import Position
from inturn.model.settings import Order
from inturn.protocol.commands import GroupDescription, KeyDescription, KeyDetails, RequestState, TrialState

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


class KeyRequestOptions(TypedDict, total=False):
    """Options of `Group.park` and `Group.resume`."""

    by: str | None  # who asks; user@host by default
    why: str  # the reason, for the record
    partition: int | None  # needed only where senders choose the partition
    wait_s: float  # how long to wait for the consumer


class SkipOptions(KeyRequestOptions, total=False):
    """Options of `Group.skip`."""

    offset: int | None  # the message to drop


def warn_deprecated(method: Callable[..., object], stacklevel: int) -> None:
    """Emit the DeprecationWarning of a method whose docstring begins with "Deprecated: use …"."""
    text = (method.__doc__ or "").partition("\n")[0].removeprefix("Deprecated: ").replace("`", "")
    warnings.warn(f"{method.__name__} is deprecated: {text}", DeprecationWarning, stacklevel=stacklevel + 1)


def _deprecated(method: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    @functools.wraps(method)
    def warned(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        warn_deprecated(method, stacklevel=2)
        return method(*args, **kwargs)

    return warned


class DeprecatedGroupMethods(ABC):
    """Base class of `Connection`. `__wrapped__` of every method is the method without the warning."""

    @abstractmethod
    def group(self, subject: str, name: str) -> Group: ...

    @_deprecated
    def describe_group(self, subject: str, group: str) -> GroupDescription:
        """Deprecated: use `mq.group(subject, name).describe()`."""
        return self.group(subject, group).describe()

    @_deprecated
    def reset_group(self, subject: str, group: str, position: str | int | datetime | Position) -> None:
        """Deprecated: use `mq.group(subject, name).reset(position)`."""
        self.group(subject, group).reset(position)

    @_deprecated
    def set_order(self, subject: str, group: str, order: Order | str | None) -> None:
        """Deprecated: use `mq.group(subject, name).set_order(order)`."""
        self.group(subject, group).set_order(order)

    @_deprecated
    def consume_directly(
        self, subject: str, group: str, member: str, partition: int, offset: int, *, timeout_s: float = 30.0
    ) -> TrialState:
        """Deprecated: use `mq.group(subject, name).try_message(member, partition, offset)`."""
        return self.group(subject, group).try_message(member, partition, offset, timeout_s=timeout_s)

    @_deprecated
    def keys(self, subject: str, group: str) -> list[KeyDescription]:
        """Deprecated: use `mq.group(subject, name).keys()`."""
        return self.group(subject, group).keys()

    @_deprecated
    def describe_key(self, subject: str, group: str, key: str | bytes) -> KeyDetails:
        """Deprecated: use `mq.group(subject, name).describe_key(key)`."""
        return self.group(subject, group).describe_key(key)

    @_deprecated
    def key_head(self, subject: str, group: str, key: str | bytes) -> Message | None:
        """Deprecated: use `mq.group(subject, name).key_head(key)`."""
        return self.group(subject, group).key_head(key)

    @_deprecated
    def head_of(self, subject: str, details: KeyDetails) -> Message | None:
        """Deprecated: use `mq.group(subject, name).head_of(details)`."""
        return self.group(subject, "").head_of(details)

    @_deprecated
    def park_key(
        self, subject: str, group: str, key: str | bytes, **options: Unpack[KeyRequestOptions]
    ) -> RequestState:
        """Deprecated: use `mq.group(subject, name).park(key)`."""
        return self.group(subject, group).park(key, **options)

    @_deprecated
    def resume_key(
        self, subject: str, group: str, key: str | bytes, **options: Unpack[KeyRequestOptions]
    ) -> RequestState:
        """Deprecated: use `mq.group(subject, name).resume(key)`."""
        return self.group(subject, group).resume(key, **options)

    @_deprecated
    def skip_key(self, subject: str, group: str, key: str | bytes, **options: Unpack[SkipOptions]) -> RequestState:
        """Deprecated: use `mq.group(subject, name).skip(key)`."""
        return self.group(subject, group).skip(key, **options)

    @_deprecated
    def dead_letters(self, subject: str, group: str) -> DeadLetters:
        """Deprecated: use `mq.group(subject, name).dead_letters()`."""
        return self.group(subject, group).dead_letters()
