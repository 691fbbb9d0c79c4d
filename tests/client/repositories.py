"""A git server of our own, far away in a small internet of network namespaces."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import io
import os
import shutil
import subprocess
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import ClassVar, NamedTuple
from urllib.parse import urlsplit

import pytest

from tests.egress.internet import RESOLVER, Internet
from tests.places import Place

SERVER = "93.184.216.34"
HOSTS = ["git.test:80"]
REPOSITORY = "http://git.test/project.git"
PRIVATE = "http://git.test/private/project.git"
PATIENCE = 30


class Commits(NamedTuple):
    """What the repository has: on main, then on a branch of its own; the first one has a tag."""

    first: str
    main: str
    feature: str


class Repositories(http.server.BaseHTTPRequestHandler):
    """``git http-backend``, by CGI: the only way to serve shallow clones."""

    root: ClassVar[Path]

    def do_GET(self) -> None:
        self._serve(b"")

    def do_POST(self) -> None:
        self._serve(self._body())

    def _body(self) -> bytes:
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _serve(self, body: bytes) -> None:
        parts = urlsplit(self.path)
        if parts.path.startswith("/private/"):
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="git"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        done = subprocess.run(
            ["git", "http-backend"],
            env={
                "PATH": os.environ["PATH"],
                "GIT_PROJECT_ROOT": str(self.root),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": parts.path,
                "QUERY_STRING": parts.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            },
            input=body,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=PATIENCE,
            check=False,
        )
        answer = io.BytesIO(done.stdout)
        headers = http.client.parse_headers(answer)
        content = answer.read()
        self.send_response(int(headers.get("Status", "200").split()[0]))
        for name, value in headers.items():
            if name != "Status":
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


def make(root: Path) -> Commits:
    """A repository with two commits on main, one beside it, and a tag."""
    path = root / "project.git"

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=k8e", "-c", "user.email=k8e@example.org"]
        return subprocess.run(
            ["git", *identity, "-C", str(path), *arguments],
            env={"PATH": os.environ["PATH"], "HOME": str(root)},
            stdout=subprocess.PIPE,
            text=True,
            timeout=PATIENCE,
            check=True,
        ).stdout.strip()

    def commit(text: str) -> str:
        (path / "file").write_text(text)
        git("add", "file", "run")
        git("commit", "--quiet", "-m", text)
        return git("rev-parse", "HEAD")

    path.mkdir()
    git("init", "--quiet", "--initial-branch=main")
    (path / "run").write_text("#!/bin/sh\necho ran\n")
    (path / "run").chmod(0o755)
    first = commit("first")
    git("tag", "-a", "v1.0", "-m", "v1.0")
    main = commit("main")
    git("checkout", "--quiet", "-b", "topic/feature")
    feature = commit("feature")
    git("checkout", "--quiet", "main")
    return Commits(first, main, feature)


class Served(NamedTuple):
    """A gateway whose sandboxes can reach the git server."""

    place: Place
    commits: Commits


@contextlib.contextmanager
def served() -> Generator[Served]:
    if os.geteuid() != 0:
        pytest.skip("network namespaces and the local runtimes need root")
    folder = Path(tempfile.mkdtemp(prefix="k8e-git-"))
    internet = Internet(folder)
    internet.own(SERVER)
    internet.names["git.test"] = [SERVER]
    Repositories.root = folder / "repositories"
    Repositories.root.mkdir()
    commits = make(Repositories.root)
    internet.serve(("::", 80), Repositories)
    place = Place(K8E_RESOLVERS=RESOLVER, K8E_UPLINK_NAMESPACE=str(internet.world))
    try:
        place.json("gateway", "--background")
        yield Served(place, commits)
    finally:
        try:
            place.close()
        finally:
            internet.close()
            shutil.rmtree(folder)
