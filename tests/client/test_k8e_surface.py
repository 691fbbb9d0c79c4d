"""A program that was written for K8E's Python SDK: nothing is changed but the import."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Generator

import pytest

import k8e
from k8e import SandboxClient, sandbox_session
from tests.places import NewPlace, Place

# Everything below is written as K8E's documents have it: positional arguments, str in and out.


@pytest.fixture
def gateway(place: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    """K8E's clients find their gateway by the environment."""
    place.json("sandbox", "status")
    place.wait_for_grpc()
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(place.data / "tls" / "ca.crt"))
    monkeypatch.setenv("K8E_SANDBOX_ENDPOINT", place.environ["K8E_LISTEN"])
    return place


@pytest.fixture
def sid(gateway: Place) -> Generator[str]:
    with SandboxClient() as client:
        session = client.create_session()
        yield session
        client.destroy_session(session)


def alive(place: Place) -> set[str]:
    return {item["session_id"] for item in place.json("sandbox", "sessions")["sessions"]}


def test_the_endpoint_is_argument_then_environment(gateway: Place) -> None:
    with SandboxClient(gateway.environ["K8E_LISTEN"]) as client:
        assert client.run("echo by argument").stdout == "by argument\n"
    with SandboxClient(None, "") as client:
        assert client.run("echo by environment").stdout == "by environment\n"


def test_run_gives_stdout_stderr_and_a_true_exit_code(gateway: Place) -> None:
    with SandboxClient() as client:
        result = client.run("echo out; echo err >&2; exit 3", "bash", 30)
        assert (result.stdout, result.stderr, result.exit_code) == ("out\n", "err\n", 3)
        assert client.run("print(40 + 2)", language="python", timeout=10).stdout == "42\n"
        assert client.run("print(1)", "python3").stdout == "1\n"
        assert client.run("console.log(6 * 7)", "node").stdout == "42\n"
        assert client.run("console.log(1)", "nodejs").stdout == "1\n"


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("x = 1\nfor i in range(2):\n    x += i\nprint(x)", "2\n"),
        ('print("it\'s" + \' "quoted"\')', 'it\'s "quoted"\n'),
        ("print('$HOME `id` $(id) \\\\ %s')", "$HOME `id` $(id) \\ %s\n"),
        ('print("""a\n\'b\' "c" $d""")', "a\n'b' \"c\" $d\n"),
    ],
)
def test_python_of_any_lines_and_quotes_runs_as_it_is(
    gateway: Place, code: str, printed: str
) -> None:
    with SandboxClient() as client:
        assert client.run(code, "python").stdout == printed


def test_the_default_session_is_made_late_once_and_shared_among_threads(gateway: Place) -> None:
    before = alive(gateway)
    client = SandboxClient()
    assert alive(gateway) == before, "nothing is made before it is needed"
    seen: list[str] = []

    def work(number: int) -> None:
        client.run(f"echo {number} > file-{number}")
        seen.append(client.run("ls | wc -l").session_id)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    (session,) = set(seen)
    assert len(seen) == 8
    assert alive(gateway) - before == {session}
    assert client.run("ls").stdout.split() == [f"file-{number}" for number in range(8)]
    client.close()
    assert alive(gateway) == before, "close destroys the session that the client made"
    client.close()


def test_a_client_with_a_tenant_leaves_its_session(gateway: Place) -> None:
    client = SandboxClient(tenant_id="acme")
    first = client.run("echo kept > note").session_id
    client.close()
    assert first in alive(gateway)
    with SandboxClient(tenant_id="acme") as client:
        assert client.run("cat note").stdout == "kept\n"
        assert client.get_session(first).tenant_id == "acme"
        client.destroy_session(first)


def test_exec_runs_in_the_workspace(sid: str) -> None:
    with SandboxClient() as client:
        result = client.exec(sid, "pwd; echo $((40 + 2)); false")
        assert (result.stdout, result.exit_code) == ("/workspace\n42\n", 1)
        assert client.exec(sid, "sleep 60", timeout=1).exit_code != 0


def test_exec_stream_yields_text_as_it_comes(sid: str) -> None:
    with SandboxClient() as client:
        chunks = client.exec_stream(sid, "echo one; sleep 0.3; echo two", timeout=300)
        first = next(iter(chunks))
        assert isinstance(first, str)
        assert first == "one\n"
        assert "".join(chunks) == "two\n"


def test_sessions_are_created_and_destroyed(gateway: Place) -> None:
    with SandboxClient() as client:
        sid = client.create_session("gvisor", ["example.com"], "acme")
        assert isinstance(sid, str)
        info = client.get_session(sid)
        assert (info.runtime, info.tenant_id) == ("gvisor", "acme")
        assert client.destroy_session(sid) is None
        other = client.create_session(runtime_class="gvisor", allowed_hosts=None, tenant_id="")
        client.destroy_session(other)
        assert not {sid, other} & alive(gateway)


def test_files_are_written_read_and_listed(sid: str) -> None:
    with SandboxClient() as client:
        before = int(time.time()) - 1
        client.write_file(sid, "/workspace/data/hello.txt", "héllo\n")
        client.write_file(sid, "plain.txt", "x")
        assert client.read_file(sid, "/workspace/data/hello.txt") == "héllo\n"
        listed = {entry.path: entry.modified for entry in client.list_files(sid)}
        assert set(listed) == {"/workspace/data/hello.txt", "/workspace/plain.txt"}
        assert all(isinstance(modified, int) for modified in listed.values())
        assert min(listed.values()) >= before
        assert [entry.path for entry in client.list_files(sid, int(time.time()) + 100)] == []
        assert len(list(client.list_files(sid, since=before))) == 2


def test_pip_install_gives_a_result(sid: str) -> None:
    with SandboxClient() as client:
        result = client.pip_install(sid, ["k8e-no-such-package>=1"])
        assert result.exit_code != 0, "there is no network, and that is no exception"
        assert isinstance(result.stdout + result.stderr, str)
        assert client.exec(sid, "ls =1 2>&1").exit_code != 0, "no shell saw the '>'"


def test_sandbox_session_gives_client_and_session(gateway: Place) -> None:
    with sandbox_session() as (client, sid):
        assert isinstance(client, SandboxClient)
        client.write_file(sid, "main.py", "print('in a session')")
        assert client.exec(sid, "python3 main.py").stdout == "in a session\n"
    assert sid not in alive(gateway)
    endpoint = gateway.environ["K8E_LISTEN"]
    with sandbox_session("container", ["example.com"], endpoint) as (client, sid):
        assert client.get_session(sid).runtime == "container"
        client.destroy_session(sid)  # and leaving the block is no error then
    with pytest.raises(ValueError, match="of the caller"), sandbox_session() as (client, sid):
        raise ValueError("of the caller")
    assert sid not in alive(gateway)


# One run, and nothing to look after.


def test_one_call_runs_code_and_leaves_nothing(gateway: Place) -> None:
    before = alive(gateway)
    result = k8e.run("import sys; print(sys.stdin.read()); sys.exit(5)", "python", stdin="typed")
    assert (result.stdout, result.exit_code) == ("typed\n", 5)
    assert k8e.run("echo $A", env={"A": "b"}, runtime_class="container").stdout == "b\n"
    assert asyncio.run(k8e.arun("echo async", allowed_hosts=[])).stdout == "async\n"
    with pytest.raises(k8e.errors.InvalidRequest):
        k8e.run("x", "cobol")
    with pytest.raises(k8e.errors.InvalidRequest):
        asyncio.run(k8e.arun("x", "cobol"))
    assert alive(gateway) == before


def test_without_any_endpoint_the_host_s_own_gateway_is_started(
    new_place: NewPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = new_place(K8E_RUNTIME="container")
    monkeypatch.delenv("K8E_SANDBOX_ENDPOINT", raising=False)
    for name in ("K8E_DATA_DIR", "K8E_RUN_DIR", "K8E_ALLOWED_HOSTS", "K8E_LISTEN", "K8E_RUNTIME"):
        monkeypatch.setenv(name, place.environ[name])
    assert k8e.run("echo started").stdout == "started\n"
