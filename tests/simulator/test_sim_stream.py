"""The simulated stream: the guarantees, and the faults."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from simulator.stream import SimPipe, SimStream, Weather
from simulator.world import World

FRAMES = [bytes([number]) * (2 + number * 7 % 40) for number in range(200)]


class Reader:
    """Records all arrivals, and the time of the end."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.ends = 0

    @property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    def ended(self) -> None:
        self.ends += 1


class Bed:
    def __init__(self, seed: int = 0, **weather: float) -> None:
        self.world = World(seed)
        self.weather = Weather(**weather)
        self.coverage: Counter[str] = Counter()
        self.node, self.client = Reader(), Reader()
        self.stream = SimStream(self._pipe(self.node), self._pipe(self.client))

    def _pipe(self, reader: Reader) -> SimPipe:
        return SimPipe(self.world, self.weather, self.coverage, reader.pieces.append, reader.ended)

    def send(self, frames: list[bytes] = FRAMES, within_s: float = 1.0) -> None:
        """Send to the node, in sequence."""
        for index, frame in enumerate(frames):
            at_s = within_s * index / len(frames)
            self.world.after(at_s, lambda frame=frame: self.stream.to_node.write(frame))  # type: ignore[misc]


@pytest.mark.parametrize("seed", range(10))
def test_bytes_arrive_in_their_order_in_other_pieces(seed: int) -> None:
    bed = Bed(seed, delay_s_max=0.2, split=0.5)
    bed.send()
    bed.world.run(5.0)
    assert bed.node.data == b"".join(FRAMES)
    assert bed.node.pieces != FRAMES
    assert bed.coverage["stream.frame in pieces"] > 50
    assert bed.node.ends == 0


def test_the_same_seed_gives_the_same_pieces() -> None:
    beds = [Bed(3, delay_s_max=0.2, split=0.5, duplicate=0.2) for _ in range(2)]
    for bed in beds:
        bed.send()
        bed.world.run(5.0)
    assert beds[0].node.pieces == beds[1].node.pieces


@pytest.mark.parametrize("seed", range(10))
def test_frames_are_duplicated_as_a_whole(seed: int) -> None:
    bed = Bed(seed, delay_s_max=0.1, split=0.5, duplicate=0.5)
    sent = [bytes([number, number, number]) for number in range(100)]
    bed.send(sent)
    bed.world.run(5.0)
    data = bed.node.data
    arrived = [data[at : at + 3] for at in range(0, len(data), 3)]
    assert len(arrived) == len(sent) + bed.coverage["stream.frame twice"] > len(sent)
    assert set(arrived) == set(sent)
    assert sorted(set(arrived), key=arrived.index) == sent  # the first copies are in order


@pytest.mark.parametrize("size_bytes", [0, 1, 17, 1000])
def test_a_stream_is_cut_after_any_number_of_bytes(size_bytes: int) -> None:
    bed = Bed()
    bed.stream.to_node.cut_after(size_bytes, partial(bed.stream.cut, node_learns=True, client_learns=True))
    bed.send()
    bed.world.run(5.0)
    assert bed.node.data == b"".join(FRAMES)[:size_bytes]
    assert bed.node.ends == bed.client.ends == 1


def test_a_cut_loses_what_is_on_its_way() -> None:
    bed = Bed(delay_s_max=2.0)
    bed.send(within_s=0.0)
    bed.world.run(0.0)
    bed.stream.cut(node_learns=True, client_learns=False)
    bed.stream.to_node.write(b"more")
    bed.world.run(5.0)
    assert (bed.node.data, bed.node.ends, bed.client.ends) == (b"", 1, 0)


def test_a_half_open_stream_tells_nobody() -> None:
    bed = Bed()
    bed.stream.cut(node_learns=False, client_learns=False)
    bed.send()
    bed.world.run(5.0)
    assert (bed.node.data, bed.node.ends, bed.client.ends) == (b"", 0, 0)


def test_what_is_blocked_arrives_later() -> None:
    bed = Bed()
    bed.stream.to_node.block(True)
    bed.stream.to_client.write(b"other way")
    bed.send()
    bed.world.run(3.0)
    assert (bed.node.data, bed.client.data) == (b"", b"other way")
    bed.stream.to_node.block(False)
    bed.world.run(5.0)
    assert bed.node.data == b"".join(FRAMES)


def test_what_a_client_wrote_before_it_closed_arrives_before_the_end() -> None:
    bed = Bed()
    bed.stream.to_node.block(True)
    bed.stream.to_node.write(b"last words")
    bed.stream.to_client.write(b"not heard")
    bed.stream.closed_by_client(resets=False)
    bed.world.run(2.0)
    assert bed.node.ends == 0
    bed.stream.to_node.block(False)
    bed.world.run(4.0)
    assert (bed.node.data, bed.node.ends) == (b"last words", 1)
    assert (bed.client.data, bed.client.ends) == (b"", 0)


def test_a_reset_loses_what_is_on_its_way() -> None:
    bed = Bed()
    bed.stream.to_client.write(b"not heard")
    bed.stream.closed_by_node(resets=True)
    bed.world.run(1.0)
    assert (bed.client.data, bed.client.ends) == (b"", 1)


def test_of_a_machine_that_is_gone_nobody_learns() -> None:
    bed = Bed()
    bed.stream.to_client.write(b"heard")
    bed.stream.left_by_node()
    bed.stream.to_client.write(b"never sent")
    bed.world.run(1.0)
    assert (bed.client.data, bed.client.ends) == (b"heard", 0)


def test_a_damaged_stream_differs_in_one_bit() -> None:
    bed = Bed()
    bed.stream.damage(bed.stream.to_node)
    bed.send()
    bed.world.run(5.0)
    assert bed.stream.is_damaged
    pairs = zip(bed.node.data, b"".join(FRAMES), strict=True)
    assert sum((one ^ other).bit_count() for one, other in pairs) == 1
