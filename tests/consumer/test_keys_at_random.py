"""Keys under random events in any order: ConsumerCore with a node that keeps all state.

Handlers succeed, fail and suspend. Keys are parked, resumed and skipped. Answers are lost, late, or errors. The
consumer dies or is drained, and a second consumer takes over. After every step: the messages of a key run in order and
never at the same time, and no durably finished message runs again. At the end: every message was handled, or skipped on
request.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inturn.consumer.outcome import DONE, KEEP, Next, Outcome
from inturn.model.batch import decode
from inturn.model.errors import DiskFull
from inturn.model.message import Message, Origin
from inturn.model.offsets import CommitTracker
from inturn.model.result import ResultKind
from inturn.model.settings import KeyAction, LotState, Order
from inturn.protocol.commands import Command, Commit, Move, Pull, ReadLot, Renew
from tests.consumer.fake_node import Bench, Job
from tests.consumer.test_dispatcher import moved_offsets

KEYS = "abc-"
RAISED = Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, ValueError("no"))
SUSPENDED = Outcome(Next.REPEAT, ResultKind.FAILED, 1.0)
ROLLBACK = Outcome(Next.ROLLBACK, ResultKind.FAILED, 1.0)


class Keys(RuleBasedStateMachine):
    @initialize(
        on_exhausted=st.sampled_from(["block", "dead-letter", "park"]),
        max_attempts=st.sampled_from([None, 1, 2]),
        rows_max=st.sampled_from([1, 2, 1000]),
        chunk=st.sampled_from([1, 3, 1000]),
        ack=st.sampled_from(["auto", "auto", "manual"]),
    )
    def begin(self, on_exhausted: str, max_attempts: int | None, rows_max: int, chunk: int, ack: str) -> None:
        self.settings = {
            "on_exhausted": on_exhausted,
            "max_attempts": max_attempts,
            "commit_interval_s": 0.1,
            "answer_timeout_s": 1.0,
            "ack": ack,
        }
        self.chunk = chunk
        self.bench = Bench(order=Order.KEY, **self.settings)  # type: ignore[arg-type]
        self.bench.node.lot_rows_max = rows_max
        self.bench.chunk = chunk
        self.jobs: list[Job] = []
        self.running: dict[Job, Message] = {}
        self.done: dict[str, list[int]] = {}  # by key: handled with success, in order
        self.kept: dict[str, list[int]] = {}  # manual: the part of `done` that the handler has not committed
        self.skipped: set[int] = set()
        self.member = 1
        self.steps = 0
        self.bench.settle()

    # Arrivals

    @rule(keys=st.text(KEYS, min_size=1, max_size=6))
    def store(self, keys: str) -> None:
        self.bench.store_keys(keys)

    @rule()
    def settle(self) -> None:
        self.bench.settle()

    @rule()
    def settle_but_commits(self) -> None:
        self.bench.settle(Commit)

    @rule()
    def settle_but_reads(self) -> None:
        self.bench.settle(ReadLot, Move)

    @rule()
    def poll(self) -> None:
        self.bench.poll()

    @precondition(lambda self: self.bench.pending)
    @rule(choice=st.randoms(use_true_random=False), how=st.sampled_from(["answer", "lose", "store and lose", "error"]))
    def one_answer(self, choice: random.Random, how: str) -> None:
        """The node answers, does not get the command, answers without effect, or fails."""
        bench = self.bench
        command: Command = choice.choice(bench.pending)
        if how == "error" and isinstance(command, Commit | Pull | ReadLot | Move | Renew):
            bench.pending.remove(command)
            bench.answer(command, DiskFull("state"))
            return
        if how == "lose":
            bench.pending.remove(command)
            return
        answer = bench.good_answer(command)
        if answer is not None:
            bench.pending.remove(command)
            if how == "answer":
                bench.answer(command, answer)

    @rule(seconds=st.sampled_from([0.01, 0.2, 1.1, 3.0]))
    def wait(self, seconds: float) -> None:
        self.bench.wait(seconds)

    @rule(
        kind=st.sampled_from([KeyAction.PARK, KeyAction.RESUME, KeyAction.RESUME, KeyAction.SKIP]),
        key=st.sampled_from([b"a", b"b"]),
    )
    def ask(self, kind: KeyAction, key: bytes) -> None:
        """Like the node: only the first message of a parked or failing key can be skipped."""
        stored = self.bench.node.partitions[0]
        offset = None
        if kind is KeyAction.SKIP:
            lot = stored.lots.get(key)
            failed = sorted(one.offset for one in stored.failures.values() if one.key == key)
            heads = [*(lot.offsets[:1] if lot is not None else []), *failed[:1]]
            if not heads:
                return
            offset = heads[0]
            self.skipped.add(offset)
        self.bench.request(kind, key, offset)

    # Runs

    @rule()
    def take(self) -> None:
        job = self.bench.take()
        if job is not None:
            self.jobs.append(job)
            self._go_on(job)

    @precondition(lambda self: self.jobs)
    @rule(choice=st.randoms(use_true_random=False), outcome=st.sampled_from([None, KEEP, RAISED, SUSPENDED]))
    def end_of_a_handler(self, choice: random.Random, outcome: Outcome | None) -> None:
        job = choice.choice(self.jobs)
        self._is_over(job, outcome)
        self._go_on(job)

    def _is_over(self, job: Job, outcome: Outcome | None) -> None:
        message = self.running.pop(job)
        key = name(message)
        is_manual = self.settings["ack"] == "manual"
        if outcome is KEEP and not is_manual:
            outcome = None
        if outcome in (None, KEEP):
            self.done.setdefault(key, []).append(message.offset)
        if outcome is KEEP:
            self.kept.setdefault(key, []).append(message.offset)
            job.settle(KEEP)
        elif outcome is None:
            self.kept.pop(key, None)
            if is_manual:
                job.settle(DONE)
        elif is_manual and outcome is SUSPENDED:
            self._forget_kept(key)
            job.settle(ROLLBACK)
        else:
            job.settle(outcome)

    def _forget_kept(self, key: str) -> None:
        """The uncommitted messages have to be handled again."""
        kept = self.kept.pop(key, [])
        self.done[key] = [offset for offset in self.done.get(key, []) if offset not in kept]

    def _go_on(self, job: Job) -> None:
        message = job.next()
        if message is None:
            self.jobs.remove(job)
            job.end()
            return
        is_first = message.offset not in self.done.get(name(message), [])
        assert not any(name(one) == name(message) for one in self.running.values()), "one at a time"
        before = self.bench_offsets(name(message))
        before = before[: before.index(message.offset)]
        missing = [one for one in before if one not in self.done.get(name(message), []) and one not in self.skipped]
        missing = [one for one in missing if one not in self.dead_letters()]
        assert not missing, f"{message.offset} overtakes {missing}"
        assert is_first or not self.is_durably_done(message.offset), "what was committed as finished runs again"
        self.running[job] = message

    def bench_offsets(self, key: str) -> list[int]:
        """All stored offsets of a key, in order."""
        return [offset for offset, one in enumerate(self.keys_in_log()) if one == key or key == f"-{offset}"]

    def keys_in_log(self) -> list[str]:
        keys: list[str] = []
        for batch in self.bench.logs[0]:
            keys += [name(message) for message in decode(batch, Origin("orders", 0))]
        return keys

    def dead_letters(self) -> set[int]:
        return {offset for move in self.bench.node.moves for offset in moved_offsets(move)}

    def is_durably_done(self, offset: int) -> bool:
        stored = self.bench.node.partitions[0]
        if any(offset in lot.offsets for lot in stored.lots.values()):
            return False
        return offset in CommitTracker(stored.offset, stored.finished)

    @rule(outcomes=st.lists(st.sampled_from([None, None, KEEP, RAISED, SUSPENDED]), min_size=1, max_size=8))
    def serve(self, outcomes: list[Outcome | None]) -> None:
        """A worker takes work as soon as work is ready, and the handlers end with the given outcomes."""
        self.bench.live(0.5)
        self.take()
        for outcome in outcomes:
            if not self.jobs:
                return
            job = self.jobs[-1]
            self._is_over(job, outcome)
            self._go_on(job)

    # The consumer in charge: every consumer works for some time

    @precondition(lambda self: self.steps > 12)
    @rule()
    def crash(self) -> None:
        self.jobs, self.running = [], {}
        self._take_over()

    @precondition(lambda self: self.steps > 12)
    @rule()
    def drain(self) -> None:
        """Running handlers succeed, then all leases are released."""
        self.bench.core.stop(self.bench.now_s)
        self.bench.settle()
        for job in list(self.jobs):
            self._is_over(job, None)
            self._go_on(job)
        self.jobs, self.running = [], {}
        for _ in range(10):
            self.bench.live(1.0)
        assert self.bench.core.is_stopped
        self._take_over()

    def _take_over(self) -> None:
        for key in list(self.kept):
            self._forget_kept(key)
        self.member += 1
        generation = self.bench.generation
        self.bench = self.bench.successor(f"m{self.member}", **self.settings)
        self.bench.generation = generation + 1
        self.bench.chunk = self.chunk
        self.steps = 0

    @invariant()
    def it_goes_on(self) -> None:
        if hasattr(self, "bench"):
            self.steps += 1
            assert self.bench.core.error is None

    @invariant()
    def nothing_is_committed_that_was_not_handled(self) -> None:
        if not hasattr(self, "bench"):
            return
        handled = {offset for offsets in self.done.values() for offset in offsets} | self.skipped | self.dead_letters()
        for offset in range(self.bench.end()):
            assert offset in handled or not self.is_durably_done(offset), f"{offset} is lost"

    def teardown(self) -> None:
        """All handlers succeed from now on, and all parked or blocked keys are resumed: no message is left."""
        if not hasattr(self, "bench"):
            return
        for job in list(self.jobs):
            while job in self.jobs:
                self._is_over(job, None)
                self._go_on(job)
        if self.kept:
            self.drain()  # otherwise uncommitted messages would wait for a later message of the key
        stored = self.bench.node.partitions[0]
        for _ in range(200):
            self.bench.live(0.5)
            for job in self.bench.jobs():
                self.jobs.append(job)
                self._go_on(job)
                while job in self.jobs:
                    self._is_over(job, None)
                    self._go_on(job)
            self.bench.settle()
            if self.bench.node.requests:
                continue
            blocked = [one.key for one in stored.failures.values() if one.is_exhausted and one.key is not None]
            parked = [key for key, lot in stored.lots.items() if lot.state is LotState.PARKED]
            alone = [one for one in stored.failures.values() if one.is_exhausted and one.key is None]
            for key in {*blocked, *parked}:
                self.bench.request(KeyAction.RESUME, key)
            is_done = self.bench.committed() == self.bench.end() and not stored.lots and not stored.failures
            if is_done or (alone and not blocked and not parked and not stored.lots):
                break
        else:
            raise AssertionError(f"it does not come to an end: {stored}")
        self.nothing_is_committed_that_was_not_handled()


def name(message: Message) -> str:
    return f"-{message.offset}" if message.key is None else message.key.decode()


TestKeys = Keys.TestCase
TestKeys.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
