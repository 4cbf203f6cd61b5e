"""A worker process, as the consumer sees the process: start, send work, replace after death."""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import multiprocessing
import os
import signal
import sys
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from inturn.consumer.process_child import (
    CALLS_MAX,
    Over,
    Told,
    WorkFrame,
    decode_over,
    decode_ready,
    encode,
    load,
    main,
)
from inturn.consumer.worker import Handler
from inturn.model.errors import InvalidInput, WorkerDied

READY_S = 60.0  # to load the handler and the imports of its module
END_S = 5.0
LOOK_S = 0.02  # between two checks of the shared states, while the work is not over
_spawn = multiprocessing.get_context("spawn")  # a fork of a process with threads would copy locked locks


@dataclass(frozen=True, slots=True)
class HandlerReference:
    """Where a process finds the handler."""

    module: str
    name: str

    @classmethod
    def of(cls, handler: Handler) -> HandlerReference:
        """Raises InvalidInput for what another process cannot find: lambdas, closures, methods, objects."""
        name = getattr(handler, "__qualname__", None)
        module = getattr(handler, "__module__", None)
        shown = name or repr(handler)
        if not inspect.isfunction(handler) or not isinstance(module, str) or not isinstance(name, str):
            raise InvalidInput(
                f"handler {shown} is a {type(handler).__name__}; processes need a function at the top of a module, "
                "which they can import"
            )
        if inspect.iscoroutinefunction(handler):
            raise InvalidInput(f"handler {shown} is `async def`; processes are for plain functions that compute")
        if "<" in name:
            raise InvalidInput(
                f"handler {shown} is defined inside a function, or a lambda, and cannot be imported by a process; "
                "move it to the top of a module"
            )
        if module == "__main__" and not getattr(sys.modules["__main__"], "__file__", None):
            raise InvalidInput(f"handler {shown} was typed in, there is no file to import it from; put it in a module")
        try:
            found = load(module, name)
        except (ImportError, AttributeError):
            found = None
        if found is not handler:
            raise InvalidInput(f"handler {shown} is not what module {module} has under that name; give that one")
        return cls(module, name)


class WorkerProcess:
    """Used by one thread. `run` raises WorkerDied when the process ends meanwhile; the object is useless then."""

    def __init__(self, reference: HandlerReference, name: str) -> None:
        self.states = _spawn.RawArray("B", CALLS_MAX)
        self._reference = reference
        self._pipe, theirs = _spawn.Pipe()
        self._tokens, self._token_writer = _spawn.Pipe(duplex=False)
        os.set_blocking(self._tokens.fileno(), False)
        self._is_ready = False
        self._process = _spawn.Process(
            target=main,
            args=(reference.module, reference.name, theirs, self._tokens, self.states),
            name=f"inturn-process-{name}",
            daemon=True,
        )
        with _held_back(signal.SIGINT):
            self._process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    def wait_until_ready(self) -> None:
        """Raises InvalidInput if the process cannot load the handler, WorkerDied if the process ends at once."""
        if self._is_ready:
            return
        try:
            ready = decode_ready(self._pipe.recv_bytes()) if self._pipe.poll(READY_S) else None
        except (EOFError, OSError):
            raise self._died() from None
        if ready is None:
            self.kill()
            raise WorkerDied(self.pid, f"it had not loaded its handler after {READY_S:g} s")
        if ready.error:
            raise InvalidInput(
                f"a worker process cannot load handler {self._reference.module}:{self._reference.name}: {ready.error}; "
                "its module must be importable, and start nothing when it is (if __name__ == '__main__')"
            )
        self._is_ready = True

    def run(self, work: WorkFrame, told: list[Told], while_waiting: Callable[[], None] | None = None) -> Over:
        """Blocks until the work is over, and calls `while_waiting` from time to time. Results of calls are added to
        `told` as they arrive, also from a process that dies afterwards."""
        self.wait_until_ready()
        try:
            self._pipe.send_bytes(encode(work))
            while True:
                while while_waiting is not None and not self._pipe.poll(LOOK_S):
                    while_waiting()
                over = decode_over(self._pipe.recv_bytes())
                told += over.told
                if over.is_last:
                    return over
        except (EOFError, OSError):
            raise self._died() from None

    def forget_states(self, count: int) -> None:
        self.states[:count] = [0] * count

    # The reader of a token owns the lane with that number.

    def offer(self, count: int) -> None:
        os.write(self._token_writer.fileno(), bytes(range(count)))

    def take_token(self) -> int | None:
        try:
            return os.read(self._tokens.fileno(), 1)[0]
        except BlockingIOError:
            return None

    @property
    def token_count(self) -> int:
        return int.from_bytes(fcntl.ioctl(self._tokens.fileno(), termios.FIONREAD, bytes(4)), sys.byteorder)

    def _died(self) -> WorkerDied:
        self._process.join(END_S)
        code = self._process.exitcode
        how = "ended" if code is None else f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        return WorkerDied(self.pid, f"it {how} while it had work")

    def kill(self) -> None:
        self._process.kill()
        self._process.join(END_S)

    def close(self) -> None:
        """The process ends by itself when the pipe closes. Call this when the process has no work."""
        self._pipe.close()
        self._process.join(END_S)
        if self._process.exitcode is None:
            self.kill()
        self._tokens.close()
        self._token_writer.close()


@contextlib.contextmanager
def _held_back(number: signal.Signals) -> Iterator[None]:
    """Block the signal for this thread, and for a process that the thread starts meanwhile, until the process unblocks
    the signal."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
