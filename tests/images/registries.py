"""Debian's docker-registry as a process of the tests, with the ways of asking who one is."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.x509.oid import NameOID

from k8e.conformance.lab.ports import free_port
from tests.places import eventually

UNPACKED = Path(__file__).resolve().parents[2] / ".venv/packages/usr/bin"
"""Where ``make test`` puts programs that only tests need."""
USER, PASSWORD = "k8e", "secret"
HTPASSWD = f"{USER}:$2b$04$nl7cyrlJrXpF5kqtqhPNQ.YqWm3mx8Gns/L9zRfyrh7o1L7q.3tgG\n"
BASIC = "Basic " + base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()


def program(name: str, *others: str) -> Path:
    """A program of a package that only tests need; without it, they are skipped."""
    for candidate in (UNPACKED / name, UNPACKED.parents[1] / "bin" / name):
        if candidate.exists():
            return candidate
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; make test gets it where there is apt-get")
    return Path(found)


@contextmanager
def running(folder: Path, auth: dict[str, Any] | None = None) -> Generator[str]:
    """A registry of its own; its host and port."""
    folder.mkdir()
    address = f"127.0.0.1:{free_port()}"
    config = {
        "version": 0.1,
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "data")}},
        "http": {"addr": address},
        **({"auth": auth} if auth else {}),
    }
    (folder / "config.yml").write_text(json.dumps(config))  # YAML, too
    with open(folder / "log", "wb") as log:
        process = subprocess.Popen(
            [program("docker-registry"), "serve", str(folder / "config.yml")],
            stdout=log,
            stderr=log,
            env={"PATH": "/usr/bin:/bin", "OTEL_TRACES_EXPORTER": "none"},
        )
    try:
        eventually(lambda: _answers(address), 20)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def _answers(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def with_password(folder: Path) -> dict[str, Any]:
    """The configuration of a registry that asks for a password."""
    file = folder / "htpasswd"
    file.write_text(HTPASSWD)
    return {"htpasswd": {"realm": "tests", "path": str(file)}}


def docker_config(file: Path, host: str) -> Path:
    """The operator's file with the password for a registry."""
    auth = BASIC.removeprefix("Basic ")
    file.write_text(json.dumps({"auths": {host: {"auth": auth}}, "credsStore": "nothing"}))
    return file


class Tokens:
    """A server that gives tokens for a registry to those who know the password."""

    def __init__(self, folder: Path) -> None:
        self.asked: list[str] = []
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._certificate = _certificate(self._key)
        self.bundle = folder / "tokens.pem"
        pem = self._certificate.public_bytes(serialization.Encoding.PEM)
        self.bundle.write_bytes(pem)
        self._server = serve(self._answer)
        self.realm = f"http://127.0.0.1:{self._server.server_port}/token"

    def auth(self) -> dict[str, Any]:
        return {
            "token": {
                "realm": self.realm,
                "service": "tests",
                "issuer": "tests",
                "rootcertbundle": str(self.bundle),
            }
        }

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> tuple[int, dict[str, str], bytes]:
        self.asked.append(request.path)
        if request.headers.get("Authorization") != BASIC:
            return 401, {}, b"{}"
        return 200, {}, json.dumps({"token": self.make("pull")}).encode()

    def make(self, *actions: str) -> str:
        now = int(time.time())
        encoded = self._certificate.public_bytes(serialization.Encoding.DER)
        head = {"typ": "JWT", "alg": "ES256", "x5c": [base64.b64encode(encoded).decode()]}
        access = [{"type": "repository", "name": "tools", "actions": list(actions)}]
        body = {
            "iss": "tests",
            "aud": "tests",
            "sub": USER,
            "nbf": now - 60,
            "iat": now - 60,
            "exp": now + 300,
            "jti": "1",
            "access": access,
        }
        text = f"{_base64(json.dumps(head).encode())}.{_base64(json.dumps(body).encode())}"
        signed = self._key.sign(text.encode(), ec.ECDSA(hashes.SHA256()))
        numbers = utils.decode_dss_signature(signed)
        return f"{text}.{_base64(b''.join(number.to_bytes(32, 'big') for number in numbers))}"


def _base64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _certificate(key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
    import datetime

    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "tests")])
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )


def serve(answer: Any) -> ThreadingHTTPServer:
    """A web server on loopback; ``answer(request)`` gives status, headers and body."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, body = answer(self)
            self.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(key, value)
            self.end_headers()
            with suppress(ConnectionError):  # a client may have heard enough
                self.wfile.write(body)

        def log_request(self, code: object = "-", size: object = "-") -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
