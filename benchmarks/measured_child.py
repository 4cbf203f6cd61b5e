"""A folder served at a free port, measured or not: `python -m benchmarks.measured_child FOLDER yes|no`.

Prints its address and, if measured, the URL of its metrics. The answer to "time" is its processor time so far, in
seconds; to "memory" the used bytes, as the system counts them (Linux only).
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from benchmarks.child import answer_lines, end_with_stdin, say
from inturn.server.server import Server
from inturn.transport.address import Address


def main(folder: str, is_measured: str) -> None:
    end_with_stdin()
    http = ("127.0.0.1", 0) if is_measured == "yes" else None
    service = Server(folder, address=Address("127.0.0.1", 0), http=http)
    say(f"{service.address} {service.http_url or ''}".strip())
    answer_lines(lambda words: str(_resident_bytes() if words == ["memory"] else time.process_time()))
    service.close(grace_s=1.0)


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main(*sys.argv[1:])
