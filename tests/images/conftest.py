"""A real registry, and images that the tests build and push."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e import settings
from k8e.images.service import Images
from tests.images import registries


@pytest.fixture(scope="session")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """Debian's docker-registry, open to everybody; its host and port."""
    with registries.running(tmp_path_factory.mktemp("registry") / "r") as address:
        yield address


@pytest.fixture
def place() -> Generator[Path]:
    """A folder through which sandboxes can pass."""
    with tempfile.TemporaryDirectory(prefix="k8e-", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        yield Path(folder)


@pytest.fixture
def images(place: Path) -> Generator[Images]:
    if os.geteuid() != 0:
        pytest.skip("unpacking as root needs root")
    images = Images(
        settings.load({"K8E_DATA_DIR": str(place / "d"), "K8E_RUN_DIR": str(place / "r")})
    )
    images.prepare()
    yield images
    images.close()
