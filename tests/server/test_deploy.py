"""deploy/: the files start a server, and provide all that a server needs."""

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
    """The server accepts the options, apart from the ports."""
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


def test_the_unit_reloads_and_has_a_place_for_the_audit_log() -> None:
    """All folders are read-only for the unit, except the folders of the unit."""
    settings = unit()
    assert settings["ExecReload"] == ["/bin/kill -HUP $MAINPID"]
    assert settings["ProtectSystem"] == ["strict"]
    assert settings["LogsDirectory"] == ["inturn"]
    assert settings["LogsDirectoryMode"] == ["0700"]


def test_the_options_that_the_unit_gives_as_an_example_start_a_server(cli: Cli, tmp_path: Path) -> None:
    deploy = ROOT / "deploy"
    (example,) = re.findall(r'INTURN_SERVE_OPTIONS, for instance "(.*)"', (deploy / "inturn.service").read_text())
    (written,) = re.findall(r"INTURN_SERVE_OPTIONS=([^']*)'", (deploy / "README.md").read_text())
    for options in (example, written):
        started(cli, str(cli.data), *options.replace("/var/log/inturn/", f"{tmp_path}/").split())


def image() -> tuple[str, list[str]]:
    """The Dockerfile, and the options in the file, apart from the HTTP port."""
    text = (ROOT / "deploy" / "Dockerfile").read_text().replace("\\\n", "")
    options = json.loads(re.findall(r"^CMD (.*)$", text, re.MULTILINE)[0])
    return text, ["0.0.0.0:0" if one == "0.0.0.0:7421" else one for one in options]


def test_the_image_starts_a_server_once_there_is_a_token(cli: Cli) -> None:
    """The steps of deploy/README.md: put a token into the volume, then start the image with the default options."""
    text, options = image()
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[0]) == ["inturn", "serve", "/var/lib/inturn"]
    assert "INTURN_DATA=/var/lib/inturn" in text
    assert re.findall(r"^USER (.*)$", text, re.MULTILINE) == ["10001"]
    assert "/healthz" in re.findall(r"^HEALTHCHECK (.*)$", text, re.MULTILINE)[0]
    assert "--entrypoint inturn inturn token create shop" in (ROOT / "deploy" / "README.md").read_text()
    assert cli("token", "create", "shop").code == 0
    started(cli, str(cli.data), *options)


def test_the_image_lets_nobody_in_without_a_token_unless_told_to(cli: Cli) -> None:
    options = image()[1]
    refused = cli("serve", str(cli.data), *options, "--port", "0")
    assert refused.code == 1
    assert "inturn token create" in refused.err
    started(cli, str(cli.data), *options, "--insecure")


def test_the_unit_is_understood_by_systemd(tmp_path: Path) -> None:
    """Skipped without systemd. A different test checks that the unit is well-formed."""
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
