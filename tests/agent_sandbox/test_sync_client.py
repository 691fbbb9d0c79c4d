"""The unmodified synchronous client against a gateway on one machine, without Kubernetes."""

from __future__ import annotations

import os
from collections.abc import Generator
from typing import NamedTuple

import pytest

from tests.agent_sandbox import upstream
from tests.agent_sandbox.upstream import Upstream
from tests.gateway import http_gateways
from tests.gateway.http_gateways import Caller, HttpGateway

pytestmark = pytest.mark.timeout(300)
RUNTIMES = ("container", "gvisor")


class Served(NamedTuple):
    """A gateway, and a client of one principal."""

    gateway: HttpGateway
    client: Upstream
    caller: Caller


@pytest.fixture(scope="module", params=RUNTIMES)
def served(request: pytest.FixtureRequest) -> Generator[Served]:
    if os.geteuid() != 0:
        pytest.skip("the local runtimes need root")
    with http_gateways.started(K8E_RUNTIME=request.param) as gateway:
        caller = gateway.key("somebody")
        names = {"server": f"{gateway.root}/agent-sandbox", "token": _token(caller)}
        with upstream.started(None, **names) as client:
            yield Served(gateway, client, caller)


def _token(caller: Caller) -> str:
    return caller.headers["authorization"].removeprefix("Bearer ")


def test_a_claim_gives_a_sandbox_that_runs_commands_and_ends_with_it(served: Served) -> None:
    told = served.client.sync("""
        sandboxes = connect()
        sandbox = sandboxes.create_sandbox("default", labels={"app": "test"}, env={"WHO": "you"})
        runs = [sandbox.commands.run(text).model_dump() for text in (
            "echo hello $WHO", "echo oops >&2; exit 3", "no-such-program")]
        result = {
            "runs": runs,
            "status": sandbox.status(),
            "pod": sandbox.get_pod_name() == sandbox.sandbox_id,
            "listed": sandboxes.list_all_sandboxes(label_selector="app=test"),
            "others": sandboxes.list_all_sandboxes(label_selector="app=other"),
            "claim": sandbox.claim_name,
            "again": sandboxes.get_sandbox(sandbox.claim_name).sandbox_id == sandbox.sandbox_id,
            "pool": sandboxes.get_sandbox_claim_warmpool_name(
                sandbox.claim_name, "default"),
        }
        sandbox.terminate()
        result["left"] = sandboxes.list_all_sandboxes()
        try:
            sandboxes.get_sandbox(sandbox.claim_name, resolve_timeout=1)
        except SandboxNotFoundError:
            result["gone"] = True
    """)
    hello, oops, missing = told["runs"]
    assert (hello["stdout"], hello["exit_code"]) == ("hello you\n", 0)
    assert (oops["stderr"], oops["exit_code"]) == ("oops\n", 3)
    assert missing["exit_code"] == 127
    assert told["status"] == ["SandboxReady", "Pod is Ready"]
    assert told["listed"] == [told["claim"]]
    assert (told["others"], told["left"]) == ([], [])
    assert told["pool"] == "default"
    assert all(told[key] for key in ("pod", "again", "gone"))
    assert served.gateway.place.json("sandbox", "sessions")["sessions"] == []


def test_files_keep_every_byte(served: Served) -> None:
    told = served.client.sync("""
        import hashlib, io
        sandbox = connect().create_sandbox("default")
        data = bytes(range(256)) * 20_000
        sandbox.files.write("deep/folder/data.bin", data)
        sandbox.files.write("streamed.bin", io.BytesIO(data))
        sandbox.files.write("text é.txt", "grüße")
        target = io.BytesIO()
        count = sandbox.files.read_to("streamed.bin", target)
        result = {
            "same": sandbox.files.read("deep/folder/data.bin") == data == target.getvalue(),
            "count": count == len(data),
            "text": sandbox.files.read("text é.txt").decode(),
            "sum": sandbox.commands.run("sha256sum deep/folder/data.bin").stdout.split()[0]
                == hashlib.sha256(data).hexdigest(),
            "root": sorted(
                (e.name, e.type, e.size) for e in sandbox.files.list(".") if e.type == "file"),
            "below": [e.name for e in sandbox.files.list("deep")],
            "exists": [sandbox.files.exists(p) for p in ("deep", "streamed.bin", "none", "none/x")],
        }
        sandbox.files.write("empty", b"")
        result["empty"] = sandbox.files.read("empty") == b""
        try:
            sandbox.files.read("none")
        except SandboxRequestError as error:
            result["missing"] = error.status_code
        sandbox.terminate()
    """)
    assert all(told[key] for key in ("same", "count", "sum", "empty"))
    assert told["text"] == "grüße"
    size = 256 * 20_000
    assert told["root"] == [["streamed.bin", "file", size], ["text é.txt", "file", 7]]
    assert told["below"] == ["folder"]
    assert told["exists"] == [True, True, False, False]
    assert told["missing"] == 404


def test_a_command_that_takes_too_long_is_ended_and_large_output_is_cut_off(served: Served) -> None:
    told = served.client.sync("""
        sandbox = connect().create_sandbox("default")
        slow = sandbox.commands.run("echo begun; sleep 600", command_timeout=0.5)
        large = sandbox.commands.run("head -c 3000000 /dev/zero | tr '\\\\0' x; echo done >&2")
        larger = sandbox.commands.run("head -c 30000000 /dev/zero | tr '\\\\0' x; echo done >&2")
        result = {
            "slow": slow.model_dump(),
            "large": [len(large.stdout), large.stderr],
            "larger": [len(larger.stdout), larger.stdout[-80:], larger.stderr],
        }
        sandbox.terminate()
    """)
    assert told["slow"]["timed_out"]
    assert told["slow"]["stdout"] == "begun\n"
    assert told["slow"]["exit_code"] == 124
    assert told["large"] == [3_000_000, "done\n"]
    size, tail, stderr = told["larger"]
    assert size < 5 << 20
    assert "cut off" in tail
    assert "done" in stderr


def test_an_unknown_pool_is_told_at_once_and_leaves_no_claim(served: Served) -> None:
    told = served.client.sync("""
        sandboxes = connect()
        result = {}
        for pool in ("no-such-pool", "No.Such_Pool"):
            try:
                sandboxes.create_sandbox(pool)
            except SandboxWarmPoolNotFoundError as error:
                result[pool] = str(error)
        result["left"] = sandboxes.list_all_sandboxes()
    """)
    assert set(told) == {"no-such-pool", "No.Such_Pool", "left"}
    assert told["left"] == []


def test_a_claim_name_is_taken_once_and_can_be_adopted(served: Served) -> None:
    told = served.client.sync("""
        first, second = connect(), connect()
        sandbox = first.create_sandbox("default", claim_name="mine")
        result = {"id": sandbox.sandbox_id}
        try:
            second.create_sandbox("default", claim_name="mine")
        except kubernetes.ApiException as error:
            result["conflict"] = error.status
        adopted = second.create_sandbox("default", claim_name="mine", adopt_existing=True)
        result["adopted"] = adopted.sandbox_id
        result["elsewhere"] = second.list_all_sandboxes(namespace="other")
        sandbox.terminate()
        again = second.create_sandbox("default", claim_name="mine")
        result["again"] = again.sandbox_id
        again.terminate()
    """)
    assert told["conflict"] == 409
    assert told["adopted"] == told["id"]
    assert told["again"] != told["id"]
    assert told["elsewhere"] == []


def test_a_claim_ends_at_its_shutdown_time(served: Served) -> None:
    told = served.client.sync("""
        from kubernetes import watch
        sandboxes = connect()
        sandbox = sandboxes.create_sandbox("default", shutdown_after_seconds=4)
        watching = watch.Watch()
        kinds = []
        for event in watching.stream(
            sandboxes.k8s_helper.custom_objects_api.list_namespaced_custom_object,
            group="extensions.agents.x-k8s.io", version="v1beta1", namespace="default",
            plural="sandboxclaims", timeout_seconds=60,
        ):
            kinds.append(event["type"])
            if event["type"] == "DELETED":
                watching.stop()
        result = {"kinds": kinds, "left": sandboxes.list_all_sandboxes()}
    """)
    assert told["kinds"][-1] == "DELETED"
    assert told["left"] == []


def test_principals_do_not_see_each_other(served: Served) -> None:
    other = served.gateway.key("stranger")
    told = served.client.sync(
        """
        mine, theirs = connect(), connect(other)
        sandbox = mine.create_sandbox("default", claim_name="private")
        sandbox.files.write("secret", b"1234")
        result = {"listed": theirs.list_all_sandboxes()}
        api = theirs.k8s_helper
        result["claim"] = api.get_sandbox_claim("private", "default")
        result["sandbox"] = api.get_sandbox(sandbox.sandbox_id, "default")
        handle = theirs.sandbox_class(
            claim_name="private", sandbox_id=sandbox.sandbox_id, namespace="default",
            connection_config=theirs.connection_config, tracer_config=None, k8s_helper=api)
        def status(work):
            try:
                work()
            except SandboxRequestError as error:
                return error.status_code
        result["read"] = status(lambda: handle.files.read("secret"))
        result["run"] = status(lambda: handle.commands.run("id"))
        api.delete_sandbox_claim("private", "default")  # a claim that is not there is no error
        same_name = theirs.create_sandbox("default", claim_name="private")
        result["own"] = same_name.sandbox_id != sandbox.sandbox_id
        result["alive"] = sandbox.files.read("secret").decode()
        same_name.terminate()
        sandbox.terminate()
        """,
        other=_token(other),
    )
    assert told["listed"] == []
    assert told["claim"] is None
    assert told["sandbox"] is None
    assert (told["read"], told["run"]) == (404, 404)
    assert told["own"]
    assert told["alive"] == "1234"


def test_a_wrong_token_opens_nothing(served: Served) -> None:
    told = served.client.sync("""
        sandboxes = connect("k8e-" + "0" * 64)
        result = {}
        try:
            sandboxes.create_sandbox("default")
        except kubernetes.ApiException as error:
            result["claim"] = error.status
        handle = sandboxes.sandbox_class(
            claim_name="x", sandbox_id="sess-x", namespace="default", tracer_config=None,
            connection_config=sandboxes.connection_config, k8s_helper=sandboxes.k8s_helper)
        try:
            handle.commands.run("id")
        except SandboxRequestError as error:
            result["run"] = error.status_code
    """)
    assert told == {"claim": 401, "run": 401}


def test_a_kubeconfig_file_is_all_that_the_client_needs(served: Served) -> None:
    place = served.gateway.place
    made = place.json("kubeconfig")
    assert made["server"] == f"{served.gateway.root}/agent-sandbox"
    file = place.home / ".k8e" / "agent-sandbox.yaml"
    assert file.stat().st_mode & 0o777 == 0o600
    with upstream.started({"KUBECONFIG": str(file)}) as client:
        told = client.run("""
            from kubernetes import client, config
            from k8s_agent_sandbox import SandboxClient
            from k8s_agent_sandbox.models import SandboxDirectConnectionConfig
            config.load_kube_config()
            shown = client.Configuration.get_default_copy()
            bearer = shown.get_api_key_with_prefix("BearerToken", "authorization")
            direct = SandboxDirectConnectionConfig(
                api_url=shown.host + "/router", extra_headers={"Authorization": bearer})
            with SandboxClient(direct) as sandboxes:
                result = sandboxes.create_sandbox("default").commands.run("echo it works").stdout
        """)
    assert told == "it works\n"
    assert "kubeconfig --rotate" in place.error("kubeconfig")
    before = file.read_text()
    place.json("kubeconfig", "--rotate")
    assert file.read_text() != before
