"""The real node on a simulated disk, that can lose its process or its power at any moment, and its network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from inturn.log.embedded import EmbeddedEngine
from inturn.model.commands import Answer, Append, Appended, Command, CreateSubject, ProducerOpened, Reply
from inturn.model.errors import InturnError, StorageError
from inturn.model.observer import Observer
from inturn.model.request import ask
from inturn.model.settings import LeaseSettings, Limits, LogSettings
from inturn.model.subject import Subject
from inturn.model.timers import Timers
from inturn.node import InProcessNode
from inturn.state.database import Database
from inturn.testing.sim_disk import SimCrash, SimDisk
from inturn.testing.world import World


class SimNode:
    """What is committed in the database survives everything; of the logs survives what a real disk would keep."""

    def __init__(
        self,
        world: World,
        settings: LogSettings,
        lease: LeaseSettings,
        observer: Observer,
        coverage: Counter[str],
        *,
        sync_s_max: float,
        local: bool,
        on_crash: Callable[[], None],
    ) -> None:
        self._world = world
        self._coverage = coverage
        self._settings = settings
        self._lease = lease
        self._observer = observer
        self._sync_s_max = sync_s_max
        self._local = local
        self._on_crash = on_crash
        self.life = 0
        self.disk = SimDisk(world.rng)
        self.database = Database.open(None)
        self.is_up = False
        self.problems: list[str] = []
        self._producer_epochs: dict[int, int] = {}  # the newest that was given out
        self.start()

    def start(self) -> None:
        """Recover. The power may go again meanwhile, or the disk be full: then it stays down until the next try."""
        try:
            self._start()
        except SimCrash:
            self.crash(power=True)
        except (OSError, StorageError):
            self.crash(power=False)

    def _start(self) -> None:
        self.life += 1
        stored_bytes = self._stored_bytes()
        self._timers = Timers()
        engine = EmbeddedEngine(
            "log", self._settings, self._timers, clock=self._world, disk=self.disk, submit=self._run_soon
        )
        self.node = InProcessNode(
            self.database, engine, self._world, self._timers, self._lease, self._observer, local=self._local
        )
        self._timers.on_earlier = self._schedule_timers
        self._schedule_timers()
        self._coverage["log.torn tail cut"] += self._stored_bytes() < stored_bytes
        self.is_up = True

    def _stored_bytes(self) -> int:
        return sum(self.disk.size(path) for path in self.disk.paths() if path.endswith(".log"))

    def create_subject(self, name: str, partitions: int) -> Subject:
        return ask(self.node, CreateSubject(name, partitions, "slots", "strict", Limits()), Subject)

    def crash(self, *, power: bool) -> None:
        """With `power` everything that was not synced is at risk; without it only the process is gone."""
        self.life += 1
        self.is_up = False
        if power:
            self.disk.crash()
        else:
            self.disk.kill()
        self._on_crash()

    def submit(self, command: Command, reply: Reply) -> None:
        """Nobody answers while it is down."""
        if self.is_up:
            life = self.life
            watched = partial(self._watch_fencing, command, self._newest_epoch(command), reply)
            self._guard(life, lambda: self.node.submit(command, partial(self._reply, life, watched)))

    def _reply(self, life: int, reply: Reply, answer: Answer | InturnError) -> None:
        if life == self.life:
            reply(answer)

    def _newest_epoch(self, command: Command) -> int:
        return self._producer_epochs.get(command.batch.producer_id, 0) if isinstance(command, Append) else 0

    def _watch_fencing(self, command: Command, newest: int, reply: Reply, answer: Answer | InturnError) -> None:
        """What comes with an older epoch than was given out before must be refused."""
        if isinstance(answer, ProducerOpened):
            self._producer_epochs[answer.producer_id] = answer.epoch
        elif isinstance(command, Append) and isinstance(answer, Appended) and command.batch.producer_epoch < newest:
            batch = command.batch
            self.problems.append(
                f"stored though fenced: producer {batch.producer_id} at epoch {batch.producer_epoch}, "
                f"partition {command.partition}, offset {answer.base_offset}; epoch {newest} had been given out"
            )
        reply(answer)

    def _run_soon(self, job: Callable[[], None]) -> None:
        life = self.life
        self._world.after(self._world.spread(0.0005, self._sync_s_max), lambda: self._guard(life, job))

    def _schedule_timers(self) -> None:
        due_s = self._timers.next_due_s()
        if due_s is not None:
            life = self.life
            delay_s = max(0.0, due_s - self._world.now_s)
            self._world.after(delay_s, lambda: self._guard(life, self._run_timers))

    def _run_timers(self) -> None:
        self._timers.run_due(self._world.now_s)
        self._schedule_timers()

    def _guard(self, life: int, job: Callable[[], None]) -> None:
        if life != self.life:
            return
        try:
            job()
        except SimCrash:
            self.crash(power=True)


class SimClient:
    """Something at the other end of the network: it can die, freeze, and be cut off."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.is_dead = False
        self.is_cut = False
        self._is_frozen = False
        self._missed: list[Callable[[], None]] = []
        self.sent_until_s = 0.0
        self.answered_until_s = 0.0

    def freeze(self, for_s: float) -> None:
        self._is_frozen = True
        self.world.after(for_s, self.thaw)

    def thaw(self) -> None:
        """Everything that should have happened meanwhile happens now, late, in its order."""
        self._is_frozen = False
        missed, self._missed = self._missed, []
        for action in missed:
            self.do(action)

    def do(self, action: Callable[[], None]) -> None:
        if self._is_frozen:
            self._missed.append(action)
        elif not self.is_dead:
            action()

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        self.world.after(delay_s, lambda: self.do(action))


class SimNetwork:
    """Streams between clients and the node: in order, unless something is lost and sent again."""

    def __init__(self, world: World, node: SimNode, coverage: Counter[str]) -> None:
        self._world = world
        self._node = node
        self._coverage = coverage
        self.request_loss = 0.0
        self.answer_loss = 0.0
        self.repeat = 0.0
        self.delay_s_max = 0.003

    def heal(self) -> None:
        self.request_loss = self.answer_loss = self.repeat = 0.0
        self.delay_s_max = 0.003

    def send(self, client: SimClient, command: Command, reply: Reply) -> None:
        world = self._world
        if client.is_cut or world.happens(self.request_loss):
            self._coverage["network.request lost"] += 1
            return
        at_s = max(client.sent_until_s, world.now_s + world.spread(0.0002, self.delay_s_max))
        client.sent_until_s = at_s
        deliver = partial(self._deliver, client, command, reply)
        world.after(at_s - world.now_s, deliver)
        if world.happens(self.repeat):
            self._coverage["network.request repeated"] += 1
            # Late enough to reach another process of the node.
            world.after(at_s - world.now_s + world.spread(0.0, 6.0), deliver)

    def _deliver(self, client: SimClient, command: Command, reply: Reply) -> None:
        self._node.submit(command, partial(self._answer, client, reply))

    def _answer(self, client: SimClient, reply: Reply, answer: Answer | InturnError) -> None:
        if isinstance(answer, InturnError):
            self._coverage[f"error.{type(answer).__name__}"] += 1
        world = self._world
        if client.is_cut or client.is_dead or world.happens(self.answer_loss):
            self._coverage["network.answer lost"] += 1
            return
        at_s = max(client.answered_until_s, world.now_s + world.spread(0.0002, self.delay_s_max))
        client.answered_until_s = at_s
        client.later(at_s - world.now_s, lambda: reply(answer))
