"""Members that go: they say so, their stream is lost, or they are silent for too long."""

from __future__ import annotations

from types import UnionType

from inturn.broker.broker import Broker
from inturn.meta.membership import Membership
from inturn.model.clock import Clock
from inturn.model.commands import Acquire, Answer, Claim, Command, Done, Fetch, Heartbeat, Leave, Pull
from inturn.model.errors import LeaseHeld
from inturn.model.timers import Timer, Timers
from inturn.node.answering import AnswerTable, Try
from inturn.node.intake import Intake
from inturn.node.known import Known
from inturn.node.long_polls import LongPolls
from inturn.node.waking import Waking

_OF_MEMBER = Acquire | Claim | Pull | Heartbeat | Fetch
COME_BACK_S = 1.0  # a member whose stream was lost has so long to be heard again before others are asked


class LeavingCommands:
    """It keeps the watch, too. Call it under the node's lock."""

    def __init__(
        self,
        known: Known,
        membership: Membership,
        broker: Broker,
        held: LongPolls,
        wake: Waking,
        intake: Intake,
        clock: Clock,
        timers: Timers,
    ) -> None:
        self._known = known
        self._membership = membership
        self._broker = broker
        self._held = held
        self._wake = wake
        self._intake = intake
        self._clock = clock
        self._timers = timers
        self._watch_timer: Timer | None = None
        self._spoke_through: dict[Leave, object] = {}  # the stream that a member in another process was last heard on

    @property
    def answers(self) -> AnswerTable:
        return {Leave: self.leave}

    def leave(self, command: Leave, _: Try = Try.FIRST) -> Answer:
        group = self._known.group(command.subject, command.group)
        if self._membership.leave(group, self._known.subject(command.subject), command.member):
            self._wake.members(group)
            self._wake.trials(group)
        self._forget(command, _OF_MEMBER)
        for partition in self._broker.sharing.leave(group, command.member):
            self._wake.log(command.subject, partition)
        claims = self._broker.claims
        released = claims.release_all(group, command.member)
        released += self._broker.leases.release_all(
            group, command.member, lambda key: bool(claims.live(key)) or claims.may_be_forgotten(key)
        )
        for partition in released:
            self._wake.lease(command.subject, command.group, partition)
        return Done()

    def _forget(self, leave: Leave, kinds: type[Command] | UnionType) -> None:
        """Nothing of these kinds is held back any more for a member that left; it is answered with LeaseHeld."""
        self._spoke_through.pop(leave, None)
        self._broker.leases.remote.discard(leave.member)

        def left(command: Command) -> LeaseHeld:
            return LeaseHeld(leave.group, str(getattr(command, "partition", "")), "nobody: the member left")

        self._held.dismiss(lambda command: isinstance(command, kinds) and _is_of(command, leave), left)

    # Streams

    def note_stream(self, command: Heartbeat, session: object) -> None:
        """Through which stream a member speaks; nothing of one that was refused."""
        group = self._known.groups.get((command.subject, command.group))
        if group is not None and self._membership.is_member(group, command.member):
            self._spoke_through[Leave(command.subject, command.group, command.member)] = session

    def hung_up(self, session: object) -> None:
        """The members of a lost stream keep their leases for as long as these live, but are counted out unless they
        are heard again soon."""
        for one in [member for member, through in self._spoke_through.items() if through is session]:
            del self._spoke_through[one]
            group = self._known.groups.get((one.subject, one.group))
            if group is not None:
                self._membership.hasten(group, one.member, COME_BACK_S)
        self._end_watch()
        self.watch()

    # The watch

    def watch(self) -> None:
        """Look at all groups every third of a lease's life, and at the moment when somebody is silent for too long."""
        if self._watch_timer is None:
            deadline_s = self._membership.next_deadline_s()
            if deadline_s is not None:
                at_s = min(deadline_s, self._clock.monotonic() + self._broker.leases.life_s / 3)
                self._watch_timer = self._timers.at(at_s, self._look_at_members)

    def _end_watch(self) -> None:
        if self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None

    def _look_at_members(self) -> None:
        with self._held.lock:
            self._end_watch()  # it may be a newer one than the one that called this
            if self._intake.is_closed:
                return
            for group, member in self._membership.silent(self._clock.monotonic()):
                self._membership.leave(group, self._known.subject(group.subject), member)
                # If it lives on, it asks again. If not, nothing is to be granted to it.
                self._forget(Leave(group.subject, group.name, member), Acquire)
                self._broker.sharing.forget_member(group, member)
                self._wake.members(group)
                self._wake.trials(group)
            for group in self._membership.groups():
                if self._membership.reassign(group, self._known.subject(group.subject)):
                    self._wake.members(group)
            self.watch()


def _is_of(command: Command, leave: Leave) -> bool:
    """Whether the command came from the member that leaves."""
    if not isinstance(command, _OF_MEMBER):
        return False
    return (command.subject, command.group, command.member) == (leave.subject, leave.group, leave.member)
