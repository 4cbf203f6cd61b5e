"""Long polls: commands are held back until an answer exists, or the time of the command is over.

A waiting command has a key: the log, lease, group, request or trials that the command waits for. `WakeUps` wakes
commands by the same keys.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType

from inturn.meta.membership import Membership
from inturn.model.errors import InturnError
from inturn.model.logs import get_logger
from inturn.model.time import Clock, Timer, Timers
from inturn.node.acceptance import NEW_WORK, Try
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Claim,
    Command,
    Fetch,
    FindRequest,
    FindTrial,
    Heartbeat,
    Pull,
    Read,
    Reply,
)
from inturn.store.groups import GroupRecord

_log = get_logger("inturn.node")
WAIT_S_MAX = 60.0


@dataclass(slots=True, eq=False)
class _Held:
    """A waiting command: `key` wakes the command, `expiry` answers the command at the latest."""

    command: Command
    reply: Reply
    key: Hashable
    expiry: Timer | None = None


_Replies = list[tuple[Reply, Answer | InturnError]]


class LongPolls:
    """`answer` is called again at every wake-up. None: no answer yet; not allowed for the last try.

    `due_s` is called whenever a command is held back, also repeatedly. `due_s` returns when the passing of time may
    bring an answer without a wake-up; None: never. Both are called under the lock, replies without the lock. Call all
    methods but `wake` and `close` under the lock, which is the node's.
    """

    def __init__(
        self,
        lock: threading.RLock,
        clock: Clock,
        timers: Timers,
        answer: Callable[[Command, Try], Answer | None],
        due_s: Callable[[Command], float | None],
    ) -> None:
        self.lock = lock
        self._clock = clock
        self._timers = timers
        self._answer = answer
        self._due_s = due_s
        self._held: dict[Hashable, list[_Held]] = defaultdict(list)
        self._times: dict[Hashable, Timer] = {}  # by key

    def hold(self, command: Command, reply: Reply, key: Hashable, wait_s: float) -> None:
        """Hold the command back until `key` is woken and an answer exists, or until `wait_s` is over."""
        held = _Held(command, reply, key)
        at_s = self._clock.monotonic() + min(wait_s, WAIT_S_MAX)
        held.expiry = self._timers.at(at_s, partial(self._expire, held))
        self._hold(held)

    def wake(self, key: Hashable) -> None:
        """Try again to answer the commands with this key."""
        with self.lock:
            replies = self._retry(self._held.pop(key, ()))
        for reply, answer in replies:
            reply(answer)

    def wake_later(self, key: Hashable) -> None:
        """Wake after the present command is answered and the lock is released."""
        if self._held.get(key):  # a later command finds the news at its first try
            self._timers.at(self._clock.monotonic(), partial(self.wake, key))

    def wake_at(self, key: Hashable, at_s: float) -> None:
        """Wake at this time, or at an earlier time set before."""
        timer = self._times.get(key)
        if timer is not None:
            if timer.at_s <= at_s:
                return
            timer.cancel()
        self._times[key] = self._timers.at(at_s, partial(self._time_came, key))

    def keys(self, kinds: type[Command] | UnionType) -> list[Hashable]:
        """The keys of waiting commands of these kinds."""
        return [key for key, waiting in self._held.items() if any(isinstance(one.command, kinds) for one in waiting)]

    def counts(self) -> dict[str, int]:
        """The number of waiting commands, by the name of their kind."""
        return Counter(type(one.command).__name__ for waiting in self._held.values() for one in waiting)

    def dismiss(self, is_gone: Callable[[Command], bool], error: Callable[[Command], InturnError]) -> None:
        """Answer these waiting commands with their errors."""
        for waiting in self._held.values():
            gone = [one for one in waiting if is_gone(one.command)]
            waiting[:] = [one for one in waiting if one not in gone]
            for one in gone:
                if one.expiry is not None:
                    one.expiry.cancel()
                self._timers.at(self._clock.monotonic(), partial(one.reply, error(one.command)))

    def abandon(self, is_gone: Callable[[Reply], bool]) -> None:
        """Drop waiting commands whose replies lead nowhere any more: such a command must not be answered later."""
        for waiting in self._held.values():
            for one in waiting:
                if is_gone(one.reply) and one.expiry is not None:
                    one.expiry.cancel()
            waiting[:] = [one for one in waiting if not is_gone(one.reply)]
        for key in [key for key, waiting in self._held.items() if not waiting]:
            del self._held[key]

    def close(self, error: Callable[[], InturnError]) -> None:
        """Answer all waiting commands with an error."""
        with self.lock:
            held = [one for waiting in self._held.values() for one in waiting]
            self._held.clear()
        for one in held:
            one.reply(error())

    def _hold(self, held: _Held) -> None:
        self._held[held.key].append(held)
        at_s = self._due_s(held.command)
        if at_s is not None:
            self.wake_at(held.key, at_s)

    def _time_came(self, key: Hashable) -> None:
        with self.lock:
            self._times.pop(key, None)
        self.wake(key)

    def _retry(self, waiting: Sequence[_Held]) -> _Replies:
        replies: _Replies = []
        for held in waiting:
            answer = self._answer_or_error(held.command, Try.AGAIN)
            if answer is None:
                self._hold(held)
                continue
            if held.expiry is not None:
                held.expiry.cancel()
            replies.append((held.reply, answer))
        return replies

    def _expire(self, held: _Held) -> None:
        with self.lock:
            waiting = self._held.get(held.key, [])
            if held not in waiting:
                return
            waiting.remove(held)
            answer = self._answer_or_error(held.command, Try.LAST)
        assert answer is not None
        held.reply(answer)

    def _answer_or_error(self, command: Command, attempt: Try) -> Answer | InturnError | None:
        """An exception is the answer to this command, and does not stop the answers to other commands."""
        try:
            return self._answer(command, attempt)
        except InturnError as error:
            return error
        except Exception as error:
            _log.exception("node.command_failed", command=type(command).__name__)
            return InturnError(f"{type(command).__name__} failed: {error!r}")


def waits_for(command: Command) -> Hashable:
    """The key of a waiting command. `WakeUps` wakes by the same keys."""
    match command:
        case Pull() | Read() | Fetch():
            return of_log(command.subject, command.partition)
        case Acquire() | Claim():
            return of_lease(command.subject, command.group, command.partition)
        case Heartbeat():
            return _of_members(command.subject, command.group)
        case FindRequest():
            return _of_request(command.subject, command.group, command.id)
        case FindTrial():
            return _of_trials(command.subject, command.group)
    raise TypeError(f"{type(command).__name__} is never held back")


def of_log(subject: str, partition: int) -> Hashable:
    return "log", subject, partition


def of_lease(subject: str, group: str, partition: int) -> Hashable:
    return "lease", subject, group, partition


def _of_members(subject: str, group: str) -> Hashable:
    return "group", subject, group


def _of_request(subject: str, group: str, request_id: int) -> Hashable:
    return "request", subject, group, request_id


def _of_trials(subject: str, group: str) -> Hashable:
    return "trial", subject, group


class WakeUps:
    """Wakes waiting commands after the present command. Call under the node's lock."""

    def __init__(self, held: LongPolls, membership: Membership) -> None:
        self._held = held
        self._membership = membership

    def announce(self, group: GroupRecord) -> None:
        """Notify all members of the group: the answers to waiting heartbeats have news."""
        self._membership.announce(group)
        self.members(group)

    def members(self, group: GroupRecord) -> None:
        self._held.wake_later(_of_members(group.subject, group.name))

    def log(self, subject: str, partition: int) -> None:
        self._held.wake_later(of_log(subject, partition))

    def lease(self, subject: str, group: str, partition: int) -> None:
        self._held.wake_later(of_lease(subject, group, partition))

    def requests(self, subject: str, group: str, request_ids: Iterable[int]) -> None:
        """Wake operators that wait for key requests."""
        for request_id in request_ids:
            self._held.wake_later(_of_request(subject, group, request_id))

    def trials(self, group: GroupRecord) -> None:
        self._held.wake_later(_of_trials(group.subject, group.name))

    def new_work(self) -> None:
        """Wake all commands that wait for new work: the node may refuse new work now."""
        for key in self._held.keys(NEW_WORK):
            self._held.wake_later(key)
