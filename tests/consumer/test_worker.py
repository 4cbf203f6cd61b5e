"""Worker and Run: the fate of a message when a part other than the handler raises."""

from __future__ import annotations

import asyncio

import pytest

from inturn.consumer.context import Context
from inturn.consumer.outcome import Next, Outcome
from inturn.consumer.worker import Worker
from inturn.model.message import Message
from inturn.model.result import ResultKind
from tests.consumer.fake_node import Bench, failing
from tests.consumer.test_dispatcher import keyed


class FakeClock:
    def __init__(self, bench: Bench) -> None:
        self.monotonic = bench.monotonic

    @staticmethod
    def time_ms() -> int:
        return 0


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no text for you")


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text for you")

    __repr__ = __str__


def serve(bench: Bench, worker: Worker, *, is_async: bool = False) -> None:
    """The work of a worker's thread or task for a single run."""
    run = bench.core.take(bench.now_s)
    assert run is not None
    try:
        if is_async:
            asyncio.run(worker.work_async(run))
        else:
            worker.work(run)
    except BaseException as error:
        worker.broke(run, error)
    bench.core.finish(run, bench.now_s)


def returns(what: object) -> object:
    return what


def raises(what: BaseException) -> object:
    raise what


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("kind", ["a result that cannot be printed", "an error that cannot be printed"])
def test_a_message_is_repeated_though_what_its_handler_gave_cannot_be_printed(kind: str, is_async: bool) -> None:
    """The contract: no message is skipped or overtaken within the key. The worker must survive."""
    calls: list[int] = []

    def handler(message: Message, context: Context) -> object:
        calls.append(message.offset)
        if len(calls) > 1:
            return None
        return returns(Unprintable()) if kind.startswith("a result") else raises(UnprintableError())

    async def async_handler(message: Message, context: Context) -> object:
        return handler(message, context)

    bench = keyed("aa")
    worker = Worker(async_handler if is_async else handler, bench.settings, FakeClock(bench), ())
    serve(bench, worker, is_async=is_async)
    bench.live(0.5)
    while bench.core.wanted_workers:
        serve(bench, worker, is_async=is_async)
    bench.live(0.5)
    assert calls == [0, 0, 1]
    assert bench.committed() == 2


def test_what_was_given_out_is_repeated_if_the_worker_itself_breaks() -> None:
    """`Worker.broke` runs after the loop over `calls` has ended, and the end of the loop closes the generator."""
    bench = keyed("aa")
    run = bench.core.take(bench.now_s)
    assert run is not None
    worker = Worker(lambda message, context: None, bench.settings, FakeClock(bench), ())

    def work() -> None:
        for _ in run.calls(bench.monotonic):
            raise MemoryError

    with pytest.raises(MemoryError) as caught:
        work()
    worker.broke(run, caught.value)
    bench.core.finish(run, bench.now_s)
    bench.live(0.5)
    assert bench.handle_all() == [0, 1]


def test_an_error_in_every_script_can_be_stored() -> None:
    """Half a surrogate pair, as from a file name that is not UTF-8, cannot be encoded: every commit would fail."""
    bench = keyed("a")
    bench.work(failing(Outcome(Next.REPEAT, ResultKind.EXCEPTION, 0.0, ValueError("caf\udce9 " + 1000 * "é")), 0))
    bench.live(0.5)
    (failure,) = bench.node.partitions[0].failures.values()
    assert failure.error.startswith("ValueError: caf")
    assert len(failure.error) <= 500
    assert not any("\ud800" <= letter <= "\udfff" for letter in failure.error)
