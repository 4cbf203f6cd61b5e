"""A folder served at a free port, measured or not: `python -m inturn.bench.measured_child FOLDER yes|no`.

Says its address and, if it is measured, the URL of its metrics. Each line after that is answered with the processor
time that it has taken so far, in seconds.
"""

from __future__ import annotations

import sys
import time

from inturn.bench.child import answer_lines, end_with_stdin, say
from inturn.service import Service
from inturn.wire.address import Address


def main(folder: str, is_measured: str) -> None:
    end_with_stdin()
    http = ("127.0.0.1", 0) if is_measured == "yes" else None
    service = Service(folder, address=Address("127.0.0.1", 0), http=http)
    say(f"{service.address} {service.http_url or ''}".strip())
    answer_lines(lambda _: str(time.process_time()))
    service.close(grace_s=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
