"""A package index of our own, far away in a small internet of network namespaces."""

from __future__ import annotations

import contextlib
import http.server
import io
import os
import shutil
import tempfile
import zipfile
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.conformance.lab.ports import free_port
from tests.egress.internet import RESOLVER, Internet
from tests.places import Place

INDEX = "93.184.216.34"
ENVIRONMENT = {
    "PIP_INDEX_URL": "http://index.test/simple/",
    "PIP_TRUSTED_HOST": "index.test",
    "PIP_RETRIES": "0",
}
HOSTS = ["index.test:80"]


def wheel(version: str) -> bytes:
    """The package ``k8e-demo``: a module, and a program that prints its version."""
    info = f"k8e_demo-{version}.dist-info"
    files = {
        "k8e_demo.py": f"version = {version!r}\ndef main():\n    print('demo', version)\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: k8e-demo\nVersion: {version}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\nk8e-demo = k8e_demo:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in files) + f"{info}/RECORD,,\n"
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


WHEELS = {f"k8e_demo-{version}-py3-none-any.whl": wheel(version) for version in ("1.0", "2.0")}


class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        if self.path == "/simple/k8e-demo/":
            links = "".join(f'<a href="/files/{wheel}">{wheel}</a>\n' for wheel in WHEELS)
            self._send(f"<!DOCTYPE html><html><body>{links}</body></html>".encode(), "text/html")
        elif name in WHEELS:
            self._send(WHEELS[name], "application/octet-stream")
        else:
            self.send_error(404)

    def _send(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
        pass


@contextlib.contextmanager
def indexed() -> Generator[Place]:
    """A place whose sandboxes can reach the index."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces and the local runtimes need root")
    folder = Path(tempfile.mkdtemp(prefix="k8e-index-"))
    internet = Internet(folder)
    internet.own(INDEX)
    internet.names["index.test"] = [INDEX]
    internet.serve(("::", 80), Index)
    place = Place(
        K8E_LISTEN=f"127.0.0.1:{free_port()}",
        K8E_RESOLVERS=RESOLVER,
        K8E_UPLINK_NAMESPACE=str(internet.world),
    )
    try:
        place.json("gateway", "--background")
        yield place
    finally:
        try:
            place.close()
        finally:
            internet.close()
            shutil.rmtree(folder)
