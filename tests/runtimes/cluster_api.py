"""A stand-in for the API server, with no more of it than what a gateway asks for sandboxes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import yaml

from k8e.distro import certificates
from k8e.distro.certificates import Subject
from tests.runtimes.pods import Issuer

Object = dict[str, Any]
_KINDS = {
    "namespaces": "Namespace",
    "serviceaccounts": "ServiceAccount",
    "networkpolicies": "NetworkPolicy",
    "sandboxtemplates": "SandboxTemplate",
    "sandboxwarmpools": "SandboxWarmPool",
}


class ClusterApi:
    """Objects by their paths. A claim may be held up until a test lets it be made."""

    def __init__(self, issuer: Issuer) -> None:
        self.objects: dict[str, Object] = {}
        self.asked = asyncio.Event()
        """Set when a claim is asked for."""
        self.watched = asyncio.Event()
        """Set when pods are watched."""
        self.lets = asyncio.Event()
        """Set when claims may be made."""
        self.lets.set()
        self._issuer = issuer
        self._watchers: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                method, target, _ = head.split(" ", 2)
                length = head.lower().partition("content-length: ")[2].partition("\r")[0]
                body = await reader.readexactly(int(length or 0))
                if "watch=1" in target:
                    writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n")
                    self.watched.set()
                    self._watchers.append((reader, writer))  # the loop drops one without the other
                    return
                status, found = await self._answer(method, target.partition("?")[0], body)
                data = json.dumps(found).encode()
                writer.write(b"HTTP/1.1 %d -\r\nContent-Length: %d\r\n\r\n" % (status, len(data)))
                writer.write(data)
        writer.close()

    async def _answer(self, method: str, path: str, body: bytes) -> tuple[int, Object]:
        if method == "GET":
            return await self._get(path)
        if method == "DELETE":
            if (gone := self.objects.pop(path, None)) is None:
                return 404, {"message": "there is none"}
            if "/pods/" in path:
                self.say("DELETED", gone)
            return 200, {}
        made = json.loads(body)
        if method == "POST":
            self.asked.set()
            await self.lets.wait()
            path += f"/{made['metadata']['name']}"
            made["metadata"]["uid"] = f"uid-of-{made['metadata']['name']}"
        self.objects[path] = made
        return 200, made

    async def _get(self, path: str) -> tuple[int, Object]:
        if path in ("/.well-known/openid-configuration", "/openid/v1/jwks"):
            issuer, keys = await self._issuer.fetch()
            return 200, keys if path.endswith("jwks") else {"issuer": issuer}
        if path in self.objects:
            return 200, self.objects[path]
        if path.count("/") == (2 if path.startswith("/api/") else 3):
            rows = [
                {"name": name, "kind": kind, "namespaced": kind != "Namespace"}
                for name, kind in _KINDS.items()
            ]
            return 200, {"resources": rows}
        if path.endswith(("/pods", "/sandboxtemplates")):
            items = [item for name, item in self.objects.items() if name.startswith(f"{path}/")]
            return 200, {"metadata": {"resourceVersion": "1"}, "items": items}
        return 404, {"message": "there is none"}

    async def say_to_all(self, kind: str, found: Object) -> None:
        """Tell it when there is somebody who watches."""
        await self.watched.wait()
        self.say(kind, found)

    def say(self, kind: str, found: Object) -> None:
        """Tell all who watch pods."""
        event = json.dumps({"type": kind, "object": found}).encode() + b"\n"
        for _, writer in self._watchers:
            writer.write(event)

    def put_pod(self, pod: Object) -> None:
        """Have a pod before anybody asks."""
        metadata = pod["metadata"] = {**pod["metadata"], "resourceVersion": "2"}
        self.objects[f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}"] = pod

    def close(self) -> None:
        for _, writer in self._watchers:
            writer.close()


@contextlib.asynccontextmanager
async def cluster_api(folder: Path, issuer: Issuer) -> AsyncGenerator[tuple[ClusterApi, Path]]:
    """The stand-in and a kubeconfig for it, for as long as the block runs."""
    signer = certificates.authority(folder, "ca")
    certificates.leaf(signer, Subject("web", hosts=("127.0.0.1",)), folder / "web", days=1)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "web.crt", folder / "web.key")
    found = ClusterApi(issuer)
    listener = await asyncio.start_server(found.serve, "127.0.0.1", 0, ssl=context)
    server = f"https://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    cluster = {"server": server, "certificate-authority": str(folder / "ca.crt")}
    config = {
        "clusters": [{"name": "c", "cluster": cluster}],
        "users": [{"name": "u", "user": {"token": "t"}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    kubeconfig = folder / "kubeconfig"
    kubeconfig.write_text(yaml.safe_dump(config), "utf-8")
    try:
        yield found, kubeconfig
    finally:
        found.close()
        listener.close()
