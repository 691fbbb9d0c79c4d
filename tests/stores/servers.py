"""PostgreSQL servers of a test's own: Debian's, in a temporary folder, on a unix socket alone."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

PATIENCE = 120.0
USER = "nobody"
_SETTINGS = {
    "listen_addresses": "",
    "max_connections": "100",
    "shared_buffers": "16MB",
    "log_min_messages": "fatal",
    "fsync": "off",  # no test takes the power away
}


def programs() -> Path | None:
    """The folder with ``initdb`` and ``postgres``; None where they are not installed."""
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/postgres"), reverse=True)
    return found[0].parent if found else None


class PostgresServer:
    """A cluster that is made, started, stopped and removed with the tests that use it."""

    def __init__(self) -> None:
        bin_folder = programs()
        assert bin_folder is not None
        self._bin = bin_folder
        self.folder = Path(tempfile.mkdtemp(prefix="k8e-pg-", dir="/tmp"))
        self._data = self.folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self._count = 0
        self._user = USER if os.geteuid() == 0 else None
        if os.geteuid() == 0:
            known = pwd.getpwnam(USER)
            os.chown(self.folder, known.pw_uid, known.pw_gid)
        self._run("initdb", "-D", str(self._data), "-U", "k8e", "-A", "trust", "--no-sync")

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._bin / program), *arguments],
            check=False,
            capture_output=True,
            timeout=PATIENCE,
            cwd=self.folder,
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            user=self._user,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout.decode().strip()

    def start(self) -> None:
        options = [f"-c{name}={value}" for name, value in _SETTINGS.items()]
        self._process = subprocess.Popen(
            [str(self._bin / "postgres"), "-D", str(self._data), "-k", str(self.folder), *options],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=self.folder,
            env={"LANG": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            user=self._user,
        )
        deadline = time.monotonic() + PATIENCE
        while not self._answers():
            assert self._process.poll() is None, "the server has ended"
            assert time.monotonic() < deadline, "the server does not answer"
            time.sleep(0.02)  # what is waited for needs the CPU too

    def _answers(self) -> bool:
        known = [str(self._bin / "pg_isready"), "-q", "-h", str(self.folder), "-U", "k8e"]
        return subprocess.run(known, check=False, timeout=PATIENCE).returncode == 0

    def stop(self, *, at_once: bool = False) -> None:
        """End it, and with it every connection; ``at_once`` like a crash."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if at_once else signal.SIGINT)
            self._process.wait(PATIENCE)
            self._process = None

    def close(self) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def sql(self, statement: str, database: str = "postgres") -> str:
        where = ("-h", str(self.folder), "-U", "k8e", "-d", database)
        return self._run("psql", "-X", "-A", "-t", "-v", "ON_ERROR_STOP=1", *where, "-c", statement)

    def create(self, template: str = "template0") -> str:
        """A new database; its name."""
        self._count += 1
        name = f"k8e_{self._count}"
        self.sql(f"CREATE DATABASE {name} TEMPLATE {template} ENCODING 'UTF8' LOCALE 'C.UTF-8'")
        return name

    def url(self, database: str) -> str:
        return f"postgresql://k8e:not-shown@/{database}?host={self.folder}"
