"""Keys, logins and profiles by the command, and that a key is never sent to a stranger."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from k8e._generated import sandbox_pb2 as pb
from k8e.conformance.lab.ports import free_port
from k8e.gateway import issuer
from tests.places import NewPlace, Place

WRONG = "k8e-" + "1" * 64


@pytest.fixture
def far(place: Place, tmp_path: Path) -> dict[str, Any]:
    """The environment of another machine, from which the shared gateway can be reached."""
    place.json("sandbox", "status")
    place.wait_for_grpc()
    return {
        "HOME": str(tmp_path),
        "K8E_DATA_DIR": str(tmp_path / "data"),
        "K8E_RUN_DIR": str(tmp_path / "run"),
    }


@pytest.fixture
def key(place: Place) -> Generator[str]:
    made = place.json("sandbox", "api-key", "create", "tester")
    yield made["key"]
    place.cli("sandbox", "api-key", "delete", "tester")


@pytest.fixture
def login(place: Place) -> list[str]:
    found = place.json("gateway", "fingerprint")["fingerprint"]
    target = ["--endpoint", place.environ["K8E_LISTEN"]]
    return ["sandbox", "login", *target, "--ca-fingerprint", found]


@pytest.mark.parametrize("command", [["sandbox", "api-key"], ["sandbox-apikey"]])
def test_keys_are_made_listed_and_deleted(place: Place, command: list[str]) -> None:
    made = place.json(*command, "create", "ci", "--ttl", "12h", "--role", "approver")
    assert set(made) == {
        *("created_at", "e2b_key", "expires_at", "key", "name", "roles", "ttl_days")
    }
    assert made["key"].startswith("k8e-")
    assert made["e2b_key"] == "e2b_" + made["key"]
    assert (made["ttl_days"], made["roles"]) == (0.5, ["approver"])
    assert made["expires_at"] - made["created_at"] == 12 * 3600
    assert "already" in place.error(*command, "create", "ci")
    (listed,) = [item for item in place.json(*command, "list")["keys"] if item["name"] == "ci"]
    assert "key" not in listed
    rotated = place.json(*command, "rotate", "ci", "--ttl", "90d")
    assert (rotated["name"], rotated["roles"], rotated["ttl_days"]) == ("ci", ["approver"], 90)
    assert rotated["key"] != made["key"]
    assert place.json(*command, "delete", "ci") == {"name": "ci", "ok": True}
    assert "there is no key" in place.error(*command, "delete", "ci")
    assert "there is no key" in place.error(*command, "rotate", "ci")
    limited = place.json(*command, "create", "ci", "--max-sessions", "3", "--rate", "2.5")
    assert (limited["max_sessions"], limited["rate"]) == (3, 2.5)
    place.json(*command, "delete", "ci")
    assert "sessions" in place.error(*command, "create", "ci", "--max-sessions", "-1")
    assert "30d, 12h or never" in place.error(*command, "create", "ci", "--ttl", "soon")


def test_the_fingerprint_is_in_the_status_too(place: Place) -> None:
    place.json("sandbox", "status")
    place.wait_for_grpc()
    told = place.json("gateway", "fingerprint")
    assert told["fingerprint"] == place.json("status")["ca_fingerprint"]
    assert told["ca_file"] == str(place.data / "tls/ca.crt")


def test_without_a_ca_there_is_no_fingerprint(place: Place, tmp_path: Path) -> None:
    assert "no CA yet" in place.error("gateway", "fingerprint", K8E_DATA_DIR=str(tmp_path))


def test_a_login_makes_a_profile_that_needs_nothing_else(
    place: Place, far: dict[str, Any], key: str, login: list[str], tmp_path: Path
) -> None:
    told = place.json(*login, "--apikey", key, "--profile", "work", **far)
    folder = tmp_path / ".k8e/sandbox/profiles/work"
    assert told == {
        "cert_dir": str(folder),
        "device_name": told["device_name"],
        "endpoint": place.environ["K8E_LISTEN"],
        "profile": "work",
        "valid_days": 30,
    }
    for name in ("ca.crt", "client.crt", "client.key", "endpoint"):
        assert (folder / name).stat().st_mode & 0o777 == 0o600
    assert (folder / "ca.crt").read_bytes() == (place.data / "tls/ca.crt").read_bytes()
    assert key not in (tmp_path / ".k8e/sandbox/profiles.yaml").read_text()
    assert place.json("sandbox", "run", "echo far", **far)["stdout"] == "far\n"
    assert place.json("sandbox", "profiles", **far)["current_profile"] == "work"
    # Renewing needs neither key nor fingerprint.
    before = (folder / "client.crt").read_bytes()
    place.json("sandbox", "login", "--device-name", "new", **far)
    assert (folder / "client.crt").read_bytes() != before
    assert place.json("sandbox", "sessions", **far)["sessions"]
    place.json("sandbox", "api-key", "delete", "tester")
    assert "key tester was deleted" in place.error("sandbox", "sessions", **far)
    assert not (tmp_path / "run").exists(), "no gateway was started here"


def test_a_key_comes_from_a_file_or_from_stdin(
    place: Place, far: dict[str, Any], key: str, login: list[str], tmp_path: Path
) -> None:
    file = tmp_path / "key.txt"
    file.write_text(f"{key}\n")
    place.json(*login, "--apikey-file", str(file), "--profile", "work", **far)
    assert place.json("sandbox", "run", "echo far", **far)["stdout"] == "far\n"
    target = ["--endpoint", place.environ["K8E_LISTEN"]]
    anew: dict[str, Any] = far | {"K8E_SANDBOX_CERT": str(place.data / "tls/ca.crt")}
    told = place.json(
        "sandbox", "sessions", *target, "--apikey-file", "-", stdin=key.encode(), **anew
    )
    assert told["sessions"]
    told = place.json(*login, "--apikey-file", "-", "--key-only", stdin=f"{key}\n".encode(), **far)
    assert Path(told["cert_dir"], "api_key").read_text() == f"{key}\n"


@pytest.mark.parametrize(
    ("flags", "stdin", "message"),
    [
        (["--apikey-file", "/no/such"], "", "cannot be read from /no/such"),
        (["--apikey-file", "/dev/null"], "", "no API key in /dev/null"),
        (["--apikey-file", "-"], "\n", "no API key in stdin"),
        (["--apikey-file", "-", "--apikey", "k"], "k", "two ways"),
    ],
)
def test_a_file_without_a_key_is_refused(
    place: Place, far: dict[str, Any], flags: list[str], stdin: str, message: str
) -> None:
    command = ["sandbox", "sessions", "--endpoint", "127.0.0.1:9", *flags]
    assert message in place.error(*command, stdin=stdin.encode(), **far)


def test_a_key_does_not_come_by_the_stdin_that_speaks_mcp(
    place: Place, far: dict[str, Any]
) -> None:
    assert "stdin is the client's" in place.error("sandbox-mcp", "--apikey-file", "-", **far)


def test_nobody_is_shown_a_command_with_a_key_in_it() -> None:
    folder = Path(__file__).parents[2]
    files = [*folder.glob("src/k8e/**/*.py"), *folder.glob("docs/**/*.md"), folder / "README.md"]
    shown = re.compile(r"--apikey[ =](KEY|\$|[\"']|k8e-)")
    assert len(files) > 300
    assert [str(path) for path in files if shown.search(path.read_text())] == []


def test_a_profile_is_chosen_by_flag_variable_and_command(
    place: Place, far: dict[str, Any], key: str, login: list[str]
) -> None:
    place.json(*login, "--apikey", key, "--profile", "work", **far)
    assert place.json("sandbox", "profiles", "use", "none", **far)["current_profile"] == ""
    (listed,) = place.json("sandbox", "profiles", **far)["profiles"]
    assert listed["name"] == "work"
    flag = place.json("sandbox", "run", "--profile", "work", "echo 1", **far)
    assert flag["stdout"] == "1\n"
    named = place.json("sandbox", "run", "echo 2", K8E_SANDBOX_PROFILE="work", **far)
    assert named["session_id"] == flag["session_id"]
    assert "no profile 'x'" in place.error("sandbox", "profiles", "use", "x", **far)
    assert place.json("sandbox", "profiles", "use", "work", **far)["ok"]
    assert place.json("sandbox", "run", "echo 3", **far)["stdout"] == "3\n"


def test_a_cert_dir_of_the_environment_is_used(
    place: Place, far: dict[str, Any], key: str, login: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "certs"
    place.json(*login, "--apikey", key, K8E_SANDBOX_CERT_DIR=str(folder), **far)
    environ: dict[str, Any] = far | {
        "K8E_SANDBOX_CERT_DIR": str(folder),
        "K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"],
    }
    assert place.json("sandbox", "run", "echo 1", **environ)["stdout"] == "1\n"
    pair: dict[str, Any] = far | {
        "K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"],
        "K8E_SANDBOX_CERT": str(folder / "client.crt"),
        "K8E_SANDBOX_KEY": str(folder / "client.key"),
        "K8E_SANDBOX_CA": str(folder / "ca.crt"),
    }
    assert place.json("sandbox", "run", "echo 2", **pair)["stdout"] == "2\n"


@pytest.mark.parametrize(
    ("more", "code", "error"),
    [
        (["--apikey", WRONG], 1, "this API key is not known here"),
        (["--apikey", "nonsense"], 1, "not an API key"),
        (["--apikey", "a\nb"], 1, "characters that no key has"),
        ([], 1, "this call came with none"),
        (["--apikey", WRONG, "--key-only"], 1, "this API key is not known here"),
        (["--key-only"], 1, "no API key to keep"),
        (["--ca-fingerprint", "sha256:" + "0" * 64], 1, "has another fingerprint: sha256:"),
        (["--ca-fingerprint", "sha1:12"], 1, "is not a fingerprint"),
    ],
)
def test_a_login_that_fails_leaves_nothing_behind(
    place: Place,
    far: dict[str, Any],
    login: list[str],
    tmp_path: Path,
    more: list[str],
    code: int,
    error: str,
) -> None:
    assert error in place.error(*login, *more, code=code, **far)
    assert not (tmp_path / ".k8e").exists()


def test_a_login_to_nowhere_says_what_is_missing(place: Place, far: dict[str, Any]) -> None:
    assert "no gateway is named" in place.error("sandbox", "login", **far)
    told = place.error("sandbox", "login", "--endpoint", f"127.0.0.1:{free_port()}", code=2, **far)
    assert "cannot be reached" in told


# Strangers.


class Middleman(NamedTuple):
    """Somebody in between, who tells the right CA and waits for a key."""

    address: str
    heard: list[str]
    """Names of the metadata of all calls."""


@contextmanager
def middleman(folder: Path, ca: str) -> Generator[Middleman]:
    heard: list[str] = []

    def unary(request: bytes, context: Any) -> bytes:
        heard.extend(item.key for item in context.invocation_metadata())
        return pb.GetCACertResponse(cert=ca).SerializeToString()

    def stream(requests: Any, context: Any) -> Iterator[bytes]:
        heard.extend(item.key for item in context.invocation_metadata())
        return iter(())

    calls: dict[str, Any] = {
        "GetCACert": grpc.unary_unary_rpc_method_handler(unary),
        "Login": grpc.unary_unary_rpc_method_handler(unary),
        "Run": grpc.stream_stream_rpc_method_handler(stream),
    }
    issuer.make(folder)
    pair = ((folder / "server.key").read_bytes(), (folder / "server.crt").read_bytes())
    server = grpc.server(futures.ThreadPoolExecutor(2))
    handler = grpc.method_handlers_generic_handler("sandbox.v1.SandboxService", calls)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([pair]))
    server.start()
    try:
        yield Middleman(f"127.0.0.1:{port}", heard)
    finally:
        server.stop(0).wait(10)


@pytest.mark.parametrize("pinned", ["nothing", "right", "middleman's"])
def test_a_key_is_never_sent_to_somebody_in_between(
    place: Place, far: dict[str, Any], key: str, login: list[str], tmp_path: Path, pinned: str
) -> None:
    issuer.make(tmp_path / "evil")
    own = tmp_path / "evil/ca.crt" if pinned == "middleman's" else place.data / "tls/ca.crt"
    with middleman(tmp_path / "evil", own.read_text()) as someone:
        command = ["sandbox", "login", "--endpoint", someone.address, "--apikey", key]
        command += [] if pinned == "nothing" else login[-2:]
        told = place.error(*command, code=1 if pinned == "middleman's" else 2, **far)
        if pinned == "nothing":
            assert "fingerprint" in told
            assert someone.heard == []
        run: dict[str, Any] = {"K8E_SANDBOX_ENDPOINT": someone.address, "K8E_SANDBOX_APIKEY": key}
        assert place.cli("sandbox", "run", "true", **far, **run).returncode == 2
        assert not {"authorization", "x-api-key"} & set(someone.heard)


def test_an_approver_s_key_approves_by_the_command(new_place: NewPlace) -> None:
    place = new_place(K8E_LISTEN=f"127.0.0.1:{free_port()}")
    early = place.json("sandbox", "api-key", "create", "early", "--role", "approver")["key"]
    agent = place.json("sandbox", "api-key", "create", "agent")["key"]
    place.wait_for_grpc()
    secret = str(place.folder / "secret")
    place.json("approver", "init", "--file", secret)
    command = ["sandbox", "api-key", "create", "boss", "--role", "approver"]
    assert "approver's secret" in place.error(*command)
    assert "not the approver's secret" in place.error(*command, K8E_APPROVER_SECRET="guessed")
    boss = place.json(*command, "--secret-file", secret)["key"]
    remote: dict[str, Any] = {"K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"]}
    by_agent, by_boss = ({**remote, "K8E_SANDBOX_APIKEY": key} for key in (agent, boss))
    made = place.json("sandbox", "create", "--runtime", "container", **by_agent)["session_id"]
    gone = place.error("sandbox", "approvals", code=1, **{**remote, "K8E_SANDBOX_APIKEY": early})
    assert "key" in gone, "it was made without the secret, by whoever manages keys"
    asked = place.cli("sandbox", "confirm", "--no-wait", made, "pay", **by_agent)
    approval_id = json.loads(asked.stdout)["approval_id"]
    refused = place.cli("sandbox", "approve", approval_id, **by_agent)
    assert b"needs the role" in refused.stdout
    assert place.json("sandbox", "approvals", **by_boss)["approvals"][0]["action"] == "pay"
    done = place.cli("sandbox", "approve", approval_id, **by_boss)
    assert json.loads(done.stdout) == {"advisory": False, "ok": True}
    assert "needs the role agent" in place.error("sandbox", "run", "true", **by_boss)
