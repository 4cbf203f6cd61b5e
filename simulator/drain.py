"""Drains under simulation: a lease holder, and claimants that work on slots of its leases, round after round.

A drain has a separate chance: histories without a drain do not change.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from inturn.consumer.claimant import ClaimedPart, ClaimingNode
from inturn.consumer.options import Scope
from inturn.consumer.partition_lease import Stage
from inturn.consumer.run import Run
from inturn.model.errors import GroupConflict, InturnError
from inturn.model.message import Message
from inturn.model.routing import ALL_SLOTS, SLOT_COUNT, SlotSet
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order
from inturn.model.subject import Subject
from inturn.protocol.commands import Answer, Command, Pulled, Reply
from simulator.consumer import SimConsumer, SimRecorder
from simulator.faults import LEASE_LIFE_S
from simulator.network import SimNetwork
from simulator.world import World

if TYPE_CHECKING:
    from simulator.simulation import Simulation

SHARE = 0.23  # of all histories have drains
ROUND_S_MAX = 4.0  # then the rest waits for the next round
CLAIMANTS_MAX = 4
TRIES_MAX = 4


class SimKeeper(SimConsumer):
    """The lease holder of a drain: has no handler."""

    is_sent_home = False

    @property
    def epochs(self) -> dict[int, int]:
        """The epochs of the held leases, by partition."""
        if self.is_over:
            return {}
        return {
            state.index: state.lease.epoch
            for state in self.core.partitions.values()
            if state.lease.stage is Stage.ACTIVE
        }

    def _fail(self, error: InturnError) -> None:
        if not isinstance(error, GroupConflict):
            raise error
        self._coverage["drain.refused, another has taken over"] += 1
        self.is_dead = True


class SimClaimant(SimConsumer):
    """A claimant of a task. Its commands go through the real ClaimingNode."""

    def __init__(
        self,
        world: World,
        network: SimNetwork,
        recorder: SimRecorder,
        coverage: Counter[str],
        subject: Subject,
        group: str,
        name: str,
        settings: ConsumerSettings,
        lease: LeaseSettings,
        handler_s_max: float,
        order: Order,
        parts: Mapping[int, ClaimedPart],
        until: Mapping[int, int],
    ) -> None:
        scope = Scope(until=until)
        super().__init__(
            world, network, recorder, coverage, subject.name, group, name, settings, lease, handler_s_max, order, scope
        )
        self._until = until
        self._node = ClaimingNode(self, subject, parts)
        self.is_sent_home = False

    def submit(self, command: Command, reply: Reply) -> None:
        """The node behind the ClaimingNode."""
        self._network.send(self, command, reply)

    def _send(self, command: Command) -> None:
        # An immediate answer is handled later, as in a real consumer.
        self._node.submit(command, lambda answer: self.later(0.0, partial(self._answered, command, answer)))

    def _answered(self, command: Command, answer: Answer | InturnError) -> None:
        if isinstance(answer, Pulled) and answer.batches:
            until = self._until[command.partition]  # type: ignore[attr-defined]
            headers = [batch.header for batch in answer.batches]
            self._coverage["claim.until inside a batch"] += any(
                header.base_offset < until < header.next_offset for header in headers
            )
        super()._answered(command, answer)

    def _check_bound(self, run: Run, message: Message) -> None:
        """Parked messages may have any offset."""
        partition = run.context.partition
        until = self._until[partition]
        if message.offset >= until and (run.lane is None or run.lane.lot is None):
            self.problems.append(
                f"gone too far: {self.name}, partition {partition} starts offset {message.offset}, "
                f"though it was to work on what is below {until}"
            )

    @property
    def is_through(self) -> bool:
        return self.core.is_stopped or (not self.is_over and self.core.is_through())

    def send_home(self) -> None:
        if not self.is_sent_home:
            self.is_sent_home = True
            self.stop()


@dataclass(slots=True)
class _Task:
    parts: dict[int, ClaimedPart]
    until: dict[int, int]
    tries: list[SimClaimant] = field(default_factory=list)
    is_done: bool = False

    @property
    def is_over(self) -> bool:
        return self.is_done and all(one.is_over for one in self.tries)


@dataclass(slots=True)
class _Round:
    began_s: float
    epochs: dict[int, int]  # of the lease holder, at the plan of the round
    tasks: list[_Task]


class SimDrain:
    """Drains come and go until the world heals; never two at a time, but tasks of the last drain may live on."""

    def __init__(self, sim: Simulation, rng: random.Random) -> None:
        self._sim = sim
        self._world = sim.world
        self._rng = rng
        self._coverage = sim.coverage
        self._keeper: SimKeeper | None = None
        self._round: _Round | None = None
        self._rounds_left = 0
        self._claimants: list[SimClaimant] = []
        self._is_over = False
        self._world.after(rng.uniform(0.1, 2.0), self._begin)

    def end(self) -> None:
        """Stop all drains."""
        self._is_over = True
        self._send_home()
        if self._keeper is not None:
            self._keeper.stop()

    def _begin(self) -> None:
        if self._is_over:
            return
        takes_over = self._rng.random() < 0.6
        self._coverage[f"drain.{'takes over' if takes_over else 'beside others'}"] += 1
        self._keeper = self._sim.add_keeper(takes_over=takes_over)
        self._rounds_left = self._rng.randint(2, 12)
        self._look()

    def _look(self) -> None:
        if self._is_over or self._keeper is None:
            return
        keeper = self._keeper
        if keeper.is_over:
            self._keeper_is_gone(keeper)
            return
        if self._round is not None:
            self._look_at_round(keeper, self._round)
        elif self._rounds_left:
            self._plan(keeper)
        else:
            self._hand_back(keeper)
        self._world.after(self._rng.uniform(0.03, 0.2), self._look)

    def _keeper_is_gone(self, keeper: SimKeeper) -> None:
        """Tasks live on, or not; some time later there is another drain."""
        lives_on = any(not one.is_over for one in self._claimants)
        self._coverage["drain.tasks live on without their keeper"] += lives_on
        self._coverage[f"drain.keeper {'vanished' if keeper.is_dead else 'left'}"] += 1
        if self._rng.random() < 0.5:
            self._send_home()
        self._keeper = self._round = None
        self._world.after(self._rng.uniform(0.1, 1.5), self._begin)

    def _hand_back(self, keeper: SimKeeper) -> None:
        if not keeper.core.is_stopped and not keeper.is_sent_home:
            self._coverage["drain.handed back"] += 1
            keeper.is_sent_home = True
            keeper.stop()

    def _send_home(self) -> None:
        for claimant in self._claimants:
            claimant.send_home()

    # Rounds

    def _plan(self, keeper: SimKeeper) -> None:
        epochs = keeper.epochs
        if not epochs or not self._sim.node.is_up or (len(epochs) < 4 and self._rng.random() < 0.4):
            return
        count = self._rng.randint(1, CLAIMANTS_MAX)
        tasks = [_Task({}, {}) for _ in range(count)]
        for partition, epoch in epochs.items():
            until = self._choose_until(partition)
            for task, slots in zip(self._rng.sample(tasks, count), self._cut(count), strict=False):
                if slots:
                    task.parts[partition] = ClaimedPart(keeper.name, epoch, slots)
                    task.until[partition] = until
        self._round = _Round(self._world.now_s, epochs, [task for task in tasks if task.parts])
        self._coverage["drain.round"] += 1
        for task in self._round.tasks:
            self._try(task)

    def _choose_until(self, partition: int) -> int:
        end_offset = self._sim.end_offset(partition)
        return end_offset if self._rng.random() < 0.5 else max(0, end_offset - self._rng.randint(0, 25))

    def _cut(self, count: int) -> list[SlotSet]:
        """All slots in `count` sets; sets may be left out."""
        if count == 1 or not self._sim.is_ordered_by_key:
            return [ALL_SLOTS]
        if self._rng.random() < 0.5:  # ranges of slots
            cuts = [0, *sorted(self._rng.sample(range(1, SLOT_COUNT), count - 1)), SLOT_COUNT]
            sets = [SlotSet.of(range(cuts[index], cuts[index + 1])) for index in range(count)]
        else:  # scattered slots
            of_slot = [self._rng.randrange(count) for _ in range(SLOT_COUNT)]
            sets = [SlotSet.of(slot for slot in range(SLOT_COUNT) if of_slot[slot] == one) for one in range(count)]
        return [one for one in sets if self._rng.random() < 0.9]

    def _try(self, task: _Task) -> None:
        claimant = self._sim.add_claimant(task.parts, task.until)
        task.tries.append(claimant)
        self._claimants.append(claimant)

    def _look_at_round(self, keeper: SimKeeper, now: _Round) -> None:
        for task in now.tasks:
            self._look_at_task(task)
        if all(task.is_over for task in now.tasks):
            self._coverage["drain.round over"] += 1
            self._end_round()
        elif self._world.now_s - now.began_s > ROUND_S_MAX:
            self._coverage["drain.round given up"] += 1
            self._end_round()
        elif keeper.epochs != now.epochs:
            self._coverage["drain.keeper lost a lease"] += 1
            self._end_round()
        elif self._rng.random() < 0.02:
            self._coverage["drain.keeper crashed amid a round"] += 1
            keeper.die()
            for claimant in self._claimants:
                claimant.is_sluggish = True  # slower than the life of the lease
        elif self._rng.random() < 0.01:
            self._coverage["drain.handed back amid a round"] += 1
            self._rounds_left = 0
            self._round = None  # the tasks are called back
        elif self._rng.random() < 0.02:
            self._coverage["drain.all cut off"] += 1
            self._cut_off(keeper)

    def _cut_off(self, keeper: SimKeeper) -> None:
        """Cut all parts of the drain off for longer than the life of a lease. Bytes in streams arrive later."""
        clients = [keeper, *(one for one in self._claimants if not one.is_over)]
        for client in clients:
            if client.link is None:
                client.is_cut = True
            else:
                client.link.block(to_node=True, to_client=False)
        self._world.after(self._rng.uniform(1.0, 2.0) * LEASE_LIFE_S, partial(self._reconnect, clients))

    def _reconnect(self, clients: list[SimConsumer]) -> None:
        for client in clients:
            client.is_cut = False

    def _end_round(self) -> None:
        self._send_home()
        self._rounds_left -= 1
        self._round = None

    def _look_at_task(self, task: _Task) -> None:
        last = task.tries[-1]
        if task.is_done:
            return
        if any(one.is_through for one in task.tries):
            task.is_done = True
            for one in task.tries:
                one.send_home()
        elif len(task.tries) < TRIES_MAX:
            chance = self._rng.random()
            if last.is_over:
                self._try(task)
            elif chance < 0.02:
                self._coverage["drain.claimant crashed"] += 1
                last.die()
            elif chance < 0.04:
                self._coverage["drain.task begun twice"] += 1
                self._try(task)  # the earlier claimant goes on meanwhile
            elif chance < 0.08:
                self._coverage["drain.claimant frozen"] += 1
                self._freeze(last)
        elif last.is_over:
            task.is_done = True

    def _freeze(self, claimant: SimClaimant) -> None:
        """Freeze the claimant until its claim is over. Copies of earlier requests arrive after the next claim."""
        begin_s, for_s = self._rng.uniform(0.3, 0.6), self._rng.uniform(0.9, 1.1) * LEASE_LIFE_S
        claimant.is_sluggish = True
        network = self._sim.network
        network.repeat = 0.8
        self._world.after(begin_s, lambda: claimant.freeze(for_s))
        self._world.after(begin_s + for_s, lambda: setattr(network, "repeat", 0.0))


def drain_chance(seed: int) -> random.Random | None:
    """The chance of the drains of this history; None without drains."""
    rng = random.Random(f"drain {seed}")
    return rng if rng.random() < SHARE else None
