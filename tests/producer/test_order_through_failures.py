"""P4, P7: under all network faults, every acknowledged message is stored once and in the order of sending."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inturn.model.errors import DiskFull, InturnError
from inturn.producer.core import SendAttempt
from inturn.producer.send_batch import SendHandle
from inturn.protocol.commands import Appended
from tests.producer.fake_log import FakeLog, some_core


@dataclass(eq=False)
class _Answer:
    attempt: SendAttempt
    answer: Appended | InturnError


class StrictProducer(RuleBasedStateMachine):
    @initialize(in_flight=st.integers(1, 5), batch_count=st.integers(1, 3))
    def open(self, in_flight: int, batch_count: int) -> None:
        self.core = some_core(in_flight=in_flight, batch_count=batch_count, answer_timeout_s=1.0)
        self.log = FakeLog()
        self.now_s = 100.0
        self.requests: list[SendAttempt] = []
        self.answers: list[_Answer] = []
        self.sent: list[bytes] = []
        self.handles: list[SendHandle] = []
        self.acknowledged: list[int] = []

    @rule(count=st.integers(1, 4))
    def send(self, count: int) -> None:
        for _ in range(count):
            body = b"%d" % len(self.sent)
            batch = self.core.add("orders", body, b"k", 0)
            self.handles.append(SendHandle(batch, len(batch.messages) - 1))
            self.sent.append(body)

    @rule()
    def poll(self) -> None:
        self.requests += self.core.poll(self.now_s)

    @rule(seconds=st.sampled_from([0.01, 0.3, 1.0, 6.0]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), kept=st.booleans())
    def deliver_a_request(self, data: st.DataObject, kept: bool) -> None:
        """In any order. `kept`: a copy of the request stays in the network."""
        attempt = data.draw(st.sampled_from(self.requests))
        if not kept:
            self.requests.remove(attempt)
        self.answers.append(_Answer(attempt, self.log.append(attempt.command)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def lose_a_request(self, data: st.DataObject) -> None:
        self.requests.remove(data.draw(st.sampled_from(self.requests)))

    @precondition(lambda self: self.requests)
    @rule()
    def refuse_a_request(self) -> None:
        self.answers.append(_Answer(self.requests.pop(0), DiskFull("p0")))

    @precondition(lambda self: self.answers)
    @rule(data=st.data(), kept=st.booleans())
    def deliver_an_answer(self, data: st.DataObject, kept: bool) -> None:
        answer = data.draw(st.sampled_from(self.answers))
        if not kept:
            self.answers.remove(answer)
        self.core.answered(answer.attempt, answer.answer, self.now_s)
        self._note()

    @precondition(lambda self: self.answers)
    @rule(data=st.data())
    def lose_an_answer(self, data: st.DataObject) -> None:
        self.answers.remove(data.draw(st.sampled_from(self.answers)))

    @invariant()
    def nothing_is_doubled_and_nothing_overtakes(self) -> None:
        assert self.log.bodies == self.sent[: len(self.log.bodies)]

    @invariant()
    def what_is_acknowledged_is_stored_where_it_says(self) -> None:
        for number in self.acknowledged:
            assert self.handles[number].result(0).offset == number
            assert self.log.bodies[number] == self.sent[number]

    @invariant()
    def the_buffer_holds_what_is_not_acknowledged(self) -> None:
        assert (self.core.waiting_bytes == 0) == all(handle.done for handle in self.handles)
        assert self.core.waiting_bytes >= 0

    @invariant()
    def a_producer_with_work_always_knows_when_to_look_again(self) -> None:
        """No other part wakes the producer: when all requests are answered, there is a request to send or a time for
        the next.
        """
        if not self.core.is_idle and not self.requests and not self.answers:
            attempts = self.core.poll(self.now_s)
            self.requests += attempts
            assert attempts or self.core.next_due_s() is not None

    def _note(self) -> None:
        known = len(self.acknowledged)
        self.acknowledged += [
            number for number, handle in enumerate(self.handles) if handle.done and number not in self.acknowledged
        ]
        assert len(self.acknowledged) >= known

    def teardown(self) -> None:
        """The network heals: all requests arrive."""
        if not hasattr(self, "core"):
            return
        for _ in range(200):
            if self.core.is_idle:
                break
            for attempt in self.core.poll(self.now_s):
                self.core.answered(attempt, self.log.append(attempt.command), self.now_s)
            self.now_s += 1.0
        assert self.log.bodies == self.sent
        assert [handle.result(0).offset for handle in self.handles] == list(range(len(self.sent)))


StrictProducer.TestCase.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)
TestStrictProducer = StrictProducer.TestCase
