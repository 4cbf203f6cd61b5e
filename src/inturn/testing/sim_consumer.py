"""The real consumer core under simulation: handlers are spans of virtual time."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial

from inturn.consumer import outcome as outcomes
from inturn.consumer.context import Context
from inturn.consumer.core import ConsumerCore
from inturn.consumer.outcome import Outcome
from inturn.consumer.run import Run
from inturn.model.commands import Answer, Command
from inturn.model.errors import InturnError
from inturn.model.message import Message
from inturn.model.result import Result, suspend
from inturn.model.settings import ConsumerSettings, LeaseSettings, Order
from inturn.testing.recorder import Recorder
from inturn.testing.sim_node import SimClient, SimNetwork
from inturn.testing.world import World

# Several changes of stage may happen within one `poll`: by the first and the last stage, those between.
_BETWEEN: dict[tuple[str, str], tuple[str, ...]] = {
    ("active", "releasing"): ("draining",),
    **{(first, "none"): ("lost",) for first in ("active", "draining", "releasing")},
    **{(first, "asking"): ("lost", "none") for first in ("active", "draining", "releasing")},
    ("lost", "asking"): ("none",),
}


class SimConsumer(SimClient):
    def __init__(
        self,
        world: World,
        network: SimNetwork,
        recorder: Recorder,
        coverage: Counter[str],
        subject: str,
        group: str,
        name: str,
        settings: ConsumerSettings,
        lease: LeaseSettings,
        handler_s_max: float,
    ) -> None:
        super().__init__(world, name)
        self._network = network
        self._recorder = recorder
        self._coverage = coverage
        self._settings = settings
        self._handler_s_max = handler_s_max
        self._running = 0
        self._stages: dict[int, str] = {}
        self._kept: dict[tuple[int, int], int] = {}  # by partition and epoch, the first since the last commit
        self._rolled_back: dict[tuple[int, int], int] = {}  # where to go on
        self.problems: list[str] = []
        self._next_tick_s = float("inf")
        self.slow_next = False  # the next handler outlives a lease
        self.is_calm = False  # handlers succeed from now on
        self.core = ConsumerCore(subject, group, name, Order.PARTITION, "first", settings, lease)
        self.later(0.0, self._tick)

    @property
    def is_over(self) -> bool:
        return self.is_dead or self.core.is_stopped

    def die(self) -> None:
        if not self.is_over:
            self.is_dead = True
            self._recorder.crashed(self.name)

    def stop(self) -> None:
        self.do(self._stop)

    def _stop(self) -> None:
        self.core.stop(self.world.now_s)
        self._tick()

    def _tick(self) -> None:
        core, now_s = self.core, self.world.now_s
        self._note_stages()
        for command in core.poll(now_s):
            self._network.send(self, command, partial(self._answered, command))
        self._note_stages(in_poll=True)
        while self._running < self._settings.concurrency and (run := core.take(now_s)) is not None:
            self._running += 1
            run.open()
            self._next(run)
        if not core.is_stopped:
            due_s = core.next_due_s(now_s)
            if not now_s < self._next_tick_s <= due_s:
                self._next_tick_s = due_s if due_s > now_s else now_s + 0.01
                self.later(self._next_tick_s - now_s, self._tick)

    def _answered(self, command: Command, answer: Answer | InturnError) -> None:
        self.core.answered(command, answer, self.world.now_s)
        if self.core.error is not None:
            raise self.core.error
        self._tick()

    def _next(self, run: Run) -> None:
        message = run.next(self.world.now_s)
        if message is None:
            self._finish(run)
            return
        context = run.context
        self._check_rollback(context.partition, context.epoch, message.offset)
        self._recorder.started(*self._place(context, message))
        self.later(self._duration_s(), partial(self._end, run, message))

    def _end(self, run: Run, message: Message) -> None:
        outcome, result = self._handled(run)
        context = run.context
        self._coverage[f"handler.{outcome.kind.value}"] += 1
        self._recorder.ended(*self._place(context, message), result=result)
        if run.settle(outcome):
            self._next(run)
        else:
            self._finish(run)

    def _place(
        self, context: Context, message: Message
    ) -> tuple[str, str, int, int, bytes | None, str, int, str | None]:
        """What the recorder wants to know of a call."""
        where = context.subject, context.group, context.partition, message.offset, message.key
        return *where, self.name, context.epoch, message.message_id

    def _finish(self, run: Run) -> None:
        self._running -= 1
        self.core.finish(run, self.world.now_s)
        self.later(0.0, self._tick)

    def _duration_s(self) -> float:
        if self.slow_next:
            self.slow_next = False
            return self.world.spread(2.2, 5.0)
        return self.world.spread(0.001, 0.3 if self.world.happens(0.02) else self._handler_s_max)

    def _handled(self, run: Run) -> tuple[Outcome, str]:
        """What the product makes of the handler's end, and what it was in truth."""
        settings, chance = self._settings, self.world.rng.random()
        place = (run.context.partition, run.context.epoch)
        returned: object
        if self.is_calm or chance < 0.9:
            last = self.is_calm or chance < 0.6
            returned = None if settings.ack == "auto" else Result.COMMIT if last else Result.SUCCESS
            if returned is Result.SUCCESS:
                self._kept.setdefault(place, run.messages[run.done].offset)
            else:
                self._kept.pop(place, None)
            return outcomes.of_return(returned, run.context, settings, "simulated"), "success"
        if chance < 0.94:
            return outcomes.of_exception(RuntimeError("simulated"), settings), "exception"
        if chance < 0.96:
            return outcomes.of_return(suspend(0.05), run.context, settings, "simulated"), "failed"
        if settings.ack == "manual" and chance < 0.98:
            self._rolled_back[place] = self._kept.pop(place, run.messages[run.done].offset)
            return outcomes.of_return(Result.ROLLBACK, run.context, settings, "simulated"), "rollback"
        return outcomes.of_return("nonsense", run.context, settings, "simulated"), "exception"

    def _check_rollback(self, partition: int, epoch: int, offset: int) -> None:
        due = self._rolled_back.pop((partition, epoch), offset)
        if offset != due:
            self.problems.append(
                f"not rolled back: {self.name}, partition {partition}, epoch {epoch} "
                f"goes on at {offset} instead of {due}"
            )

    def _note_stages(self, in_poll: bool = False) -> None:
        """Count how partitions change their stage; the product itself knows nothing of this."""
        stages = {index: held.stage.value for index, held in self.core.held.items()}
        for index in stages.keys() | self._stages.keys():
            before, after = self._stages.get(index, "none"), stages.get(index, "none")
            if before == after:
                continue
            between = _BETWEEN.get((before, after), ()) if in_poll else ()
            for one, following in itertools.pairwise((before, *between, after)):
                self._coverage[f"stage.{one} → {following}"] += 1
        self._stages = stages
