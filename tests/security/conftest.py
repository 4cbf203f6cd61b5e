from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import structlog

from inturn.security.settings import ServerTlsSettings
from tests.security.bed import Certificates, Guarded
from tests.security.secured_bed import SecuredBed

Serve = Callable[..., Guarded]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Serve]:
    """Start a guarded server. The server ends with the test."""
    made: list[Guarded] = []

    def start(*principals: str, **options: object) -> Guarded:
        folder = tmp_path / f"server-{len(made)}"
        folder.mkdir()
        made.append(Guarded(folder, *principals, **options))  # type: ignore[arg-type]
        return made[-1]

    yield start
    for one in made:
        one.close()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def server_tls(certificates: Certificates) -> ServerTlsSettings:
    return ServerTlsSettings(*certificates.issue("server", "127.0.0.1", "localhost"))


@pytest.fixture
def quiet() -> Iterator[None]:
    """Do not log handlers that fail on purpose."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.reset_defaults()


@pytest.fixture
def bed(tmp_path: Path, certificates: Certificates) -> Iterator[SecuredBed]:
    """The bed for tests of the contract suite."""
    made = SecuredBed(tmp_path / "data", certificates)
    yield made
    made.close()
    refused = [text for text in made.audit_file.read_text().splitlines() if '"refused"' in text]
    assert refused == [], "what a client does by itself is allowed by the actions that there are"
