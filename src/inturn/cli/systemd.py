"""Telling systemd how far we are, for units with Type=notify. Nothing but a datagram: no library is needed."""

from __future__ import annotations

import os
import socket


def notify(*states: str) -> bool:
    """Send states such as "READY=1"; False if systemd did not start this process, or cannot be reached."""
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return False
    if path.startswith("@"):  # a name of the kernel's own, no file
        path = "\0" + path[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as telling:
            telling.connect(path)
            telling.sendall("\n".join(states).encode())
    except OSError:  # whoever watches learns it by our end
        return False
    return True
