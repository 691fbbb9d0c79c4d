"""Sandboxes of conversations over REST: what a client sees of them from the first to the last."""

from __future__ import annotations

import base64
import concurrent.futures
import json
import os
import ssl
from typing import Any

import httpx2
import pytest

from k8e.gateway import tls
from tests.rest import gateways
from tests.rest.gateways import Rest

pytestmark = pytest.mark.timeout(300)


def test_the_three_lines_of_the_kit_work_without_a_credential(rest: Rest) -> None:
    body = json.dumps({"user_id": "user-123", "conversation_id": "conv-456"})
    url = f"{rest.gateway.root}/sandbox"
    curl = ["curl", "-sS", "-X", "POST", url, "-H", "Content-Type: application/json", "-d", body]
    made = _curl(*curl)
    assert made["conversation_id"] == "conv-456"
    assert {"sandbox_id", "conversation_id", "status", "token"} <= set(made)
    seen = _curl("curl", "-sS", f"{url}/{made['sandbox_id']}")
    assert (seen["sandbox_id"], seen["status"]) == (made["sandbox_id"], "running")
    gone = _curl("curl", "-sS", "-X", "DELETE", f"{url}/{made['sandbox_id']}")
    assert gone["status"] == "ended"
    assert _curl("curl", "-sS", f"{url}/{made['sandbox_id']}")["status"] == "ended"


def _curl(*command: str) -> dict[str, Any]:
    import subprocess

    done = subprocess.run(command, check=True, capture_output=True, timeout=gateways.PATIENCE)
    return json.loads(done.stdout)


def test_twenty_who_open_a_conversation_at_once_get_one_sandbox(rest: Rest) -> None:
    with concurrent.futures.ThreadPoolExecutor(20) as threads:
        opened = list(threads.map(rest.open, ["crowd"] * 20))
    assert len({item["sandbox_id"] for item in opened}) == 1
    again = rest.ask("POST", "/sandbox", {"user_id": "ada", "conversation_id": "crowd"})
    assert again.status_code == 200
    listed = rest.told("GET", "/sandbox", params={"conversation_id": "crowd"})
    assert len(listed["sandboxes"]) == 1


def test_a_conversation_whose_sandbox_has_ended_gets_another_one(rest: Rest) -> None:
    first = rest.open("again")
    rest.told("DELETE", f"/sandbox/{first['sandbox_id']}")
    answer = rest.ask("POST", "/sandbox", {"user_id": "ada", "conversation_id": "again"})
    assert answer.status_code == 201
    assert answer.json()["sandbox_id"] != first["sandbox_id"]


def test_a_conversation_has_one_user_and_one_kind_of_sandbox(rest: Rest, sandbox: str) -> None:
    body = {"user_id": "eve", "conversation_id": "shared"}
    assert "another user's" in rest.refused(409, "POST", "/sandbox", body)["detail"]
    body = {"user_id": "ada", "conversation_id": "shared", "env": {"A": "1"}}
    assert "different" in rest.refused(409, "POST", "/sandbox", body)["detail"]


def test_pages_have_every_sandbox_once(rest: Rest) -> None:
    made = [rest.open(f"page-{number}", user="pages")["sandbox_id"] for number in range(3)]
    seen: list[str] = []
    cursor: dict[str, Any] = {}
    while True:
        page = rest.told("GET", "/sandbox", params={"user_id": "pages", "limit": 2, **cursor})
        seen += [item["sandbox_id"] for item in page["sandboxes"]]
        if page["cursor"] is None:
            break
        cursor = {"cursor": page["cursor"]}
    assert seen == made
    rest.told("DELETE", f"/sandbox/{made[0]}")
    ended = rest.told("GET", "/sandbox", params={"user_id": "pages", "status": "ended"})
    assert [item["sandbox_id"] for item in ended["sandboxes"]] == made[:1]


def test_a_program_that_fails_is_an_answer(rest: Rest, sandbox: str) -> None:
    found = rest.run(sandbox, "echo out; echo err >&2; exit 7")
    assert (found["exit_code"], found["stdout"], found["stderr"]) == (7, "out\n", "err\n")
    found = rest.run(sandbox, "sleep 60", timeout=0.5)
    assert found["status"] == "timed_out"
    code = {"code": "import os, sys; print(os.environ['A'], sys.stdin.read())", "stdin": "in"}
    found = rest.told("POST", f"/sandbox/{sandbox}/exec", {**code, "env": {"A": "1"}})
    assert found["stdout"] == "1 in\n"
    argv = {"command": ["printf", "%s", "a b"], "cwd": "/tmp"}
    assert rest.told("POST", f"/sandbox/{sandbox}/exec", argv)["stdout"] == "a b"


def test_output_can_be_any_bytes(rest: Rest, sandbox: str) -> None:
    found = rest.run(sandbox, r"printf '\377\000\n'", encoding="base64")
    assert base64.b64decode(found["stdout"]) == b"\xff\x00\n"
    assert rest.run(sandbox, r"printf '\377'")["stdout"] == "\ufffd"
    cut = rest.run(sandbox, "yes | head -c 100000", output_limit=1000)
    assert (len(cut["stdout"]), cut["truncated"]) == (1000, True)


def _events(answer: httpx2.Response) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    name = ""
    for line in answer.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            found.append((name, json.loads(line.removeprefix("data: "))))
    return found


def test_output_is_streamed_as_it_comes(rest: Rest, sandbox: str) -> None:
    command = "printf '\\303'; sleep 0.2; printf '\\244'; echo e >&2; exit 3"
    path = f"/sandbox/{sandbox}/exec/stream"
    with rest.http.stream("POST", path, json={"command": command}) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        told = _events(answer)
    assert "".join(data["data"] for name, data in told if name == "stdout") == "ä"
    assert [data["data"] for name, data in told if name == "stderr"] == ["e\n"]
    assert told[-1][0] == "exit"
    assert told[-1][1]["exit_code"] == 3


def test_a_program_ends_with_the_client_that_streams_it(rest: Rest, sandbox: str) -> None:
    path = f"/sandbox/{sandbox}/exec/stream"
    with rest.http.stream("POST", path, json={"command": "echo on; exec sleep 4321"}) as answer:
        assert "stdout" in next(answer.iter_lines())
    found = rest.run(
        sandbox,
        "for n in $(seq 100); do pgrep -f 'sleep 432[1]' || exit 0; sleep 0.1; done; exit 1",
    )
    assert found["exit_code"] == 0, found


def test_files_of_any_size_and_bytes_go_in_and_out(rest: Rest, sandbox: str) -> None:
    data = os.urandom(3 << 20)
    place = f"/sandbox/{sandbox}/files/content"
    put = rest.http.put(place, params={"path": "a/b ü.bin"}, content=data)
    assert put.json() == {"path": "/workspace/a/b ü.bin", "size": len(data)}
    got = rest.http.get(place, params={"path": "/workspace/a/b ü.bin"})
    assert got.content == data
    assert got.headers["content-length"] == str(len(data))
    listed = rest.told("GET", f"/sandbox/{sandbox}/files", params={"path": "a"})
    assert [item["path"] for item in listed["files"]] == ["/workspace/a/b ü.bin"]
    info = rest.told("GET", f"/sandbox/{sandbox}/files/info", params={"path": "a"})
    assert info["type"] == "dir"
    files = f"/sandbox/{sandbox}/files"
    assert rest.refused(409, "DELETE", files, params={"path": "a"})["code"] == "ENOTEMPTY"
    gone = rest.ask("DELETE", files, params={"path": "a", "recursive": "true"})
    assert (gone.status_code, gone.content) == (204, b"")
    missing = rest.refused(404, "GET", place, params={"path": "a/b ü.bin"})
    assert missing["code"] == "ENOENT"
    assert "GET /sandbox" in missing["hint"]


def test_a_sandbox_is_paused_resumed_and_extended(rest: Rest) -> None:
    made = rest.open("naps")
    place = f"/sandbox/{made['sandbox_id']}"
    assert rest.told("POST", f"{place}/pause")["status"] == "paused"
    assert rest.refused(409, "POST", f"{place}/exec", {"command": "true"})["code"] == (
        "session_paused"
    )
    assert rest.told("POST", f"{place}/resume")["status"] == "running"
    longer = rest.told("POST", f"{place}/extend", {"lifetime": 90_000})
    assert longer["expires_at"] > made["expires_at"]


def test_what_a_sandbox_may_reach_is_shown_and_changed(rest: Rest, sandbox: str) -> None:
    place = f"/sandbox/{sandbox}/egress"
    put = rest.told("PUT", place, {"allowed_hosts": ["a.example"]})
    assert put["allowed_hosts"] == ["a.example"]
    rest.told("PATCH", place, {"add": ["b.example"], "remove": ["a.example"]})
    assert rest.told("GET", place)["allowed_hosts"] == ["b.example"]
    assert rest.refused(400, "PUT", place, {"allowed_hosts": ["http://x"]})["detail"]
    kinds = [item["kind"] for item in rest.told("GET", f"/sandbox/{sandbox}/events")["events"]]
    assert kinds.count("egress.changed") == 2


def test_a_port_of_a_sandbox_can_be_reached(rest: Rest, sandbox: str) -> None:
    place = f"/sandbox/{sandbox}/ports"
    made = rest.told("POST", place, {"port": 8123})
    assert made["url"].startswith("http://127.")
    assert [item["port"] for item in rest.told("GET", place)["ports"]] == [8123]
    assert rest.told("DELETE", f"{place}/8123") == {"ports": []}
    assert rest.refused(404, "DELETE", f"{place}/8123")["code"] == "not_exposed"
    assert rest.refused(404, "DELETE", f"{place}/x")["code"] == "not_exposed"


# Callers.


def test_a_sandbox_of_somebody_else_looks_like_none(rest: Rest, sandbox: str) -> None:
    other = rest.key("other")
    theirs = other.refused(404, "GET", f"/sandbox/{sandbox}")
    nobodys = other.refused(404, "GET", f"/sandbox/{sandbox[:-1]}0")
    assert theirs["detail"].replace(sandbox, "") == nobodys["detail"].replace(
        f"{sandbox[:-1]}0", ""
    )
    assert other.told("GET", "/sandbox")["sandboxes"] == []
    mine = other.open("shared", user="eve")
    assert mine["sandbox_id"] != sandbox  # a conversation belongs to whoever has the key
    other.told("DELETE", f"/sandbox/{mine['sandbox_id']}")


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"origin": "https://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({"sec-fetch-site": "cross-site"}, 403),
        ({"sec-fetch-site": "none"}, 401),
        ({"sec-fetch-mode": "navigate"}, 401),
        ({"host": "evil.example"}, 421),
        ({"authorization": "Bearer wrong"}, 401),
        ({"authorization": "Basic eDp5"}, 401),
        ({"authorization": ""}, 401),
        ({"content-type": "text/plain"}, 401),
        ({"content-type": "application/x-www-form-urlencoded"}, 401),
        ({"content-type": "multipart/form-data; boundary=x"}, 401),
    ],
    ids=str,
)
def test_web_pages_and_wrong_credentials_are_not_our_own_user(
    rest: Rest, headers: dict[str, str], status: int
) -> None:
    content = json.dumps({"user_id": "page", "conversation_id": "page"})
    given = {"content-type": "application/json", **headers}
    answer = rest.http.post("/sandbox", content=content, headers=given)
    gateways.problem(answer, status)
    assert rest.told("GET", "/sandbox", params={"user_id": "page"})["sandboxes"] == []


def test_another_user_of_this_machine_needs_a_key(rest: Rest) -> None:
    import subprocess

    done = subprocess.run(
        ["curl", "-sS", f"{rest.gateway.root}/sandbox"],
        user="nobody", group="nogroup", capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert (told["status"], "does not serve uid" in told["detail"]) == (401, True)


def test_our_own_user_is_trusted_with_sandboxes_alone(rest: Rest) -> None:
    for path in ("/metrics", "/healthz"):
        assert rest.http.get(path).status_code == 401
    assert rest.http.post("/mcp", json={}).status_code == 401


def test_without_the_setting_our_own_user_needs_a_credential_too() -> None:
    with gateways.started(K8E_HTTP_TRUST_LOCAL="0") as closed:
        assert "API key" in closed.refused(401, "GET", "/sandbox")["hint"]
        assert "k8e.rest" not in closed.gateway.modules()
        keyed = closed.key("agent")
        assert keyed.told("GET", "/sandbox")["sandboxes"] == []
        assert "k8e.rest.http" in closed.gateway.modules()
        approver = closed.key("approver", "approver")
        assert approver.refused(403, "GET", "/sandbox")["code"] == "denied"


def test_every_answer_has_the_id_of_its_request_which_is_in_log_and_audit(
    rest: Rest, sandbox: str
) -> None:
    chosen = {"x-request-id": "my-request.1"}
    answer = rest.ask("POST", f"/sandbox/{sandbox}/exec", {"command": "true"}, headers=chosen)
    assert answer.headers["x-request-id"] == "my-request.1"
    found = gateways.rows(rest.gateway, "my-request.1")
    assert {item["action"] for item in found} >= {"exec.started"}
    log = (rest.gateway.place.data / "gateway.log").read_text()
    assert "POST /sandbox/{sandbox_id}/exec 200, request my-request.1" in log
    odd = {"x-request-id": "x" * 65}
    assert rest.ask("GET", "/sandbox", headers=odd).headers["x-request-id"].startswith("req-")


def test_on_an_address_that_others_reach_only_tls_is_spoken() -> None:
    with gateways.started(K8E_HTTP="0.0.0.0:0") as rest:
        assert rest.gateway.root.startswith("https://0.0.0.0:")
        port = rest.gateway.root.rpartition(":")[2]
        authority = rest.gateway.place.data / "tls" / tls.CA_CERT
        secured = ssl.create_default_context(cafile=str(authority))
        key = rest.key("remote").http.headers["authorization"]
        with httpx2.Client(base_url=f"https://127.0.0.1:{port}", verify=secured) as client:
            assert client.get("/sandbox", headers={"authorization": key}).status_code == 200
            # Who is at the other end of TLS is nobody's to say by an address.
            gateways.problem(client.get("/sandbox"), 401)
        with pytest.raises(httpx2.HTTPError):
            httpx2.get(f"http://127.0.0.1:{port}/sandbox")


# Requests that are malformed.


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (b"", ""),
        (b"{", ""),
        (b"[1]", ""),
        (b"nan", ""),
        (b'{"user_id": "a"}', "conversation_id"),
        (b'{"user_id": "a", "conversation_id": "c", "more": 1}', "more"),
        (b'{"user_id": "a", "conversation_id": "a/b"}', "conversation_id"),
        (b'{"user_id": "a", "conversation_id": "../x"}', "conversation_id"),
        (b'{"user_id": 7, "conversation_id": "c"}', "user_id"),
        (b'{"user_id": "a", "conversation_id": ""}', "conversation_id"),
        (b'{"user_id": "\\ud800", "conversation_id": "c"}', ""),
        (b'{"user_id": "a", "conversation_id": "c", "lifetime": NaN}', "lifetime"),
        (b'{"user_id": "a", "conversation_id": "c", "lifetime": -1}', "lifetime"),
        (b"[" * 100_000, ""),
        (b"\xff\xfe", ""),
    ],
    ids=str,
)
def test_a_malformed_body_is_refused_with_the_place(rest: Rest, body: bytes, where: str) -> None:
    headers = {"content-type": "application/json"}
    told = gateways.problem(rest.http.post("/sandbox", content=body, headers=headers), 400)
    assert told["hint"]
    assert where in [item["field"] for item in told["errors"]]


def test_ten_mebibytes_of_conversation_id_are_refused(rest: Rest) -> None:
    body = json.dumps({"user_id": "a", "conversation_id": "c" * (10 << 20)})
    headers = {"content-type": "application/json"}
    answer = rest.http.post("/sandbox", content=body, headers=headers)
    assert gateways.problem(answer, 413)["code"] == "too_large"
    rest.refused(400, "POST", "/sandbox", {"user_id": "a", "conversation_id": "c" * 129})


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/sandbox/a%2Fb", 404),
        ("GET", "/sandbox/..%2f..%2fetc", 404),
        ("GET", "/sandbox/UPPER", 404),
        ("GET", "/sandbox/%00", 404),
        ("GET", "/sandbox/a/b/c/d", 404),
        ("GET", f"/sandbox/{'a' * 51}", 404),
        ("PUT", "/sandbox", 405),
        ("POST", "/sandbox/sess-1/egress", 405),
        ("GET", "/sandbox?limit=0", 400),
        ("GET", "/sandbox?limit=1&limit=2", 400),
        ("GET", "/sandbox?more=1", 400),
        ("GET", "/sandbox?cursor=AAAA", 400),
        ("GET", "/sandbox?cursor=%%%", 400),
        ("GET", "/sandbox/sess-1", 404),
    ],
)
def test_a_path_or_query_that_leads_nowhere_is_refused(
    rest: Rest, method: str, path: str, status: int
) -> None:
    rest.refused(status, method, path)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"command": "x", "code": "y"},
        {"command": "x", "language": "python"},
        {"command": []},
        {"command": " "},
        {"code": "x", "language": "cobol"},
        {"command": "x", "timeout": 0},
        {"command": "x", "env": {"A=B": "1"}},
        {"command": "x\0y"},
    ],
    ids=str,
)
def test_a_run_that_cannot_be_is_refused(rest: Rest, sandbox: str, body: dict[str, Any]) -> None:
    rest.refused(400, "POST", f"/sandbox/{sandbox}/exec", body)
    rest.refused(400, "POST", f"/sandbox/{sandbox}/exec/stream", body)


def test_a_body_that_is_not_json_is_refused(rest: Rest, sandbox: str) -> None:
    headers = {"content-type": "application/xml"}
    answer = rest.http.post(f"/sandbox/{sandbox}/exec", content=b"<x/>", headers=headers)
    assert gateways.problem(answer, 415)["code"] == "unsupported_media_type"
