"""What goes wrong in a simulated history, by name."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from simulator.disk import SimDisk
    from simulator.simulation import Simulation

LEASE_LIFE_S = 2.0


def consumer_crash(sim: Simulation) -> None:
    """A consumer vanishes; some time later a new consumer starts."""
    sim.pick_consumer().die()
    sim.world.after(sim.world.spread(0.0, 3.0), sim.add_consumer)


def consumer_stop(sim: Simulation) -> None:
    """A consumer stops gracefully; a new consumer starts. Sometimes the leases are lost before the release."""
    consumer = sim.pick_consumer()
    if sim.world.happens(0.5):
        consumer.slow_next = True
        sim.world.after(sim.world.spread(0.1, 0.4), consumer.stop)
        sim.world.after(0.4, lambda: setattr(consumer, "is_cut", True))
        sim.world.after(2.5 * LEASE_LIFE_S, lambda: setattr(consumer, "is_cut", False))
    else:
        consumer.stop()
    sim.world.after(sim.world.spread(0.0, 2.0), sim.add_consumer)


def consumer_join(sim: Simulation) -> None:
    sim.add_consumer()


def consumer_freeze(sim: Simulation) -> None:
    """A consumer freezes for longer than its lease, then continues.

    Half of the freezes hit a running handler, so that answers are handled before the end of the handler; the other half
    lets the end of the handler come first.
    """
    consumer = sim.pick_consumer()
    consumer.slow_next = sim.world.happens(0.5)
    for_s = sim.world.spread(2 * LEASE_LIFE_S if consumer.slow_next else 0.5, 3 * LEASE_LIFE_S)
    consumer.is_sluggish = not consumer.slow_next
    sim.world.after(sim.world.spread(0.1, 1.0), lambda: consumer.freeze(for_s))
    sim.world.after(1.5 + for_s, lambda: setattr(consumer, "is_sluggish", False))


def consumer_cut_off(sim: Simulation) -> None:
    """A consumer cannot reach the node, but goes on working."""
    consumer = sim.pick_consumer()
    consumer.is_cut = True
    sim.world.after(sim.world.spread(0.5, 3 * LEASE_LIFE_S), lambda: setattr(consumer, "is_cut", False))


def consumer_resize(sim: Simulation) -> None:
    """A consumer gets more workers or fewer, and some time later as many as before."""
    consumer = sim.pick_consumer()
    before = consumer.concurrency
    consumer.resize(sim.world.rng.choice([count for count in (1, 2, 4, 8) if count != before]))
    sim.world.after(sim.world.spread(0.3, 3.0), lambda: consumer.resize(before))


def slow_handler(sim: Simulation) -> None:
    """A handler outlives the lease of its consumer; the consumer is cut off meanwhile."""
    consumer = sim.pick_consumer()
    consumer.slow_next = True
    if sim.world.happens(0.7):
        sim.world.after(0.3, lambda: setattr(consumer, "is_cut", True))
        sim.world.after(2.5 * LEASE_LIFE_S, lambda: setattr(consumer, "is_cut", False))


def node_power_loss(sim: Simulation) -> None:
    """The machine of the node loses unsynced data. Only flush=always promises more."""
    sim.crash_node(power=sim.loses_power)


def node_kill(sim: Simulation) -> None:
    """The process dies; sometimes the power fails soon after the restart."""
    sim.crash_node(power=False)
    if sim.world.happens(0.5):
        sim.world.after(sim.world.spread(0.5, 1.2), lambda: sim.crash_node(power=sim.loses_power))


def node_crash_while_writing(sim: Simulation) -> None:
    """The power goes in the middle of some operation of the disk."""
    if sim.loses_power:
        sim.node.disk.crash_at(sim.node.disk.operations + sim.world.rng.randint(1, 30))
    else:
        sim.crash_node(power=False)


def node_graceful_restart(sim: Simulation) -> None:
    """The node accepts no new work, waits a while for consumers to release their leases, and restarts.

    Often a handler runs for longer.
    """
    sim.pick_consumer().slow_next = sim.world.happens(0.5)
    grace_s = sim.world.spread(0.1, 2.0)
    sim.world.after(sim.world.spread(0.1, 0.4), lambda: sim.stop_node_gently(grace_s))


def requests_lost(sim: Simulation) -> None:
    sim.network.request_loss = sim.world.spread(0.05, 0.5)
    sim.world.after(sim.world.spread(0.5, 2.0), lambda: setattr(sim.network, "request_loss", 0.0))


def answers_lost(sim: Simulation) -> None:
    sim.network.answer_loss = sim.world.spread(0.05, 0.5)
    sim.world.after(sim.world.spread(0.5, 2.0), lambda: setattr(sim.network, "answer_loss", 0.0))


def answers_late(sim: Simulation) -> None:
    """All answers to a consumer come late, also grants and renewals; then the consumer is cut off."""
    consumer = max((sim.pick_consumer() for _ in range(4)), key=lambda one: one.waiting_count)
    consumer.answers_late_s = sim.world.spread(0.1, 0.22) * LEASE_LIFE_S
    consumer.is_sluggish = True

    def end() -> None:
        consumer.answers_late_s = 0.0
        consumer.is_cut = consumer.is_sluggish = False

    sim.world.after(sim.world.spread(0.5, 1.5), lambda: setattr(consumer, "is_cut", True))
    sim.world.after(1.5 + 2 * LEASE_LIFE_S, end)


def requests_repeated(sim: Simulation) -> None:
    """Requests arrive twice, the second time late; often after the sender has released its partitions."""
    sim.network.repeat = sim.world.spread(0.4, 0.95)
    sim.world.after(sim.world.spread(3.0, 9.0), lambda: setattr(sim.network, "repeat", 0.0))
    consumer_crash(sim)  # until its leases are over, other consumers retry to acquire
    for _ in range(3):
        sim.world.after(sim.world.spread(0.0, 3.0), lambda: _come_and_go(sim))


def _come_and_go(sim: Simulation) -> None:
    """A consumer joins for a moment: partitions move to the consumer, and most partitions move back."""
    consumer = sim.add_consumer()
    sim.world.after(sim.world.spread(0.2, 1.0), consumer.stop)


def stream_cut(sim: Simulation) -> None:
    """Streams break, most in the middle of a frame; both ends notice."""
    for client in sim.pick_clients(3):
        link = client.link
        if link is not None and link.stream is not None:
            stream = link.stream
            pipe = sim.world.rng.choice((stream.to_node, stream.to_client))
            pipe.cut_after(sim.world.rng.randrange(500), partial(stream.cut, node_learns=True, client_learns=True))


def stream_half_open(sim: Simulation) -> None:
    """Streams break, and at most one end notices; the other end has only the silence."""
    for client in sim.pick_clients(3):
        link = client.link
        if link is not None and link.stream is not None:
            node_learns = sim.world.happens(0.4)
            link.stream.cut(node_learns=node_learns, client_learns=not node_learns and sim.world.happens(0.5))


def stream_one_way(sim: Simulation) -> None:
    """For a while a stream carries no bytes from a client to the node, or back. Later the bytes arrive."""
    for client in sim.pick_clients(2):
        if client.link is not None:
            to_node = sim.world.happens(0.5)
            client.link.block(to_node=to_node, to_client=not to_node)
            unblock = partial(client.link.block, to_node=False, to_client=False)
            sim.world.after(sim.world.spread(0.3, 2 * LEASE_LIFE_S), unblock)


def stream_in_pieces(sim: Simulation) -> None:
    """Frames arrive in pieces, cut at any byte."""
    sim.network.weather.split = sim.world.spread(0.4, 0.95)
    sim.world.after(sim.world.spread(1.0, 4.0), lambda: setattr(sim.network.weather, "split", 0.02))


def frames_twice(sim: Simulation) -> None:
    """The network repeats whole frames a little later. Meanwhile members come and go."""
    sim.network.weather.duplicate = sim.world.spread(0.3, 0.9)
    sim.world.after(sim.world.spread(1.0, 4.0), lambda: setattr(sim.network.weather, "duplicate", 0.0))
    sim.world.after(sim.world.spread(0.0, 1.0), lambda: _come_and_go(sim))


def bytes_flipped(sim: Simulation) -> None:
    """The network damages bytes."""
    for client in sim.pick_clients(3):
        link = client.link
        if link is not None and link.stream is not None:
            link.stream.damage(sim.world.rng.choice((link.stream.to_node, link.stream.to_client)))


def network_slow(sim: Simulation) -> None:
    sim.network.weather.delay_s_max = sim.world.spread(0.1, 1.5)
    sim.world.after(sim.world.spread(0.5, 2.0), lambda: setattr(sim.network.weather, "delay_s_max", 0.003))


def disk_full(sim: Simulation) -> None:
    sim.node.disk.set_free(sim.world.rng.randint(0, 3000))
    sim.world.after(sim.world.spread(0.3, 1.5), lambda: sim.node.disk.set_free(None))


def sync_fails(sim: Simulation) -> None:
    """A log stops; some time later the node is restarted."""
    disk = sim.node.disk
    error = OSError(errno.EIO, "simulated")
    disk.fail_next_sync(error, lambda path: path.endswith(".log") and _forget_dirty(disk, path))
    sim.world.after(sim.world.spread(0.5, 1.5), lambda: sim.crash_node(power=sim.loses_power))


def _forget_dirty(disk: SimDisk, path: str) -> bool:
    """Like Linux: after a failed sync the pages count as clean, and later syncs succeed without a write.

    The metadata of the file, its length, is still to be written.
    """
    inode = disk._inode(path)
    inode.pending = [(position, written) for position, written in inode.pending if written is None]
    return True


def producer_crash(sim: Simulation) -> None:
    sim.replace_producer(sim.pick_producer(), dies=True)


def producer_fenced(sim: Simulation) -> None:
    """A second producer of the same name opens while the first still sends."""
    sim.add_rival_writer()


def wall_clock_jump(sim: Simulation) -> None:
    """The wall clock jumps forward or back, just when a consumer has vanished and its leases run out."""
    consumer_crash(sim)
    jump_ms = sim.world.rng.randint(60_000, 3_600_000) * sim.world.rng.choice((-1, 1))
    sim.world.after(sim.world.spread(0.0, 0.9 * LEASE_LIFE_S), lambda: _set_wall_clock(sim, jump_ms))


def _set_wall_clock(sim: Simulation, jump_ms: int) -> None:
    sim.world.wall_jump_ms += jump_ms


FAULTS: dict[str, Callable[[Simulation], None]] = {
    fault.__name__: fault
    for fault in (
        consumer_crash,
        consumer_stop,
        consumer_join,
        consumer_freeze,
        consumer_cut_off,
        consumer_resize,
        slow_handler,
        node_power_loss,
        node_kill,
        node_crash_while_writing,
        node_graceful_restart,
        requests_lost,
        answers_lost,
        answers_late,
        requests_repeated,
        stream_cut,
        stream_half_open,
        stream_one_way,
        stream_in_pieces,
        frames_twice,
        bytes_flipped,
        network_slow,
        disk_full,
        sync_fails,
        producer_crash,
        producer_fenced,
        wall_clock_jump,
    )
}
# The rest happens in every history.
OF_COMMANDS = frozenset(fault.__name__ for fault in (requests_lost, answers_lost, answers_late, requests_repeated))
OF_STREAMS = frozenset(
    fault.__name__
    for fault in (stream_cut, stream_half_open, stream_one_way, stream_in_pieces, frames_twice, bytes_flipped)
)
