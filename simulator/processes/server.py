"""The server process of a fault run: `python -m simulator.processes.server SPEC`."""

from __future__ import annotations

from inturn.model.settings import Flush, LogSettings
from inturn.server.server import Server
from inturn.transport.address import Address
from inturn.transport.server_session import ServerSettings
from simulator.processes.child import JumpingClock, ServerSpec, Stop, seeded, told
from simulator.processes.history import FileRecorder

GRACE_S = 2.0
SILENCE_S = 10.0


def main() -> None:
    spec = told(ServerSpec)
    clock = JumpingClock(spec.seed)
    stop = Stop(clock)
    with seeded(spec.bug):
        service = Server(
            spec.folder,
            address=Address("127.0.0.1", spec.port),
            log=LogSettings(flush=Flush(spec.flush)),
            lease=spec.lease,
            settings=ServerSettings(silence_s=SILENCE_S),
            clock=clock,
            observer=FileRecorder(spec.events) if spec.events else None,
        )
        stop.wait()
        service.close(GRACE_S)


if __name__ == "__main__":
    main()
