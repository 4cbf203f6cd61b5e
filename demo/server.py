"""The server of the demo's third act: `inturn serve`, but that it ends with the demo.

python -m demo.server FOLDER LEASE_S
"""

from __future__ import annotations

import os
import signal
import sys

from demo.children import end_with_parent
from inturn.cli.main import app


def main(folder: str, lease_s: str) -> None:
    end_with_parent(lambda: os.kill(os.getpid(), signal.SIGTERM))
    app(["serve", folder, "--port", "0", "--lease-s", lease_s, "--grace-s", "1", "--json"])


if __name__ == "__main__":
    main(*sys.argv[1:])
