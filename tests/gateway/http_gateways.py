"""A gateway in the foreground with an HTTP endpoint."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from k8e import access
from tests.places import Place, eventually, wait_readable

START_SECONDS = 150.0
STOP_SECONDS = 30.0
MAIN = """
import os, pathlib, signal, sys
sys.modules.update(dict.fromkeys(os.environ.get("WITHOUT", "").split()))
from k8e import settings
from k8e.gateway import app

def tell(*_):
    told = pathlib.Path(sys.argv[2])
    told.with_suffix(".part").write_text("\\n".join(sys.modules))
    told.with_suffix(".part").rename(told)

signal.signal(signal.SIGUSR1, tell)
sys.exit(app.run(settings.load(), background=False, ready_fd=int(sys.argv[1])))
"""


class HttpGateway:
    """Where it is, and what its own user shows to it."""

    def __init__(self, place: Place, process: subprocess.Popen[bytes]) -> None:
        self.place = place
        self.process = process
        self.root = str(place.json("status")["http"])
        self.url = f"{self.root}/mcp"
        self.token_file = place.home / ".k8e" / "sandbox" / "mcp-token"
        self.token = access.token(self.token_file)
        self.headers = {"authorization": f"Bearer {self.token}"}

    def key(self, name: str, role: str = "agent") -> Caller:
        made = self.place.json("sandbox", "api-key", "create", name, "--role", role)
        return Caller(self.url, str(made["key"]))

    def modules(self) -> set[str]:
        """What the process has loaded."""
        told = self.place.folder / "modules"
        told.unlink(missing_ok=True)
        self.process.send_signal(signal.SIGUSR1)
        eventually(told.exists)
        return set(told.read_text().split())


class Caller:
    """Somebody with an API key."""

    def __init__(self, url: str, secret: str) -> None:
        self.url = url
        self.headers = {"authorization": f"Bearer {secret}"}


@contextlib.contextmanager
def started(**environ: str) -> Generator[HttpGateway]:
    """A gateway of its own; afterwards it is gone, and nothing of it is left."""
    place = Place(**{"K8E_HTTP": "127.0.0.1:0", **environ})
    reading, writing = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", MAIN, str(writing), str(place.folder / "modules")],
        env=place.environ,
        pass_fds=[writing],
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        assert wait_readable(reading, START_SECONDS)
        said = os.read(reading, 4096).decode().strip()
        assert said == "ready", said or log(place).read_text()
        yield HttpGateway(place, process)
    finally:
        os.close(reading)
        if process.poll() is None:
            place.cli("gateway", "stop", "--destroy")
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise
        place.close()


def log(place: Place) -> Path:
    return place.data / "gateway.log"
