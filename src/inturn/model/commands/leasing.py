"""Leases and claims: who may consume what, and since when."""

from __future__ import annotations

import msgspec

from inturn.model.commands.command import Command
from inturn.model.commands.keys import KeyRequest
from inturn.model.commands.parking import Lot


class Acquire(Command, frozen=True, gc=False):
    """Ask for the lease of a partition; held back until it is free or `wait_s` is over (then LeaseHeld).

    Every grant has a higher epoch than all before. `ask` counts up per member: the same ask again is answered
    with the same grant, an older one is refused.
    """

    subject: str
    group: str
    partition: int
    member: str
    ask: int
    wait_s: float = 0.0
    keeps: bool = False  # others are to work under it
    outlives: bool = False  # something of the member may outlive its process, so the lease does not end with that


class Claim(Command, frozen=True, gc=False):
    """Ask for the right to work on some slots of a partition, under the lease of `owner`; answered as an Acquire is.

    Held back while another claimant has any of the slots. From then on `member` pulls, commits, moves and releases with
    the lease's epoch as an owner would, but is given messages of its slots only, and its commits add to what is stored.
    What renews a claim renews the lease. A lease with live claims is not released (LeaseHeld): they are called back.
    """

    subject: str
    group: str
    partition: int
    owner: str
    epoch: int
    member: str
    ask: int
    slots: bytes = b""  # a SlotSet
    wait_s: float = 0.0


class Failure(msgspec.Struct, frozen=True, gc=False):
    """A message that failed and waits to be repeated: what the next holder has to know of it."""

    offset: int  # of one that came to the partition with a parking lot: its mark (see `inturn.model.mark`)
    key: bytes | None
    attempts: int  # so far
    error: str
    waiting: int = 0  # messages behind it in its lane, as far as pulled
    is_exhausted: bool = False  # not repeated any more until somebody resumes or skips its key


class Granted(msgspec.Struct, frozen=True, gc=False):
    """The lease, and how far the holder before came."""

    epoch: int
    offset: int  # where to go on
    life_s: float  # counted from before the lease was asked for
    finished: bytes = b""  # offsets above `offset` that are done all the same: a roaring bitmap, or nothing
    failures: tuple[Failure, ...] = ()
    lots: tuple[Lot, ...] = ()
    requests: tuple[KeyRequest, ...] = ()  # that wait for this partition
    request_mark: int = 0  # requests in an assignment count only above this
    is_claim: bool = False  # others work on the partition, too: commits say what was finished, not how far it is


class Renew(Command, frozen=True, gc=False):
    """Keep leases, each given as (partition, epoch)."""

    subject: str
    group: str
    member: str
    held: tuple[tuple[int, int], ...]


class Renewed(msgspec.Struct, frozen=True, gc=False):
    """The partitions whose leases live on; the others are over. `wanted_back` are claims among them whose lease is
    to be released: their holders come to an end with them, commit and give them back."""

    partitions: tuple[int, ...]
    wanted_back: tuple[int, ...] = ()
    unreached: tuple[int, ...] = ()  # their broker could not be asked: nothing is known of them, nothing was renewed
