"""Seeded histories: the real node, producers and consumers in virtual time, with faults, judged by the checker.

    report = simulate(seed=7)
    assert report.ok, report

The same seed gives the same history. Each has at least 3 consumers, 4 partitions, 500 messages and 5 faults; then
everything heals, and all that was acknowledged must have been handled, in order. At the very end the power is cut
once more: what was acknowledged must still be there.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from inturn.consumer.claiming import ClaimedPart
from inturn.consumer.duty import Duty
from inturn.consumer.moving import OFFSET, PARTITION
from inturn.model.batch import StoredBatch, decode, is_intact
from inturn.model.commands import (
    DescribeGroup,
    FindSubject,
    GroupDescription,
    KeyDescription,
    KeyList,
    KeyRequest,
    ListKeys,
    OpenDeadLetters,
    SteerKey,
)
from inturn.model.errors import InturnError, LogDamaged, NotFound
from inturn.model.message import Message, Origin
from inturn.model.names import dead_letter_subject
from inturn.model.request import ask
from inturn.model.settings import (
    ConsumerSettings,
    FlowControl,
    Flush,
    KeyAction,
    LeaseSettings,
    LogSettings,
    LotState,
    OnExhausted,
    Order,
    ProducerSettings,
)
from inturn.model.subject import Subject
from inturn.testing.checker import Verdict, check
from inturn.testing.faults import FAULTS, LEASE_LIFE_S, OF_COMMANDS, OF_STREAMS
from inturn.testing.history import (
    ClaimEnded,
    Committed,
    ConsumerCrashed,
    HandlerEnd,
    HandlerStart,
    History,
    KeySkipped,
    LeaseEnded,
    SendAcknowledged,
)
from inturn.testing.sim_client import SimClient
from inturn.testing.sim_consumer import SimConsumer, SimRecorder
from inturn.testing.sim_drain import SimClaimant, SimDrain, SimKeeper, drain_chance
from inturn.testing.sim_growth import SimGrowth, growth_chance
from inturn.testing.sim_network import SimNetwork
from inturn.testing.sim_node import SimNode
from inturn.testing.sim_producer import SimProducer
from inturn.testing.sim_server import SimServer
from inturn.testing.sim_stream import Weather
from inturn.testing.world import World
from inturn.wire.link import LinkSettings
from inturn.wire.session import ServerSettings

SUBJECT = "order.book"
GROUP = "notify"
PARTITIONS = 4
CONSUMERS = 3
MESSAGES = 500
SPARE_MESSAGES = 30  # for those that are on their way, and may fail yet
FAULTS_MIN = 5
KEYS = 12
TROUBLE_S = 10.0  # faults happen until then
PATIENCE_S = 120.0  # after healing everything must be done within this time
WRITER = "ledger"
QUICK_SHARE = 0.4
WANTED = "wanted"  # a tag
TAGS_SHARE = 0.1  # of all histories have a group that leaves out what has not this tag


@dataclass(frozen=True, slots=True)
class Report:
    """What became of one history. `problems` is empty if everything held."""

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
        self.world = world = World(seed)
        rng = world.rng
        self.coverage: Counter[str] = Counter()
        self.faults: list[str] = []
        self.recorder = SimRecorder(world)
        # What lives in the node's process dies with it. Remote clients survive it, and their leases do.
        self._is_local = rng.random() < 0.4
        self.has_streams = not self._is_local and rng.random() < 0.6
        flush = Flush.ALWAYS if rng.random() < 0.65 else Flush.OS
        # Without a sync before the acknowledgement, only a lost process is survived without losing messages.
        self.loses_power = flush is Flush.ALWAYS or (self._is_local and rng.random() < 0.8)
        self._promises_all = flush is Flush.ALWAYS or not self.loses_power
        log = LogSettings(
            flush=flush,
            segment_bytes=rng.choice((2_000, 10_000, 1_000_000)),
            index_every_bytes=500,
            checkpoint_every_bytes=rng.choice((1_500, 20_000)),
            checkpoint_interval_s=0.05,
            reserve_bytes=1,
        )
        self._lease = LeaseSettings(life_s=LEASE_LIFE_S, renew_s=0.4, margin_s=0.1)
        self._producer_settings = ProducerSettings(
            batch_count=rng.choice((1, 3, 20)), in_flight=rng.choice((1, 2, 5)), answer_timeout_s=0.5, backoff_max_s=0.5
        )
        self._order = rng.choice((Order.PARTITION, Order.KEY, Order.KEY))
        # A rollback asked for by a message that is lost later would be left out of what is judged.
        ack = rng.choice(("auto", "auto", "manual")) if self._promises_all else "auto"
        self._consumer_settings = ConsumerSettings(
            concurrency=rng.choice((1, 2, 4)),
            ack=ack,
            max_attempts=rng.choice((None, 1, 2, 3)),
            on_exhausted=self._choose_on_exhausted(ack),
            suspend_s=0.05,
            backoff_min_s=0.02,
            backoff_max_s=0.2,
            commit_interval_s=0.2,
            pull_bytes=rng.choice((300, 2_000, 100_000)),
            pull_wait_s=0.7,
            heartbeat_s=0.7,
            answer_timeout_s=0.5,
            flow=FlowControl(buffered_count=rng.choice((5, 40, 1000)), span=rng.choice((15, 100, 100_000))),
        )
        self._tags = tags_chance(seed)
        if self._tags is not None:
            self._consumer_settings = replace(self._consumer_settings, tags=WANTED)
        # With slow handlers there is always a backlog, so that whatever happens to a lease happens amid work.
        self._handler_s_max = rng.choice((0.0005, 0.01, 0.01, 0.05))
        self._count_settings(log)
        self.node = SimNode(
            world,
            log,
            self._lease,
            self.recorder,
            self.coverage,
            # On a slow disk more is written and not yet synced when the power goes.
            sync_s_max=rng.choice((0.008, 0.15)),
            is_remote=not self._is_local,
            on_crash=self._node_crashed,
        )
        self.network = self._new_network()
        self.subject = self.node.create_subject(SUBJECT, PARTITIONS)
        ask(self.node.node, OpenDeadLetters(SUBJECT, GROUP), Subject)
        self._keys = [f"order-{number}".encode() for number in range(rng.choice((KEYS, KEYS, 5 * KEYS)))]
        self._names = 0
        self._quick = quick_chance(seed)
        self._is_healing = False
        self._damage: list[str] = []
        self.consumers: list[SimConsumer] = []
        self.producers: list[SimProducer] = []
        for _ in range(CONSUMERS):
            world.after(world.spread(0.0, 1.0), self.add_consumer)
        self.add_producer()
        self.add_producer()
        self.add_producer(writer=WRITER)
        impossible = OF_COMMANDS if self.has_streams else OF_STREAMS
        self.possible_faults = [name for name in FAULTS if name not in impossible]
        self._messages_left = MESSAGES
        world.after(0.1, self._produce)
        world.after(0.5, self._steer)
        for _ in range(rng.randint(FAULTS_MIN, FAULTS_MIN + 4)):
            if self.possible_faults:
                name = rng.choice(self.possible_faults)
                world.after(world.spread(0.5, TROUBLE_S), partial(self._inject, name))
        grows = growth_chance(seed)
        self._growth = None if grows is None else SimGrowth(self, grows, TROUBLE_S)
        chance = drain_chance(seed)
        self._drain = None if chance is None else SimDrain(self, chance)

    def _new_network(self) -> SimNetwork:
        weather = Weather()
        if not self.has_streams:
            return SimNetwork(self.world, self.node, self.coverage, weather)
        rng = self.world.rng
        # With few unanswered commands sessions let others wait now and then.
        settings = ServerSettings(unanswered_count=rng.choice((65_536, 65_536, 6)), silence_s=2 * LEASE_LIFE_S)
        self._server = SimServer(self.world, self.node, self._lease, settings, weather, self.coverage)
        links = LinkSettings(dial_timeout_s=0.5, backoff_max_s=0.5, ping_s=0.3, silence_s=rng.choice((0.8, 2.5)))
        return SimNetwork(self.world, self.node, self.coverage, weather, self._server, links)

    # What faults act upon

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
            self._consumer_settings,
            self._lease,
            self._handler_s_max,
            self._order,
        )
        consumer.is_calm = self._is_healing
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
            self._consumer_settings,
            self._lease,
            self._handler_s_max,
            self._order,
            Duty(keeps_only=True, takes_over=takes_over),
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
            self._consumer_settings,
            self._lease,
            self._handler_s_max,
            self._order,
            parts,
            until,
        )
        claimant.quick = self._quick
        self.consumers.append(claimant)
        return claimant

    @property
    def is_ordered_by_key(self) -> bool:
        return self._order is Order.KEY

    def end_offset(self, partition: int) -> int:
        return self.node.node.broker.log(self.subject, partition).end_offset

    def add_producer(self, writer: str | None = None) -> SimProducer:
        producer = SimProducer(
            self.world,
            self.network,
            self.recorder,
            self.subject,
            self._name(writer or "producer"),
            self._producer_settings,
            writer=writer,
        )
        self.producers.append(producer)
        return producer

    def replace_producer(self, producer: SimProducer, *, dies: bool) -> None:
        producer.is_dead = producer.is_dead or dies
        self.producers.remove(producer)
        self.add_producer(WRITER if producer.name.startswith(WRITER) else None)

    def add_rival_writer(self) -> None:
        """The older one stays, and must notice by itself that it was replaced."""
        self.add_producer(WRITER)

    def crash_node(self, *, power: bool) -> None:
        if self.node.is_up:
            self.node.crash(power=power)

    def stop_node_gently(self, grace_s: float) -> None:
        if self.node.is_up:
            self.node.stop_gently()
            self._close_node(self.node.life, self.world.now_s + grace_s)

    def _close_node(self, life: int, until_s: float) -> None:
        """When everything is given back, or the time is over."""
        if life != self.node.life:
            return  # it has crashed meanwhile
        if self.node.held_count and self.world.now_s < until_s:
            self.world.after(0.05, partial(self._close_node, life, until_s))
            return
        self.coverage[f"node.stopped {'too late' if self.node.held_count else 'gently'}"] += 1
        self.node.close()

    def _node_crashed(self) -> None:
        """Called by the node itself, whatever ended it."""
        self.recorder.restarted()
        self.coverage["node.crashed"] += 1
        if self.has_streams:
            self._server.crashed()
        if self._is_local:
            for consumer in self.consumers:
                consumer.die()
            for producer in list(self.producers):
                self.replace_producer(producer, dies=True)
        self.world.after(self.world.spread(0.05, 1.0), self._restart_node)

    def _restart_node(self) -> None:
        if self.node.is_up:
            return
        self.node.start()
        if self.node.is_up and self._is_local:
            for _ in range(CONSUMERS):
                self.world.after(self.world.spread(0.0, 0.5), self.add_consumer)

    def _inject(self, name: str) -> None:
        self.faults.append(name)
        self.coverage[f"fault.{name}"] += 1
        FAULTS[name](self)

    def _produce(self) -> None:
        """Bursts of messages from any producer; one that ended is replaced."""
        rng = self.world.rng
        for producer in [one for one in self.producers if one.error is not None]:
            self.coverage[f"producer.ended by {type(producer.error).__name__}"] += 1
            self.producers.remove(producer)
            if not any(one.name.startswith(WRITER) for one in self.producers):
                self.add_producer(WRITER)
            elif not producer.name.startswith(WRITER):
                self.add_producer()
        producer = self.pick_producer()
        for _ in range(rng.choice((1, 2, 10))):
            if self._messages_left and producer.send(rng.choice(self._keys), self._choose_tags()):
                self._messages_left -= 1
        if self._messages_left:
            self.world.after(self.world.spread(0.0, 0.08), self._produce)

    def _choose_tags(self) -> tuple[str, ...]:
        """Stretches of messages that nobody wants, and some that have another tag as well."""
        if self._tags is None:
            return ()
        if self._tags.random() < 0.05:
            self._is_dull = not self._is_dull
        wanted = self._tags.random() < (0.02 if self._is_dull else 0.6)
        return self._tags.choice(((WANTED,), (WANTED, "other"))) if wanted else self._tags.choice(((), ("other",)))

    def _choose_on_exhausted(self, ack: str) -> OnExhausted:
        """Parking repeats what was handled but not committed, which the checker knows of rollbacks only."""
        if ack == "manual":
            return OnExhausted.BLOCK
        choices = list(OnExhausted) if self._order is Order.KEY else [OnExhausted.BLOCK, OnExhausted.DEAD_LETTER]
        return self.world.rng.choice(choices)

    def _steer(self) -> None:
        """Somebody looks after keys that stand still, and now and then parks one that does not."""
        rng = self.world.rng
        may_park = self._order is Order.KEY and self._consumer_settings.ack == "auto" and not self._is_healing
        for one in self._troubled_keys():
            if one.key is None:
                continue
            if self._is_healing or rng.random() < 0.3:
                self._ask_of_key(KeyAction.RESUME, one.key)
            elif rng.random() < 0.1:
                self._ask_of_key(KeyAction.SKIP, one.key)
            elif may_park and one.state == LotState.RESUMING and rng.random() < 0.3:
                self._park(one.key)
        if may_park and rng.random() < 0.4:
            self._park(rng.choice(self._keys))
        self.world.after(self.world.spread(0.1, 1.0), self._steer)

    def _park(self, key: bytes) -> None:
        """Sometimes it was a mistake, which is undone at once."""
        self._ask_of_key(KeyAction.PARK, key)
        if self.world.happens(0.3):
            self._ask_of_key(KeyAction.RESUME, key)

    def _troubled_keys(self) -> tuple[KeyDescription, ...]:
        try:
            return ask(self.node.node, ListKeys(SUBJECT, GROUP), KeyList).keys if self.node.is_up else ()
        except InturnError:
            return ()

    def _ask_of_key(self, action: KeyAction, key: bytes) -> None:
        with contextlib.suppress(InturnError):
            ask(self.node.node, SteerKey(SUBJECT, GROUP, key, action, "simulated", "why not"), KeyRequest)
            self.coverage[f"asked.{action.value}"] += 1

    def _name(self, kind: str) -> str:
        self._names += 1
        return f"{kind}-{self._names}"

    # One history

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
        self.node.crash(power=self._promises_all and self.loses_power)
        self.node.start()
        stored = self._stored()
        if self._tags is not None:
            self._note_unwanted(stored)
        history = self._judged_history(stored)
        ids = {(SUBJECT, *place): message.message_id for place, message in stored.items()}
        verdict = check(history, subject=SUBJECT, group=GROUP, order=self._order.value, stored=ids)
        problems += [f"{violation.kind}: {violation.message}" for violation in verdict.violations]
        problems += self._damage
        problems += _log_problems(stored)
        problems += _release_problems(history)
        if not self._is_local:
            problems += _gone_problems(history)
        problems += self._dead_letter_problems(history)
        if verdict.parked:
            problems.append(f"still parked at the end: {verdict.parked}")
        problems += self.node.problems
        problems += [problem for consumer in self.consumers for problem in consumer.problems]
        problems += [problem for link in self.network.links for problem in link.problems]
        self._count(verdict, history)
        self.node.database.close()
        return Report(self.world_seed, verdict, problems, self.faults, self.coverage, history, self.world.now_s)

    world_seed = 0
    _is_dull = False  # next to nothing of what is sent now is wanted

    def _heal(self) -> None:
        self._is_healing = True
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
        if self._consumer_settings.ack == "manual":
            # What was handled but never committed is left to others.
            for consumer in self.consumers:
                consumer.stop()
        for _ in range(CONSUMERS):
            self.add_consumer()
        self._send_what_failed()

    def _send_what_failed(self) -> None:
        """Messages that were refused are made up for: every history has so many that were acknowledged."""
        acknowledged = sum(isinstance(event, SendAcknowledged) for event in self.recorder.history)
        if not self._messages_left:
            self.world.after(0.0, self._produce)
        self._messages_left = max(self._messages_left, MESSAGES - acknowledged + SPARE_MESSAGES)

    def _log_states(self) -> list[str]:
        return [description.state for description in self.node.node.broker.describe(self.subject)]

    def _is_done(self) -> bool:
        if self._messages_left or not self.node.is_up or not all(one.is_idle for one in self.producers):
            return False
        group = self._group()
        if group is None or any(partition.lag for partition in group.partitions):
            return False
        return not self._troubled_keys()

    def _group(self) -> GroupDescription | None:
        try:
            return ask(self.node.node, DescribeGroup(SUBJECT, GROUP), GroupDescription)
        except NotFound:
            return None

    def _state(self) -> str:
        busy = [one.name for one in self.producers if not one.is_idle]
        alive = [one.name for one in self.consumers if not one.is_over]
        keys = self._troubled_keys()
        return f"{self._messages_left} to send, busy {busy}, consumers {alive}, {self._group()}, {keys}"

    def _stored(self) -> dict[tuple[int, int], Message]:
        """Everything in the logs, by partition and offset."""
        stored = {}
        for index in range(self.subject.partition_count):
            try:
                for batch in self._batches(index):
                    for message in decode(batch, Origin(SUBJECT, index)):
                        stored[index, message.offset] = message
            except LogDamaged as error:
                self._damage.append(f"damaged: {error}")
        return stored

    def _note_unwanted(self, stored: dict[tuple[int, int], Message]) -> None:
        unwanted: dict[int, list[int]] = defaultdict(list)
        for (partition, offset), message in stored.items():
            if WANTED not in message.tags:
                unwanted[partition].append(offset)
        known = {partition: tuple(offsets) for partition, offsets in unwanted.items()}
        self.recorder.group_filtered(SUBJECT, GROUP, WANTED, known)
        self.coverage["log.unwanted message"] += sum(map(len, known.values()))

    def _dead_letter_problems(self, history: History) -> list[str]:
        """What was given up must be among the dead letters, unless it was handled after all or given up by somebody."""
        ends = [event for event in history if isinstance(event, HandlerEnd)]
        over = {(event.partition, event.offset) for event in ends if event.result == "success"}
        over |= {(event.partition, event.offset) for event in history if isinstance(event, KeySkipped)}
        moved = {(event.partition, event.offset) for event in ends if event.result == "moved"} - over
        self.coverage["log.dead letter"] += len(moved)
        if not moved or not self._promises_all:
            return []
        name = dead_letter_subject(GROUP, SUBJECT)
        subject = ask(self.node.node, FindSubject(name), Subject)
        found = set()
        for batch in self._batches(0, subject):
            for message in decode(batch, Origin(name, 0)):
                found.add((int(message.properties[PARTITION]), int(message.properties[OFFSET])))
        return [f"given up, but not among the dead letters: {place}" for place in sorted(moved - found)]

    def _batches(self, index: int, subject: Subject | None = None) -> Iterator[StoredBatch]:
        log = self.node.node.broker.log(subject or self.subject, index)
        offset = log.start_offset
        while batches := log.read(offset, 1_000_000):
            for batch in batches:
                if not is_intact(batch):
                    raise LogDamaged(str(index), batch.header.base_offset, "the payload does not fit its checksum")
                yield batch
                offset = batch.header.next_offset

    def _judged_history(self, stored: dict[tuple[int, int], Message]) -> History:
        """Where power was lost without a sync, messages may be gone: those are not asked for."""
        history = self.recorder.snapshot()
        if self._promises_all:
            return history
        kept = History()
        for event in history:
            if isinstance(event, Committed):
                parked = tuple(place for place in event.parked if place in stored)
                unparked = tuple(place for place in event.unparked if place in stored)
                kept.record(msgspec.structs.replace(event, parked=parked, unparked=unparked))
            elif (
                isinstance(event, SendAcknowledged | HandlerStart | HandlerEnd)
                and (event.partition, event.offset) not in stored
            ):
                self.coverage["log.unsynced lost"] += 1
            else:
                kept.record(event)
        return kept

    def _count_settings(self, log: LogSettings) -> None:
        clients = "local" if self._is_local else "remote"
        for name in (f"flush {log.flush.value}", f"clients {clients}", f"ack {self._consumer_settings.ack}"):
            self.coverage[f"setting.{name}"] += 1
        self.coverage[f"setting.order {self._order.value}"] += 1
        self.coverage[f"setting.network of {'streams' if self.has_streams else 'commands'}"] += 1

    def _count(self, verdict: Verdict, history: History) -> None:
        coverage = self.coverage
        for event in history:
            name = type(event).__name__
            coverage[f"event.{name}" + (f" {event.why}" if name == "LeaseEnded" else "")] += 1  # type: ignore[union-attr]
        for path in self.node.disk.paths():
            if path.endswith(".log"):
                coverage["log.segment after a gap" if path.endswith("-gap.log") else "log.segment"] += 1
        coverage["verdict.duplicates"] += verdict.duplicates
        coverage["verdict.skipped"] += verdict.skipped
        coverage["verdict.overlaps after lease loss"] += verdict.overlaps_after_lease_loss


def quick_chance(seed: int) -> random.Random | None:
    """By what consumers of this history think that their handlers are quick; None if they never do."""
    rng = random.Random(f"quick {seed}")
    return rng if rng.random() < QUICK_SHARE else None


def _log_problems(stored: dict[tuple[int, int], Message]) -> list[str]:
    """What a producer sent must be in the log once, and in its order per key."""
    problems = []
    seen: dict[str, tuple[int, int]] = {}
    last: dict[tuple[str, bytes | None], int] = defaultdict(lambda: -1)
    for place, message in sorted(stored.items()):
        assert message.message_id is not None
        if message.message_id in seen:
            problems.append(f"stored twice: {message.message_id} at {seen[message.message_id]} and {place}")
        seen[message.message_id] = place
        producer, number = message.message_id.rsplit(":", 1)
        if int(number) < last[producer, message.key]:
            problems.append(f"stored out of order: {message.message_id} at {place} after {last[producer, message.key]}")
        last[producer, message.key] = max(last[producer, message.key], int(number))
    return problems


def _release_problems(history: History) -> list[str]:
    """A lease may be lost while a handler runs, but must not be given back."""
    problems = []
    running: dict[tuple[str, int, int], set[int]] = defaultdict(set)  # by consumer, partition and epoch: offsets
    leases: dict[tuple[str, int, int, int], int] = {}  # by consumer, place and epoch: the partition of the lease
    for event in history:
        match event:
            case HandlerStart():
                lease = event.partition if event.under is None else event.under
                leases[event.consumer, event.partition, event.offset, event.epoch] = lease
                running[event.consumer, lease, event.epoch].add(event.offset)
            case HandlerEnd():
                lease = leases.get((event.consumer, event.partition, event.offset, event.epoch), event.partition)
                running[event.consumer, lease, event.epoch].discard(event.offset)
            case ConsumerCrashed():
                for place in [place for place in running if place[0] == event.consumer]:
                    del running[place]
            case LeaseEnded(why="released") | ClaimEnded():
                who = event.claimant if isinstance(event, ClaimEnded) else event.owner
                offsets = running[who, event.partition, event.epoch]
                if offsets:
                    problems.append(
                        f"released too early: {who}, partition {event.partition}, epoch {event.epoch} "
                        f"was still running {sorted(offsets)}"
                    )
    return problems


def _gone_problems(history: History) -> list[str]:
    """Consumers in other processes do not end with the node, so their leases do not either."""
    return [
        f"counted as gone: {event.owner}, partition {event.partition}, epoch {event.epoch}"
        for event in history
        if isinstance(event, LeaseEnded) and event.why == "gone"
    ]


def tags_chance(seed: int) -> random.Random | None:
    """What the tags of this history are decided by; None if its group wants all. A chance of its own, so that other
    histories are what they would be anyway; the 44 leaves those alone that tests know by their seeds."""
    rng = random.Random(f"tags 44 {seed}")
    return rng if rng.random() < TAGS_SHARE else None


def simulate(seed: int) -> Report:
    """Run one history."""
    simulation = Simulation(seed)
    simulation.world_seed = seed
    return simulation.run()
