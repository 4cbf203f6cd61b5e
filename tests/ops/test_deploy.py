"""deploy/: what is there starts a server, and gives it what it needs."""

from __future__ import annotations

import json
import re
import signal
import subprocess
from pathlib import Path

from tests.cli.conftest import Cli

ROOT = Path(__file__).parent.parent.parent


def unit() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in (ROOT / "deploy" / "inturn.service").read_text().splitlines():
        name, equals, value = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def started(cli: Cli, *arguments: str) -> None:
    """The server takes these options, but for the ports."""
    process = cli.process("serve", *arguments, "--port", "0")
    assert process.stdout is not None
    line = process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=30)
    assert line.startswith(b"serving"), err.decode()
    assert process.returncode == 0


def test_the_unit_starts_a_server_and_gives_it_time_to_stop(cli: Cli) -> None:
    settings = unit()
    (start,) = settings["ExecStart"]
    words = start.split()
    assert words[1:3] == ["serve", "/var/lib/inturn"]
    assert settings["StateDirectory"] == ["inturn"]
    assert words[-1] == "$INTURN_SERVE_OPTIONS"
    options = words[3:-1]
    grace_s = float(options[options.index("--grace-s") + 1])
    assert float(settings["TimeoutStopSec"][0]) >= grace_s + 30
    started(cli, str(cli.data), *["127.0.0.1:0" if one == "127.0.0.1:7421" else one for one in options])


def test_the_image_starts_a_server_and_looks_at_its_health(cli: Cli) -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    entry = json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0])
    options = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    assert entry == ["inturn", "serve", "/var/lib/inturn"]
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]
    assert "/healthz" in re.findall(r"^HEALTHCHECK (.*)$", text, re.MULTILINE)[0]
    local = {"0.0.0.0": "127.0.0.1", "0.0.0.0:7421": "127.0.0.1:0"}
    started(cli, str(cli.data), *[local.get(one, one) for one in options])


def test_the_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """Where there is one; that it is well-formed is seen without."""
    text = (ROOT / "deploy" / "inturn.service").read_text()
    assert re.findall(r"^\[(.*)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    assert all(re.match(r"(#.*|\[\w+\]|[A-Z]\w+=.*|)\Z", line) for line in text.splitlines())
    copy = tmp_path / "inturn.service"
    text = text.replace("/opt/inturn/bin/inturn", "/bin/true").replace("User=inturn", "User=root")
    copy.write_text(text.replace("Group=inturn", "Group=root"))
    try:
        ran = subprocess.run(["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return
    complaints = [line for line in ran.stderr.splitlines() if "inturn.service" in line]
    assert (complaints, "Unknown" in ran.stderr) == ([], False)
