"""A server of the test's own that stands for a package index."""

from __future__ import annotations

import http.server
import json
import threading
from typing import Any, cast

JSON = "application/vnd.pypi.simple.v1+json"


class Server(http.server.ThreadingHTTPServer):
    """Stands for an index: says what it was told to say, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.pages: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def serve(self, path: str, body: str, kind: str = JSON) -> None:
        self.pages[path] = 200, {"Content-Type": kind}, body.encode()

    def serve_files(self, path: str, *urls: str) -> None:
        self.serve(path, json.dumps({"files": [{"url": url} for url in urls]}))

    def redirect(self, path: str, url: str) -> None:
        self.pages[path] = 302, {"Location": url}, b""

    def serve_package(self, tarball: str, path: str = "") -> None:
        """One package of npm's, whose file is at ``tarball``."""
        name = "npm-normalize-package-bin"
        version = {"name": name, "version": "1.0.0", "dist": {"tarball": tarball}}
        document = {"name": name, "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
        self.serve(f"{path}/{name}", json.dumps(document), "application/json")


class _Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = cast("Server", self.server)
        server.asked.append((self.path, dict(self.headers)))
        status, headers, body = server.pages.get(self.path, (404, {}, b""))
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_CONNECT(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 # the base class has it
        pass
