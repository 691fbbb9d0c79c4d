"""K8E's clients find our CA where they look for K8E's own, and find ours by K8E's recipe."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.client import credentials
from k8e.client.endpoints import Endpoint
from k8e.gateway import tls
from tests.gateway.serving import Running

REPO = Path(__file__).resolve().parents[2]
OURS, NEWER, THEIRS = (
    b"-----BEGIN CERTIFICATE-----\n%s\n-----END CERTIFICATE-----\n" % word
    for word in (b"b3Vycw==", b"bmV3ZXI=", b"dGhlaXJz")
)
# What K8E's published SDK does before its first call, and its first calls.
PROGRAM = """
import os, sys
import grpc
from sandbox.v1 import sandbox_pb2 as pb, sandbox_pb2_grpc as pb_grpc
from sandbox_client import SandboxClient, sandbox_session

assert not [name for name in os.environ if name.startswith("K8E_SANDBOX")]
places = ("/var/lib/k8e/server/tls/serving-kube-apiserver.crt",
          "/etc/k8e/tls/serving-kube-apiserver.crt")
root = next(open(place, "rb").read() for place in places if os.path.exists(place))
credentials = grpc.ssl_channel_credentials(root_certificates=root)
with grpc.secure_channel(sys.argv[1], credentials) as channel:
    stub = pb_grpc.SandboxServiceStub(channel)
    made = stub.CreateSession(pb.CreateSessionRequest(runtime_class="container"))
    asked = pb.ExecRequest(session_id=made.session_id, command="echo by stubs", timeout=30)
    print(stub.Exec(asked).stdout, end="")
    stub.DestroySession(pb.DestroySessionRequest(session_id=made.session_id))
with sandbox_session("container", endpoint=sys.argv[1]) as (client, session_id):
    print(client.exec(session_id, "echo by sandbox_client").stdout, end="")
"""


@pytest.fixture(scope="module")
def stubs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What K8E's recipe makes of our interface, beside ``sandbox_client.py``."""
    folder = tmp_path_factory.mktemp("sdk") / "python"
    folder.mkdir()
    (folder / "sandbox_client.py").write_bytes((REPO / "sdk/python/sandbox_client.py").read_bytes())
    recipe = ["-m", "grpc_tools.protoc", "-I", "proto", f"--python_out={folder}"]
    recipe += [f"--grpc_python_out={folder}", "proto/sandbox/v1/sandbox.proto"]
    subprocess.run([sys.executable, *recipe], cwd=REPO, check=True, timeout=50)
    return folder


def test_k8e_s_sdk_and_stubs_need_no_variable(running: Running, stubs: Path) -> None:
    """In a mount namespace in which the gateway's data folder is the usual one."""
    data = running.folder / "d"
    program = stubs / "program.py"
    program.write_text(PROGRAM)
    script = (
        "mount --make-rprivate / && mount -t tmpfs tmpfs /var/lib && mkdir /var/lib/k8e && "
        'mount --bind "$0" /var/lib/k8e && exec "$@"'
    )
    python = [sys.executable, str(program), running.address]
    environ = {key: value for key, value in os.environ.items() if not key.startswith("K8E_")}
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script, str(data), *python],
        env={**environ, "PYTHONPATH": str(stubs), "GRPC_VERBOSITY": "NONE"},
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == b"by stubs\nby sandbox_client\n", done.stderr.decode()


def test_a_checkout_has_k8e_s_module_though_nothing_is_installed(tmp_path: Path) -> None:
    program = "from sandbox_client import SandboxClient, sandbox_session; print('found')"
    done = subprocess.run(
        ["/usr/bin/python3", "-S", "-c", program],
        env={"PYTHONPATH": str(REPO / "sdk/python"), "HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == b"found\n", done.stderr.decode()


# Publishing.


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    (tmp_path / "tls").mkdir()
    return tmp_path


def test_everybody_can_read_the_ca_and_only_we_can_change_it(data_dir: Path) -> None:
    before = os.umask(0o077)
    try:
        tls.publish_ca(data_dir, OURS)
    finally:
        os.umask(before)
    for name in tls.PLACES:
        assert (data_dir / name).read_bytes() == OURS
        assert (data_dir / name).stat().st_mode & 0o777 == 0o644
    for name in tls.FOLDERS:
        assert (data_dir / name).stat().st_mode & 0o777 == 0o755


def test_a_new_ca_takes_the_place_of_our_old_one(data_dir: Path) -> None:
    for certificate in (OURS, NEWER, NEWER):
        tls.publish_ca(data_dir, certificate)
    assert [(data_dir / name).read_bytes() for name in tls.PLACES] == [NEWER, NEWER]


def test_what_k8e_itself_wrote_is_left_alone(data_dir: Path) -> None:
    theirs = data_dir / tls.PLACES[0]
    theirs.parent.mkdir(parents=True, mode=0o700)
    theirs.write_bytes(THEIRS)
    for certificate in (OURS, NEWER):
        tls.publish_ca(data_dir, certificate)
    assert theirs.read_bytes() == THEIRS
    assert theirs.parent.stat().st_mode & 0o777 == 0o700
    assert (data_dir / tls.PLACES[1]).read_bytes() == NEWER


def test_a_folder_that_cannot_be_written_keeps_no_gateway_from_starting(data_dir: Path) -> None:
    (data_dir / "server").write_text("a file")
    tls.publish_ca(data_dir, OURS)


# Finding.


def kubeconfig(server: str, ca: bytes) -> str:
    data = base64.b64encode(ca).decode()
    return f"clusters:\n- cluster: {{certificate-authority-data: {data}, server: '{server}'}}\n"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """K8E's places, somewhere else."""
    for name in ("FILES", "KUBECONFIGS"):
        found = tuple(f"{tmp_path}{path}" for path in getattr(credentials, name))
        monkeypatch.setattr(credentials, name, found)
    for name in ("KUBECONFIG", "K8E_SANDBOX_CA", "K8E_SANDBOX_CERT", "K8E_SANDBOX_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("K8E_DATA_DIR", str(tmp_path / "none"))
    return tmp_path


def write(path: str | Path, text: bytes | str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(text.encode() if isinstance(text, str) else text)


def test_k8e_s_places_are_looked_at_in_k8e_s_order(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each that comes before takes over from those that come later."""
    local = "https://127.0.0.1:6443"
    named = places / "named.yaml"
    order = [
        *credentials.KUBECONFIGS[::-1],
        places / "home/.kube/config",
        named,
        *credentials.FILES[::-1],
    ]
    assert credentials.load(Endpoint(target="127.0.0.1:50051")).ca is None
    for number, path in enumerate(order):
        ca = OURS.replace(b"b3Vycw==", b"bnVtYmVy%d" % number)
        write(path, ca if str(path).endswith(".crt") else kubeconfig(local, ca))
        if path == named:
            monkeypatch.setenv("KUBECONFIG", str(named))
        assert credentials.load(Endpoint(target="localhost:50051")).ca == ca, path


def test_our_own_gateway_is_trusted_beside_k8e_s(places: Path) -> None:
    write(places / "none/tls/ca.crt", OURS)
    write(credentials.FILES[1], THEIRS)
    assert credentials.load(Endpoint(target="127.0.0.1:1")).ca == OURS + THEIRS


def test_the_ca_of_a_cluster_is_for_its_own_host(places: Path) -> None:
    write(credentials.FILES[1], OURS)
    write(credentials.KUBECONFIGS[0], kubeconfig("https://node.example:6443", THEIRS))
    assert credentials.load(Endpoint(target="node.example:50051")).ca == THEIRS
    assert credentials.load(Endpoint(target="other.example:50051")).ca is None
    assert credentials.load(Endpoint(target="127.0.0.1:50051")).ca == OURS


def test_what_somebody_named_comes_before_all_places(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(credentials.FILES[1], OURS)
    write(places / "given.crt", THEIRS)
    monkeypatch.setenv("K8E_SANDBOX_CERT", str(places / "given.crt"))
    assert credentials.load(Endpoint(target="127.0.0.1:50051")).ca == THEIRS


@pytest.mark.parametrize(
    "text",
    [b"", b"\xff\xfe", b"clusters: 7", b"clusters: [{cluster: {}}]", b"clusters: [", b"a: b"],
)
def test_files_that_are_none_are_passed_over(places: Path, text: bytes) -> None:
    for path in (*credentials.FILES, *credentials.KUBECONFIGS):
        write(path, text)
    assert credentials.load(Endpoint(target="127.0.0.1:50051")).ca is None
