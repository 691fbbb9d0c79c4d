"""Programs that use all they can get of one thing, and a neighbour that runs one of them.

Each knows no end: what ends it is a limit of its session, and then it is started again.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Generator

from benchmarks.stage import Stage
from k8e import SandboxClient, errors
from k8e.conformance.promises.noise import BALLOON, BOMB, FILL, FLOOD, SOCKETS, SPIN

MOST_SECONDS = 240  # after which a neighbour that was forgotten ends
LOUD_SECONDS = 1.5  # for it to get loud
STOP_SECONDS = 30.0
NOISES = {
    "CPU spin": ("bash", SPIN),
    "fork bomb": ("python", BOMB),
    "memory balloon": ("python", BALLOON),
    "disk fill": ("bash", FILL),
    "log flood": ("bash", FLOOD),
    "socket flood": ("python", SOCKETS),
}
"""What a neighbour does, in which language."""


class Neighbour:
    """A session that makes one noise for as long as it may, and again after it was stopped."""

    def __init__(self, stage: Stage, client: SandboxClient, runtime: str, noise: str) -> None:
        self._stage = stage
        self._client = client
        self._runtime = runtime
        self._language, self._code = NOISES[noise]
        self._quiet = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._session_id = ""
        self._thread = threading.Thread(target=self._keep_on, name=f"noise {noise}")
        self.ends = 0
        """How often a limit has stopped it."""

    def start(self) -> None:
        self._session_id = self._client.create_session(self._runtime)
        self._thread.start()

    def stop(self) -> None:
        self._quiet.set()
        if self._process is not None:
            self._process.kill()
        self._thread.join(STOP_SECONDS)
        with contextlib.suppress(errors.SessionNotFound):
            self._client.destroy_session(self._session_id)

    def _keep_on(self) -> None:
        with SandboxClient(self._stage.local_endpoint) as client:
            while not self._quiet.is_set():
                # A process of its own: what reads a flood must not slow down who measures.
                self._process = subprocess.Popen(
                    self._argv(),
                    env=self._stage.environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                self._process.wait(MOST_SECONDS + STOP_SECONDS)
                self.ends += 1
                self._revive(client)

    def _revive(self, client: SandboxClient) -> None:
        """Another session, where the noise has cost this one its sandbox."""
        try:
            alive = client.get_session(self._session_id).phase != "ended"
        except errors.SessionNotFound:
            alive = False
        if not alive and not self._quiet.is_set():
            self._session_id = client.create_session(self._runtime)

    def _argv(self) -> list[str]:
        k8e = [sys.executable, "-IS", str(self._stage.launcher), "sandbox", "run", "--raw"]
        options = ["--session-id", self._session_id, "--timeout", str(MOST_SECONDS)]
        return [*k8e, *options, "--lang", self._language, self._code]


@contextlib.contextmanager
def neighbour(
    stage: Stage, client: SandboxClient, runtime: str, noise: str
) -> Generator[Neighbour]:
    """A loud neighbour for as long as the block runs."""
    loud = Neighbour(stage, client, runtime, noise)
    loud.start()
    try:
        time.sleep(LOUD_SECONDS)
        yield loud
    finally:
        loud.stop()
