"""The real node on a simulated disk; process or power can fail at any moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from inturn.log.embedded import EmbeddedEngine
from inturn.model.errors import InturnError, LeaseHeld, StorageError
from inturn.model.settings import LeaseSettings, Limits, LogSettings
from inturn.model.subject import Subject
from inturn.model.time import Timers
from inturn.node.node import InProcessNode
from inturn.protocol.commands import (
    Acquire,
    Answer,
    Append,
    Appended,
    Claim,
    Command,
    Commit,
    Committed,
    CreateSubject,
    Done,
    Granted,
    Leave,
    ProducerOpened,
    Progress,
    Release,
    Renew,
    Renewed,
    Reply,
)
from inturn.protocol.observer import Observer
from inturn.protocol.request import WrappedReply, ask
from inturn.store.database import Database
from simulator.claims import ClaimWatch
from simulator.disk import SimCrash, SimDisk
from simulator.world import World


class SimNode:
    """Commits of the store survive everything; of the logs survives the content that a real disk would keep."""

    def __init__(
        self,
        world: World,
        settings: LogSettings,
        lease: LeaseSettings,
        observer: Observer,
        coverage: Counter[str],
        *,
        sync_s_max: float,
        is_remote: bool,
        on_crash: Callable[[], None],
    ) -> None:
        self._world = world
        self._coverage = coverage
        self._settings = settings
        self._lease = lease
        self._leases = _LeaseWatch(observer)
        self._claims = ClaimWatch(world, coverage, lease.life_s)
        self._sync_s_max = sync_s_max
        self._is_remote = is_remote  # clients outlive the node
        self._on_crash = on_crash
        self.life = 0
        self.disk = SimDisk(world.rng)
        self.database = Database.open(None)
        self.is_up = False
        self.problems: list[str] = []
        self.failure: Exception | None = None  # an internal error while a command of a session ran
        self._gone: set[object] = set()  # closed sessions of this process
        self._producer_epochs: dict[int, int] = {}  # the newest granted epoch
        self.start()

    def start(self) -> None:
        """Recover. If the power fails again or the disk is full, the node stays down until the next try."""
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
        self.node = InProcessNode(self.database, engine, self._world, self._timers, self._lease, self._leases)
        self._gone.clear()
        self._timers.on_earlier = self._schedule_timers
        self._schedule_timers()
        self._coverage["log.torn tail cut"] += self._stored_bytes() < stored_bytes
        self.is_up = True

    def _stored_bytes(self) -> int:
        return sum(self.disk.size(path) for path in self.disk.paths() if path.endswith(".log"))

    def create_subject(self, name: str, partitions: int) -> Subject:
        return ask(self.node, CreateSubject(name, partitions, "slots", "strict", Limits()), Subject)

    def crash(self, *, power: bool) -> None:
        """With `power` all unsynced data is at risk; without `power` only the process is gone."""
        self.life += 1
        self.is_up = False
        self._claims.node_crashed()
        if power:
            self.disk.crash()
        else:
            self.disk.kill()
        self._on_crash()

    @property
    def held_count(self) -> int:
        return self.node.held_count

    def stop_gently(self) -> None:
        self._guard(self.life, self.node.stop_gently)

    def close(self) -> None:
        """Stop gracefully. Connected clients notice only the end."""
        self.life += 1
        try:
            self.node.close()
        except SimCrash:
            self.crash(power=True)
        else:
            self.crash(power=False)

    def submit(self, command: Command, reply: Reply) -> None:
        """No command is answered while the node is down."""
        if self.is_up:
            submit = self.node.submit_remote if self._is_remote else self.node.submit
            watched = _Watched(self, command, self._newest_epoch(command), reply)
            self._leases.stored.clear()
            self._guard(self.life, lambda: submit(command, watched))

    def submit_remote(self, command: Command, reply: Reply) -> None:
        """For sessions."""
        try:
            self.submit(command, reply)
        except Exception as error:
            self.failure = error
            raise

    def watch_gone(self, session: object) -> None:
        """From now on no lease may be granted to this session."""
        self._gone.add(session)

    def hung_up(self, session: object) -> None:
        if self.is_up:
            self._guard(self.life, lambda: self.node.hung_up(session))

    def _newest_epoch(self, command: Command) -> int:
        return self._producer_epochs.get(command.batch.producer_id, 0) if isinstance(command, Append) else 0

    def watch_answer(self, command: Command, newest: int, session: object, answer: Answer | InturnError) -> None:
        """Commands with an old epoch must be refused, and no lease may be granted to a closed session."""
        if isinstance(answer, ProducerOpened):
            self._producer_epochs[answer.producer_id] = answer.epoch
        elif isinstance(command, Append) and isinstance(answer, Appended) and command.batch.producer_epoch < newest:
            batch = command.batch
            self.problems.append(
                f"stored though fenced: producer {batch.producer_id} at epoch {batch.producer_epoch}, "
                f"partition {command.partition}, offset {answer.base_offset}; epoch {newest} had been given out"
            )
        elif isinstance(command, Acquire | Claim) and isinstance(answer, Granted) and session in self._gone:
            self.problems.append(
                f"granted to nobody: partition {command.partition} to {command.member}, whose stream was hung up before"
            )
        elif isinstance(answer, Renewed) and isinstance(command, Renew):
            for partition, epoch in command.held:
                if partition in answer.partitions and self._watch_lease(command, partition, epoch):
                    self._claims.renewed((command.subject, command.group, partition), command.member)
        elif isinstance(answer, Committed) and isinstance(command, Commit):
            for one in command.progress:
                if one.partition in answer.partitions and self._watch_lease(command, one.partition, one.epoch, one.ask):
                    place = command.subject, command.group, one.partition
                    is_stored = place in self._leases.stored
                    self.problems += self._claims.committed(place, command.member, one.number, is_stored=is_stored)
        elif isinstance(command, Claim | Release | Leave):
            self._watch_claims(command, answer)

    def _watch_claims(self, command: Claim | Release | Leave, answer: Answer | InturnError) -> None:
        if isinstance(command, Claim):
            if isinstance(answer, Granted):
                place = command.subject, command.group, command.partition
                self.problems += self._claims.granted(command, answer, self._leases.holders.get(place))
            self._coverage["claim.refused, somebody has it"] += isinstance(answer, LeaseHeld)
        elif isinstance(answer, Done):
            partition = command.partition if isinstance(command, Release) else None
            self._claims.given_back(command.subject, command.group, partition, command.member)
        elif isinstance(command, Release):
            self._coverage["claim.keeps a lease from being released"] += isinstance(answer, LeaseHeld)

    def _watch_lease(self, command: Renew | Commit, partition: int, epoch: int, ask: int | None = None) -> bool:
        """Whether the command came from a claimant, not from the owner of the lease."""
        place = command.subject, command.group, partition
        holder = self._leases.holders.get(place)
        if holder is not None and holder[1] == epoch and self._claims.is_held(place, command.member, epoch, ask):
            return True
        if holder != (command.member, epoch):
            self.problems.append(
                f"{type(command).__name__} taken though the lease is not held: {command.member}, "
                f"partition {partition}, epoch {epoch}; held by {holder}"
            )
        return False

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


class _LeaseWatch:
    """Tracks the owners of leases from the events of the node, and forwards the events."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self.holders: dict[tuple[str, str, int], tuple[str, int]] = {}  # by subject, group and partition: owner, epoch
        self.stored: set[tuple[str, str, int]] = set()  # places where the current command has stored progress

    def lease_granted(self, subject: str, group: str, partition: int, owner: str, epoch: int) -> None:
        self.holders[subject, group, partition] = owner, epoch
        self._observer.lease_granted(subject, group, partition, owner, epoch)

    def lease_ended(self, subject: str, group: str, partition: int, owner: str, epoch: int, why: str) -> None:
        self.holders.pop((subject, group, partition), None)
        self._observer.lease_ended(subject, group, partition, owner, epoch, why)

    def claim_granted(self, subject: str, group: str, partition: int, claimant: str, epoch: int, slots: bytes) -> None:
        self._observer.claim_granted(subject, group, partition, claimant, epoch, slots)

    def claim_ended(self, subject: str, group: str, partition: int, claimant: str, epoch: int) -> None:
        self._observer.claim_ended(subject, group, partition, claimant, epoch)

    def grown(self, subject: Subject) -> None:
        self._observer.grown(subject)

    def committed(self, subject: str, group: str, owner: str, progress: Progress) -> None:
        self.stored.add((subject, group, progress.partition))
        self._observer.committed(subject, group, owner, progress)


class _Watched(WrappedReply):
    """The reply for an answer of the node, dropped if the process of the node is gone by then."""

    __slots__ = ("_command", "_life", "_newest", "_node")

    def __init__(self, node: SimNode, command: Command, newest: int, reply: Reply) -> None:
        super().__init__(reply)
        self._node = node
        self._life = node.life
        self._command = command
        self._newest = newest

    def __call__(self, answer: Answer | InturnError) -> None:
        if self._life == self._node.life:
            self._node.watch_answer(self._command, self._newest, self.session, answer)
            self._reply(answer)
