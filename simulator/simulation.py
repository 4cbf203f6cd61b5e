"""Seeded histories: the real node, producers and consumers in virtual time, with faults, judged by the checker.

    report = simulate(seed=7)
    assert report.ok, report

The same seed gives the same history. A history has at least 3 consumers, 4 partitions, 500 messages and 5 faults; then
all faults heal, and all acknowledged messages must be handled, in order. At the end the power fails once more:
acknowledged messages must still be there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from inturn.consumer.claimant import ClaimedPart
from inturn.consumer.options import Scope
from inturn.model.errors import NotFound
from inturn.model.settings import Order
from inturn.model.subject import Subject
from inturn.protocol.commands import DescribeGroup, GroupDescription, OpenDeadLetters
from inturn.protocol.request import ask
from inturn.testing.checker import Verdict
from inturn.testing.history import History
from inturn.transport.client_stream import StreamSettings
from inturn.transport.server_session import ServerSettings
from simulator.aftermath import Aftermath
from simulator.consumer import SimConsumer, SimRecorder
from simulator.drain import SimClaimant, SimDrain, SimKeeper, drain_chance
from simulator.faults import FAULTS, LEASE_LIFE_S, OF_COMMANDS, OF_STREAMS
from simulator.network import SimNetwork
from simulator.node import SimNode
from simulator.producer import SimProducer
from simulator.server import SimServer
from simulator.settings import GROUP, SUBJECT, choose_settings, quick_chance, tags_chance
from simulator.stream import Weather
from simulator.workload import SimGrowth, SimOperator, SimTraffic, growth_chance
from simulator.world import SimClient, World

PARTITIONS = 4
CONSUMERS = 3
FAULTS_MIN = 5
KEYS = 12
TROUBLE_S = 10.0  # faults happen until then
PATIENCE_S = 120.0  # after healing all messages must be finished within this time
WRITER = "ledger"


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a history. `problems` is empty if the contract held."""

    seed: int
    verdict: Verdict
    problems: list[str]
    faults: list[str]
    coverage: Counter[str]
    history: History
    seconds: float  # virtual

    @property
    def ok(self) -> bool:
        return not self.problems

    def __str__(self) -> str:
        lines = [f"seed {self.seed}: {'ok' if self.ok else 'BAD'}, faults: {', '.join(self.faults)}"]
        return "\n".join([*lines, *self.problems[:20]])


class Simulation:
    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.world = world = World(seed)
        rng = world.rng
        self.coverage: Counter[str] = Counter()
        self.faults: list[str] = []
        self.recorder = SimRecorder(world)
        tags = tags_chance(seed)
        self.settings = settings = choose_settings(rng, has_tags=tags is not None)
        self.coverage.update(f"setting.{name}" for name in settings.names())
        self.node = SimNode(
            world,
            settings.log,
            settings.lease,
            self.recorder,
            self.coverage,
            sync_s_max=settings.sync_s_max,
            is_remote=not settings.is_local,
            on_crash=self._node_crashed,
        )
        self.network = self._new_network()
        self.subject = self.node.create_subject(SUBJECT, PARTITIONS)
        ask(self.node.node, OpenDeadLetters(SUBJECT, GROUP), Subject)
        keys = [f"order-{number}".encode() for number in range(rng.choice((KEYS, KEYS, 5 * KEYS)))]
        self._names = 0
        self._quick = quick_chance(seed)
        self.is_healing = False
        self.consumers: list[SimConsumer] = []
        self.producers: list[SimProducer] = []
        for _ in range(CONSUMERS):
            world.after(world.spread(0.0, 1.0), self.add_consumer)
        self.add_producer()
        self.add_producer()
        self.add_producer(writer=WRITER)
        self._traffic = SimTraffic(self, keys, tags)
        self._operator = SimOperator(self, keys)
        self._plan_faults()
        grows = growth_chance(seed)
        self._growth = None if grows is None else SimGrowth(self, grows, TROUBLE_S)
        chance = drain_chance(seed)
        self._drain = None if chance is None else SimDrain(self, chance)

    def _new_network(self) -> SimNetwork:
        weather = Weather()
        if not self.has_streams:
            return SimNetwork(self.world, self.node, self.coverage, weather)
        rng = self.world.rng
        # With a low limit of unanswered commands sessions make clients wait now and then.
        settings = ServerSettings(unanswered_count=rng.choice((65_536, 65_536, 6)), silence_s=2 * LEASE_LIFE_S)
        self._server = SimServer(self.world, self.node, self.settings.lease, settings, weather, self.coverage)
        links = StreamSettings(dial_timeout_s=0.5, backoff_max_s=0.5, ping_s=0.3, silence_s=rng.choice((0.8, 2.5)))
        return SimNetwork(self.world, self.node, self.coverage, weather, self._server, links)

    def _plan_faults(self) -> None:
        rng, world = self.world.rng, self.world
        impossible = OF_COMMANDS if self.has_streams else OF_STREAMS
        self.possible_faults = [name for name in FAULTS if name not in impossible]
        for _ in range(rng.randint(FAULTS_MIN, FAULTS_MIN + 4)):
            if self.possible_faults:
                name = rng.choice(self.possible_faults)
                world.after(world.spread(0.5, TROUBLE_S), partial(self._inject, name))

    def _inject(self, name: str) -> None:
        self.faults.append(name)
        self.coverage[f"fault.{name}"] += 1
        FAULTS[name](self)

    # What faults act upon

    @property
    def has_streams(self) -> bool:
        return self.settings.has_streams

    @property
    def loses_power(self) -> bool:
        return self.settings.loses_power

    @property
    def is_ordered_by_key(self) -> bool:
        return self.settings.order is Order.KEY

    def end_offset(self, partition: int) -> int:
        return self.node.node.broker.log(self.subject, partition).end_offset

    def pick_consumer(self) -> SimConsumer:
        alive = [consumer for consumer in self.consumers if not consumer.is_over]
        return self.world.rng.choice(alive) if alive else self.add_consumer()

    def pick_producer(self) -> SimProducer:
        return self.world.rng.choice(self.producers)

    def pick_clients(self, count: int) -> list[SimClient]:
        """Consumers and producers that live."""
        alive = [one for one in (*self.consumers, *self.producers) if not one.is_dead]
        return self.world.rng.sample(alive, min(count, len(alive)))

    def add_consumer(self) -> SimConsumer:
        consumer = SimConsumer(
            self.world,
            self.network,
            self.recorder,
            self.coverage,
            SUBJECT,
            GROUP,
            self._name("consumer"),
            self.settings.consumer,
            self.settings.lease,
            self.settings.handler_s_max,
            self.settings.order,
        )
        consumer.is_calm = self.is_healing
        consumer.quick = self._quick
        self.consumers.append(consumer)
        return consumer

    def add_keeper(self, *, takes_over: bool) -> SimKeeper:
        keeper = SimKeeper(
            self.world,
            self.network,
            self.recorder,
            self.coverage,
            SUBJECT,
            GROUP,
            self._name("keeper"),
            self.settings.consumer,
            self.settings.lease,
            self.settings.handler_s_max,
            self.settings.order,
            Scope(keeps_only=True, takes_over=takes_over),
        )
        self.consumers.append(keeper)
        return keeper

    def add_claimant(self, parts: Mapping[int, ClaimedPart], until: Mapping[int, int]) -> SimClaimant:
        claimant = SimClaimant(
            self.world,
            self.network,
            self.recorder,
            self.coverage,
            self.subject,
            GROUP,
            self._name("claimant"),
            self.settings.consumer,
            self.settings.lease,
            self.settings.handler_s_max,
            self.settings.order,
            parts,
            until,
        )
        claimant.quick = self._quick
        self.consumers.append(claimant)
        return claimant

    def add_producer(self, writer: str | None = None) -> SimProducer:
        producer = SimProducer(
            self.world,
            self.network,
            self.recorder,
            self.subject,
            self._name(writer or "producer"),
            self.settings.producer,
            writer=writer,
        )
        self.producers.append(producer)
        return producer

    def replace_producer(self, producer: SimProducer, *, dies: bool) -> None:
        producer.is_dead = producer.is_dead or dies
        self.producers.remove(producer)
        self.add_producer(WRITER if producer.name.startswith(WRITER) else None)

    def replace_ended_producers(self) -> None:
        for producer in [one for one in self.producers if one.error is not None]:
            self.coverage[f"producer.ended by {type(producer.error).__name__}"] += 1
            self.producers.remove(producer)
            if not any(one.name.startswith(WRITER) for one in self.producers):
                self.add_producer(WRITER)
            elif not producer.name.startswith(WRITER):
                self.add_producer()

    def add_rival_writer(self) -> None:
        """The older producer stays, and must notice the replacement by itself."""
        self.add_producer(WRITER)

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"

    def crash_node(self, *, power: bool) -> None:
        if self.node.is_up:
            self.node.crash(power=power)

    def stop_node_gently(self, grace_s: float) -> None:
        if self.node.is_up:
            self.node.stop_gently()
            self._close_node(self.node.life, self.world.now_s + grace_s)

    def _close_node(self, life: int, until_s: float) -> None:
        """Stop the node when all leases are released, or the time is over."""
        if life != self.node.life:
            return  # crashed meanwhile
        if self.node.held_count and self.world.now_s < until_s:
            self.world.after(0.05, partial(self._close_node, life, until_s))
            return
        self.coverage[f"node.stopped {'too late' if self.node.held_count else 'gently'}"] += 1
        self.node.close()

    def _node_crashed(self) -> None:
        """The node calls this at every end of its process."""
        self.recorder.restarted()
        self.coverage["node.crashed"] += 1
        if self.has_streams:
            self._server.crashed()
        if self.settings.is_local:
            for consumer in self.consumers:
                consumer.die()
            for producer in list(self.producers):
                self.replace_producer(producer, dies=True)
        self.world.after(self.world.spread(0.05, 1.0), self._restart_node)

    def _restart_node(self) -> None:
        if self.node.is_up:
            return
        self.node.start()
        if self.node.is_up and self.settings.is_local:
            for _ in range(CONSUMERS):
                self.world.after(self.world.spread(0.0, 0.5), self.add_consumer)

    # A history

    def run(self) -> Report:
        self.world.run(TROUBLE_S)
        self._heal()
        until_s = TROUBLE_S + PATIENCE_S
        while self.world.now_s < until_s and not self._is_done():
            self.world.run(self.world.now_s + 0.5)
        is_done = self._is_done()
        problems = [] if is_done else [f"not done {PATIENCE_S:g} s after everything was healed: {self._state()}"]
        for consumer in self.consumers:
            consumer.stop()
        self.world.run(self.world.now_s + 3.0)
        problems += [problem for link in self.network.links for problem in link.overdue()]
        self.node.crash(power=self.settings.promises_all and self.loses_power)
        self.node.start()
        left = Aftermath(self)
        problems += left.problems
        self.node.database.close()
        return Report(self.seed, left.verdict, problems, self.faults, self.coverage, left.history, self.world.now_s)

    def _heal(self) -> None:
        self.is_healing = True
        self.network.heal()
        self.node.disk.set_free(None)
        for consumer in self.consumers:
            consumer.is_cut = False
            consumer.is_calm = True
            consumer.is_sluggish = False
            consumer.thaw()
        if self._drain is not None:
            self._drain.end()
        # A log that stopped goes on after a restart.
        if self.node.is_up and any(log == "stopped" for log in self._log_states()):
            self.crash_node(power=self.loses_power)
        if self.settings.consumer.ack == "manual":
            # Handled but uncommitted messages are left to other consumers.
            for consumer in self.consumers:
                consumer.stop()
        for _ in range(CONSUMERS):
            self.add_consumer()
        self._traffic.send_what_failed()

    def _log_states(self) -> list[str]:
        return [description.state for description in self.node.node.broker.describe(self.subject)]

    def _is_done(self) -> bool:
        if self._traffic.messages_left or not self.node.is_up or not all(one.is_idle for one in self.producers):
            return False
        group = self._group()
        if group is None or any(partition.lag for partition in group.partitions):
            return False
        return not self._operator.troubled_keys()

    def _group(self) -> GroupDescription | None:
        try:
            return ask(self.node.node, DescribeGroup(SUBJECT, GROUP), GroupDescription)
        except NotFound:
            return None

    def _state(self) -> str:
        busy = [one.name for one in self.producers if not one.is_idle]
        alive = [one.name for one in self.consumers if not one.is_over]
        keys = self._operator.troubled_keys()
        return f"{self._traffic.messages_left} to send, busy {busy}, consumers {alive}, {self._group()}, {keys}"


def simulate(seed: int) -> Report:
    """Run the history of a seed."""
    return Simulation(seed).run()
