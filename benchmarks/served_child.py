"""A folder served at a free port of this machine: `python -m benchmarks.served_child FOLDER [LIFE RENEW MARGIN]`.

Prints its address. The numbers are the settings of the lease, in seconds.
"""

from __future__ import annotations

import sys

from benchmarks.child import Child, end_with_stdin, say
from inturn.model.settings import LeaseSettings
from inturn.server.server import Server
from inturn.transport.address import Address


def served(folder: object, lease: LeaseSettings | None = None) -> Child:
    """Starts the child; its first line is the address."""
    return Child("served_child", folder, *([lease.life_s, lease.renew_s, lease.margin_s] if lease is not None else []))


def main(folder: str, *lease_s: str) -> None:
    end_with_stdin()
    lease = LeaseSettings(*map(float, lease_s))
    service = Server(folder, address=Address("127.0.0.1", 0), lease=lease)
    say(str(service.address))
    sys.stdin.read()
    service.close(grace_s=1.0)


if __name__ == "__main__":
    main(*sys.argv[1:])
