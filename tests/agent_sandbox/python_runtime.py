"""A server in the place of a pod's, with the protocol of upstream's python-runtime on files."""

from __future__ import annotations

import contextlib
import email
import email.policy
import json
import subprocess
import threading
from collections.abc import Generator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from tests.agent_sandbox import serving

PATIENCE = 60.0


class Handler(BaseHTTPRequestHandler):
    """One request; its files are below the server's folder."""

    folder: Path
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        _, kind, *rest = self.path.split("/", 2)
        path = self.folder / unquote("".join(rest)).lstrip("/")
        if kind == "exists":
            self._tell({"exists": path.exists()})
        elif kind == "list":
            self._tell([_described(entry) for entry in sorted(path.iterdir())])
        elif kind == "download" and path.is_file():
            self._send(200, path.read_bytes())
        else:
            self._send(404, b"{}")

    def do_POST(self) -> None:
        body = self._body()
        if self.path == "/execute":
            asked = json.loads(body)
            done = subprocess.run(
                ["/bin/sh", "-c", asked["command"]],
                cwd=self.folder,
                capture_output=True,
                text=True,
                timeout=PATIENCE,
                check=False,
            )
            told = {"stdout": done.stdout, "stderr": done.stderr, "exit_code": done.returncode}
            self._tell(told)
            return
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        form: Any = email.message_from_bytes(head + body, policy=email.policy.HTTP)
        (part,) = form.iter_parts()
        (self.folder / part.get_filename()).write_bytes(part.get_payload(decode=True))
        self._tell({"message": "ok"})

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _tell(self, value: Any) -> None:
        self._send(200, json.dumps(value).encode())

    def _send(self, code: int, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the library's name
        pass


def _described(path: Path) -> dict[str, Any]:
    found = path.stat()
    kind = "directory" if path.is_dir() else "file"
    return {"name": path.name, "size": found.st_size, "type": kind, "mod_time": found.st_mtime}


@contextlib.contextmanager
def pod(folder: Path, *, port: int = 8888) -> Generator[str]:
    """A server whose files are in a folder; its address."""
    handler = type("Own", (Handler,), {"folder": folder})
    server = ThreadingHTTPServer((serving.address(), port), handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield str(server.server_address[0])
    finally:
        server.shutdown()
        thread.join(PATIENCE)
        server.server_close()
