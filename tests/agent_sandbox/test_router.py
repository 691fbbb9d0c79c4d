"""The router over plain HTTP: hostile requests, sandboxd's routes, and constant memory."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.gateway import http_gateways
from tests.gateway.http_gateways import HttpGateway

pytestmark = pytest.mark.timeout(300)
PATIENCE = 60.0
CLAIMS = "/apis/extensions.agents.x-k8s.io/v1beta1/namespaces/default/sandboxclaims"
SANDBOXES = "/apis/agents.x-k8s.io/v1beta1/namespaces/default/sandboxes"
CLAIM = {"metadata": {"name": "one"}, "spec": {"warmPoolRef": {"name": "default"}}}


class Stage(NamedTuple):
    """A gateway with one sandbox."""

    gateway: HttpGateway
    web: httpx2.Client
    sandbox: str

    def ask(
        self, method: str, path: str, headers: dict[str, str] | None = None, **more: Any
    ) -> httpx2.Response:
        """A request to the router, for the sandbox unless ``headers`` say otherwise."""
        named = {"x-sandbox-id": self.sandbox, **(headers or {})}
        return self.web.request(method, f"/router{path}", headers=named, **more)

    def files(self, method: str, path: str, **more: Any) -> httpx2.Response:
        """A request to sandboxd's routes."""
        return self.ask(method, f"/v1/files/{path}", {"x-sandbox-port": "8080"}, **more)

    def memory(self) -> int:
        """The most bytes that the gateway has used at once."""
        with open(f"/proc/{self.gateway.process.pid}/status") as found:
            lines = dict(line.split(":", 1) for line in found)
        return int(lines["VmHWM"].split()[0]) << 10


@pytest.fixture(scope="module")
def stage() -> Generator[Stage]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started(K8E_RUNTIME="container") as gateway:
        caller = gateway.key("somebody")
        base = f"{gateway.root}/agent-sandbox"
        with httpx2.Client(base_url=base, headers=caller.headers, timeout=PATIENCE) as web:
            made = web.post(CLAIMS, json=CLAIM)
            assert made.status_code == 201, made.text
            yield Stage(gateway, web, ready(web, "one"))


def ready(web: httpx2.Client, name: str) -> str:
    """The sandbox of a claim, once it is ready."""
    asked = {"watch": "true", "fieldSelector": f"metadata.name={name}", "timeoutSeconds": "150"}
    with web.stream("GET", CLAIMS, params=asked, timeout=150) as events:
        for line in events.iter_lines():
            found = json.loads(line)["object"]["status"]
            if any(item["status"] == "True" for item in found.get("conditions", ())):
                return found["sandbox"]["name"]
    raise AssertionError("the claim never became ready")


AMBIGUOUS = [
    [("x-sandbox-id", "b"), ("X-Sandbox-ID", "c")],
    [("x-sandbox-port", "1"), ("x-sandbox-port", "1")],
    [("x_sandbox_id", "b")],
]
MALFORMED = [
    {"x-sandbox-id": ""},
    {"x-sandbox-id": "../../etc"},
    {"x-sandbox-id": "a.b"},
    {"x-sandbox-id": "UPPER"},
    {"x-sandbox-id": "a@evil.example"},
    {"x-sandbox-namespace": "a/b"},
    {"x-sandbox-port": "0"},
    {"x-sandbox-port": "65536"},
    {"x-sandbox-port": "+80"},
    {"x-sandbox-port": "8_0"},
    {"x-sandbox-timeout": "nan"},
    {"x-sandbox-timeout": "-1"},
    {"x-sandbox-timeout": "1e999"},
]


@pytest.mark.parametrize("headers", AMBIGUOUS, ids=str)
def test_a_header_that_could_mean_two_things_is_refused(
    stage: Stage, headers: list[tuple[str, str]]
) -> None:
    found = stage.web.get("/router/exists/a", headers=[("x-sandbox-id", stage.sandbox), *headers])
    assert found.status_code == 400
    assert "ambiguous" in found.json()["detail"]


@pytest.mark.parametrize("headers", MALFORMED, ids=str)
def test_a_malformed_header_is_refused(stage: Stage, headers: dict[str, str]) -> None:
    assert stage.ask("GET", "/exists/a", headers).status_code == 400


def test_forged_headers_change_nothing(stage: Stage) -> None:
    forged = {
        "x-sandbox-pod-ip": "169.254.169.254",
        "x-forwarded-for": "10.0.0.1",
        "x-forwarded-host": "evil.example",
        "forwarded": "for=10.0.0.1;host=evil.example",
        "x-real-ip": "10.0.0.1",
    }
    found = stage.ask("POST", "/execute", forged, json={"command": "echo mine"})
    assert found.json()["stdout"] == "mine\n"


def test_a_sandbox_is_only_found_in_its_own_namespace(stage: Stage) -> None:
    for headers in ({"x-sandbox-namespace": "other"}, {"x-sandbox-uid": "other"}):
        assert stage.ask("GET", "/exists/a", headers).status_code == 404
    assert stage.ask("GET", "/exists/a", {"x-sandbox-id": "sess-nobody"}).status_code == 404
    assert stage.web.get(f"{SANDBOXES}/{stage.sandbox}").status_code == 200
    elsewhere = SANDBOXES.replace("default", "other")
    assert stage.web.get(f"{elsewhere}/{stage.sandbox}").status_code == 404


def test_requests_without_a_key_are_refused(stage: Stage) -> None:
    for authorization in ("", "Bearer wrong", "Basic a2V5"):
        headers = {"authorization": authorization}
        assert stage.ask("GET", "/exists/a", headers).status_code == 401
        assert stage.web.get(CLAIMS, headers=headers).status_code == 401


OUTSIDE = [
    "..%2F..%2Fetc%2Fpasswd",
    "a%2F..%2F..%2Fetc%2Fpasswd",
    "%2Fworkspace%2F..%2F..%2Fetc%2Fshadow",
    "a%00b",
]


@pytest.mark.parametrize("path", OUTSIDE)
def test_a_path_that_leads_out_of_the_folder_is_refused(stage: Stage, path: str) -> None:
    for route in ("download", "list", "exists"):
        assert stage.ask("GET", f"/{route}/{path}").status_code == 403
    for method in ("GET", "PUT", "DELETE"):
        found = stage.files(method, path)
        assert (found.status_code, found.json()["code"]) == (403, "PERMISSION_DENIED")
    name = {"file": ("../../etc/x", b"data")}
    assert stage.ask("POST", "/upload", files=name).status_code == 403


def test_an_absolute_path_and_an_encoded_one_stay_in_the_sandbox(stage: Stage) -> None:
    assert stage.ask("GET", "/download/%2Fetc%2Fpasswd").status_code == 404
    assert stage.ask("GET", "/download/%252e%252e%252fetc").status_code == 404


MALFORMED_BODIES = [
    b"",
    b"{",
    b"[]",
    b'{"command": ""}',
    b'{"command": 1}',
    b'{"command": "a\\u0000b"}',
    b'{"command": "id", "timeout_seconds": -1}',
    b'{"command": "id", "timeout_seconds": "1"}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("body", MALFORMED_BODIES, ids=range(len(MALFORMED_BODIES)))
def test_a_malformed_command_is_refused(stage: Stage, body: bytes) -> None:
    assert stage.ask("POST", "/execute", content=body).status_code == 422


def test_a_malformed_form_is_refused(stage: Stage) -> None:
    kind = {"content-type": "multipart/form-data; boundary=x"}
    cut = b'--x\r\nContent-Disposition: form-data; name="file"; filename="cut"\r\n\r\nhalf'
    for body in (b"", b"nonsense", b"--x\r\n", cut, b"--x\r\nA: " + b"a" * 100_000):
        assert stage.ask("POST", "/upload", kind, content=body).status_code in (400, 413)
    assert stage.ask("POST", "/upload", content=b"x").status_code == 400
    assert stage.ask("GET", "/exists/cut").json() == {"exists": False}, "half a file is no file"


def test_large_files_pass_in_constant_memory(stage: Stage) -> None:
    piece = os.urandom(1 << 20)

    def content() -> Iterator[bytes]:
        for _ in range(300):
            yield piece

    before = stage.memory()
    assert stage.files("PUT", "large.bin", content=content()).status_code == 204
    path = "/router/download/large.bin"
    count = 0
    with stage.web.stream("GET", path, headers={"x-sandbox-id": stage.sandbox}) as answer:
        assert answer.headers["content-length"] == str(300 << 20)
        for part in answer.iter_raw():
            count += len(part)
    assert count == 300 << 20
    assert stage.memory() - before < 64 << 20
    assert stage.files("DELETE", "large.bin").status_code == 204


def test_a_client_that_leaves_ends_its_command(stage: Stage) -> None:
    where = urlsplit(stage.gateway.root)
    body = b'{"command": "echo $$ > began; sleep 600; echo late > ended"}'
    head = (
        f"POST /agent-sandbox/router/execute HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Authorization: {stage.web.headers['authorization']}\r\n"
        f"X-Sandbox-ID: {stage.sandbox}\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), PATIENCE) as client:
        client.sendall(head.encode() + body)
        wait = "until [ -s began ]; do sleep 0.1; done"
        stage.ask("POST", "/execute", json={"command": wait, "timeout_seconds": PATIENCE})
    wait = "while kill -0 $(cat began) 2>/dev/null; do sleep 0.1; done; echo ended"
    found = stage.ask("POST", "/execute", json={"command": wait, "timeout_seconds": PATIENCE})
    assert found.json()["stdout"] == "ended\n"


def test_an_answer_that_comes_too_late_is_a_504(stage: Stage) -> None:
    late = {"command": "sleep 600"}
    found = stage.ask("POST", "/execute", {"x-sandbox-timeout": "0.5"}, json=late)
    assert found.status_code == 504


def test_sandboxd_keeps_files(stage: Stage) -> None:
    data = bytes(range(256)) * 100
    assert stage.files("PUT", "d%2Fe%2Fdata.bin?mode=0600", content=data).status_code == 204
    assert stage.files("GET", "d%2Fe%2Fdata.bin").content == data
    assert stage.files("HEAD", "d%2Fe%2Fdata.bin").status_code == 200
    assert stage.files("HEAD", "d%2Fnone").status_code == 404
    listed = stage.files("GET", "d%2Fe").json()
    assert listed["path"] == "d/e"
    (entry,) = listed["entries"]
    assert entry["modified_at"].endswith("Z")
    shown = {key: entry[key] for key in ("name", "size", "type", "mode")}
    assert shown == {"name": "data.bin", "size": len(data), "type": "file", "mode": "0600"}
    assert stage.files("DELETE", "d").status_code == 409
    assert stage.files("DELETE", "d?recursive=true").status_code == 204
    assert stage.files("DELETE", "d").status_code == 404
    assert stage.files("GET", "").json()["path"] == "."
    assert stage.files("DELETE", "").status_code == 400
    health = stage.ask("GET", "/v1/health", {"x-sandbox-port": "8080"})
    assert health.json() == {"status": "ok"}


MALFORMED_CLAIMS: list[Any] = [
    [],
    {},
    {"metadata": {"name": "UPPER"}, "spec": {"warmPoolRef": {"name": "default"}}},
    {"metadata": {"name": "a" * 300}, "spec": {"warmPoolRef": {"name": "default"}}},
    {"metadata": {"name": "a"}, "spec": {"warmPoolRef": "default"}},
    {"metadata": {"name": "a", "labels": {"a": 1}}, "spec": {"warmPoolRef": {"name": "default"}}},
    {**CLAIM, "spec": {**CLAIM["spec"], "env": [1]}},
    {**CLAIM, "spec": {**CLAIM["spec"], "env": {"a": "b"}}},
    {**CLAIM, "spec": {**CLAIM["spec"], "lifecycle": {"shutdownTime": "soon"}}},
    {**CLAIM, "spec": {**CLAIM["spec"], "lifecycle": {"shutdownPolicy": "Keep"}}},
    {**CLAIM, "spec": {**CLAIM["spec"], "lifecycle": {"ttlSecondsAfterFinished": -1}}},
]


@pytest.mark.parametrize("claim", MALFORMED_CLAIMS, ids=range(len(MALFORMED_CLAIMS)))
def test_a_malformed_claim_is_refused_with_a_status(stage: Stage, claim: Any) -> None:
    found = stage.web.post(CLAIMS, json=claim)
    assert found.status_code == 422
    assert found.json()["kind"] == "Status"
    assert found.json()["reason"] == "Invalid"


def test_a_claim_that_is_too_large_is_refused(stage: Stage) -> None:
    large = {**CLAIM, "metadata": {"name": "large", "annotations": {"a": "x" * 20_000}}}
    assert stage.web.post(CLAIMS, json=large).status_code == 413
    assert stage.web.post(CLAIMS, content=b"x" * 100_000).status_code == 413


def test_other_routes_of_kubernetes_are_not_there(stage: Stage) -> None:
    for path in ("/api/v1/namespaces/default/pods", "/apis/apps/v1/deployments", "/nothing"):
        found = stage.web.get(path)
        assert (found.status_code, found.json()["reason"]) == (404, "NotFound")
    assert stage.web.delete(CLAIMS).status_code == 405
    assert stage.web.get(f"{CLAIMS}?watch=true&resourceVersion=1").status_code == 410


def test_a_sandbox_is_suspended_and_runs_again_with_its_memory(stage: Stage) -> None:
    stage.ask("POST", "/execute", json={"command": "echo kept > /tmp/kept"})
    path = f"{SANDBOXES}/{stage.sandbox}"
    suspended = stage.web.patch(path, json={"spec": {"operatingMode": "Suspended"}})
    reasons = {item["type"]: item["reason"] for item in suspended.json()["status"]["conditions"]}
    assert reasons == {"Ready": "SandboxSuspended", "Suspended": "PodTerminated"}
    assert stage.ask("POST", "/execute", json={"command": "true"}).status_code == 409
    claim = stage.web.get(f"{CLAIMS}/one").json()
    assert claim["status"]["conditions"][0]["reason"] == "SandboxSuspended"
    stage.web.patch(path, json={"spec": {"operatingMode": "Running"}})
    found = stage.ask("POST", "/execute", json={"command": "cat /tmp/kept"})
    assert found.json()["stdout"] == "kept\n"
    assert stage.web.patch(path, json={"spec": {"replicas": 0}}).status_code == 422


SERVER = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        text = f"{self.command} {self.path}\\n{self.headers}\\n{body.decode()}".encode()
        self.send_response(201)
        self.send_header("Set-Cookie", "a=b")
        self.send_header("X-Own", "kept")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)
    do_GET = do_POST
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", 3000), Handler).serve_forever()
"""


def test_other_ports_lead_to_the_sandboxs_own_server(stage: Stage) -> None:
    assert stage.ask("GET", "/", {"x-sandbox-port": "3001"}).status_code == 502
    stage.files("PUT", "server.py", content=SERVER.encode())
    start = (
        "setsid python3 server.py >/dev/null 2>&1 & "
        "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 3000))' "
        "2>/dev/null; do sleep 0.1; done"
    )
    assert stage.ask("POST", "/execute", json={"command": start}).json()["exit_code"] == 0
    headers = {"x-sandbox-port": "3000", "x-forwarded-for": "1.2.3.4", "x-own": "mine"}
    found = stage.ask("POST", "/a%2Fb/c?d=%20", headers, content=b"the body")
    assert found.status_code == 201
    assert found.headers["x-own"] == "kept"
    assert "set-cookie" not in found.headers
    first, *lines = found.text.lower().splitlines()
    assert first == "post /a%2fb/c?d=%20"
    assert lines[-1] == "the body"
    names = {line.partition(":")[0] for line in lines[:-1] if line}
    assert "x-own" in names
    assert not {name for name in names if name.startswith(("x-sandbox", "x-forwarded"))}
    assert "authorization" not in names


WEBSOCKET_SERVER = """
import base64, hashlib, socket, sys
listener = socket.create_server(("127.0.0.1", 3002))
client, _ = listener.accept()
stream = client.makefile("rb")
head = b"".join(iter(stream.readline, b"\\r\\n")).decode()
key = next(line[18:].strip() for line in head.splitlines() if line.lower()[4:17] == "websocket-key")
digest = hashlib.sha1((key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11").encode()).digest()
client.sendall(b"HTTP/1.1 101 Switching Protocols\\r\\nConnection: Upgrade\\r\\n"
    b"Upgrade: websocket\\r\\n"
    b"Sec-WebSocket-Accept: " + base64.b64encode(digest) + b"\\r\\n\\r\\n")
while data := client.recv(65536):
    client.sendall(data)
"""


def test_a_websocket_reaches_a_server_in_the_sandbox(stage: Stage) -> None:
    stage.files("PUT", "websocket.py", content=WEBSOCKET_SERVER.encode())
    start = (
        "setsid python3 websocket.py >/dev/null 2>&1 & "
        "until grep -q ':0BBA ' /proc/net/tcp; do sleep 0.1; done"  # 3002 listens
    )
    stage.ask("POST", "/execute", json={"command": start, "timeout_seconds": PATIENCE})
    where = urlsplit(stage.gateway.root)
    head = (
        f"GET /agent-sandbox/router/ws HTTP/1.1\r\nHost: {where.netloc}\r\n"
        f"Authorization: {stage.web.headers['authorization']}\r\n"
        f"X-Sandbox-ID: {stage.sandbox}\r\nX-Sandbox-Port: 3002\r\n"
        "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
        "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
    )
    with socket.create_connection((where.hostname, where.port), PATIENCE) as client:
        client.sendall(head.encode())
        stream = client.makefile("rb")
        assert stream.readline() == b"HTTP/1.1 101 Switching Protocols\r\n"
        lines = b"".join(iter(stream.readline, b"\r\n"))
        assert b"s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" in lines
        for size in (1, 1000, 65_000):
            message = b"\x82\x7e" + size.to_bytes(2, "big") + b"x" * size
            client.sendall(message)
            assert stream.read(len(message)) == message
    assert stage.ask("POST", "/execute", json={"command": "true"}).json()["exit_code"] == 0
