"""Which gateway is meant, and what is shown to it: one order, for the SDK and the command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from k8e import errors
from k8e.cli import fast
from k8e.client import credentials, endpoints, local, profiles
from k8e.client.endpoints import Endpoint

FILE = """\
version: 1
current_profile: home
profiles:
  home: {endpoint: home.example, cert_dir: certs}
  work: {endpoint: "work.example:7", api_key_file: work.key, device_name: laptop}
  bare: {cert_dir: certs}
"""
NO_CURRENT = FILE.replace("current_profile: home\n", "")
HOME = "home.example:50051"
WORK = "work.example:7"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder without anything in it."""
    for name in (
        "ENDPOINT APIKEY PROFILE CONFIG CERT KEY CA CERT_DIR DEVICE_NAME SESSION_ID TENANT"
    ).split():
        monkeypatch.delenv(f"K8E_SANDBOX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".k8e/sandbox").mkdir(parents=True)
    return tmp_path


def write(home: Path, text: str, name: str = ".k8e/sandbox/profiles.yaml") -> Path:
    path = home / name
    path.write_text(text)
    (path.parent / "work.key").write_text("k8e-key-of-work\n")
    (path.parent / "certs").mkdir(exist_ok=True)
    (path.parent / "certs/endpoint").write_text("bare.example:5\n")
    return path


@pytest.mark.parametrize(
    ("argument", "environ", "file", "target"),
    [
        (("arg:1", None), {"ENDPOINT": "env:2", "PROFILE": "work"}, FILE, "arg:1"),
        (("arg:1", "work"), {}, FILE, "arg:1"),
        ((None, "work"), {"ENDPOINT": "env:2"}, FILE, "env:2"),
        ((None, None), {"ENDPOINT": "env:2", "PROFILE": "work"}, FILE, "env:2"),
        ((None, "work"), {"PROFILE": "home"}, FILE, WORK),
        ((None, None), {"PROFILE": "work"}, FILE, WORK),
        ((None, None), {}, FILE, HOME),
        ((None, "bare"), {}, FILE, "bare.example:5"),
        ((None, None), {}, NO_CURRENT, ""),
        ((None, "work"), {}, NO_CURRENT, WORK),
        ((None, None), {}, "", ""),
        ((None, None), {}, None, ""),
        ((None, None), {"ENDPOINT": ""}, None, ""),
    ],
)
def test_the_order_is_argument_environment_profile_current_profile_own(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    argument: tuple[str | None, str | None],
    environ: dict[str, str],
    file: str | None,
    target: str,
) -> None:
    if file is not None:
        write(home, file)
    for name, value in environ.items():
        monkeypatch.setenv(f"K8E_SANDBOX_{name}", value)
    found = endpoints.resolve(argument[0], None, argument[1])
    assert found.target == target
    assert found.socket == ""
    # The quick path leaves to the full parser exactly what may be elsewhere.
    if argument == (None, None):
        asked = {f"K8E_SANDBOX_{name}".encode(): value.encode() for name, value in environ.items()}
        asked[b"HOME"] = str(home).encode()
        monkeypatch.setattr(fast.posix, "environ", asked)
        assert fast._is_elsewhere() is bool(target)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    ("files", "config", "target"),
    [
        ((".k8e/sandbox/profiles.yaml", ".k8e/config.yaml"), "", "new.example:1"),
        ((".k8e/config.yaml",), "", "old.example:1"),
        ((".k8e/sandbox/profiles.yaml", "mine.yaml"), "mine.yaml", "mine.example:1"),
        ((".k8e/sandbox/profiles.yaml",), "missing.yaml", ""),
    ],
)
def test_the_first_profiles_file_counts(
    home: Path,
    monkeypatch: pytest.MonkeyPatch,
    files: tuple[str, ...],
    config: str,
    target: str,
) -> None:
    hosts = {".k8e/sandbox/profiles.yaml": "new", ".k8e/config.yaml": "old", "mine.yaml": "mine"}
    for name in files:
        text = f"current_profile: a\nprofiles: {{a: {{endpoint: '{hosts[name]}.example:1'}}}}\n"
        (home / name).write_text(text)
    if config:
        monkeypatch.setenv("K8E_SANDBOX_CONFIG", str(home / config))
    assert endpoints.resolve(None).target == target


def test_credentials_of_a_profile_are_for_its_own_endpoint(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(home, FILE)
    work = endpoints.resolve(None, None, "work")
    assert work == Endpoint(target=WORK, api_key="k8e-key-of-work", profile="work")
    assert "k8e-key" not in repr(work)
    assert endpoints.resolve(None).cert_dir == str(home / ".k8e/sandbox/certs")
    for argument in ("evil.example", WORK):
        assert endpoints.resolve(argument, None, "work").api_key == ""
        assert endpoints.resolve(argument, None, "work").cert_dir == ""
    monkeypatch.setenv("K8E_SANDBOX_APIKEY", "from-env")
    assert endpoints.resolve(None, None, "work").api_key == "from-env"
    assert endpoints.resolve(None, "from-arg", "work").api_key == "from-arg"
    assert endpoints.resolve("unix:/x").api_key == ""


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "not a mapping"),
        ("profiles: [a]", "profiles is not a mapping"),
        ("profiles: {a: b}", "profile 'a' is not a mapping"),
        ("profiles: {a: {endpoint: 5}}", "endpoint is not text"),
        ("current_profile: [a]", "current_profile is not text"),
        ("a: b: c", "cannot be used"),
        ("!!python/object/apply:os.system ['true']", "could not determine a constructor"),
        ("current_profile: nobody", "no profile 'nobody'"),
        ("current_profile: a\nprofiles: {a: {}}", "names no endpoint"),
        ("\0", "cannot be used"),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(home: Path, text: str, why: str) -> None:
    write(home, text)
    with pytest.raises(errors.InvalidRequest, match=why) as caught:
        endpoints.resolve(None)
    assert caught.value.hint


def test_an_unknown_profile_names_the_known_ones(home: Path) -> None:
    with pytest.raises(errors.InvalidRequest, match="no profile 'x'"):
        endpoints.resolve(None, None, "x")
    write(home, FILE)
    with pytest.raises(errors.InvalidRequest) as caught:
        endpoints.resolve(None, None, "x")
    assert "bare, home, work" in caught.value.hint


def test_profiles_are_saved_and_chosen_without_losing_the_rest(home: Path) -> None:
    path = write(home, FILE + "extra: kept\n")
    profiles.save(path, profiles.Profile("new", "new.example:1", "/certs"))
    assert endpoints.resolve(None) == Endpoint(
        target="new.example:1", cert_dir="/certs", profile="new"
    )
    profiles.use(path, "work")
    assert endpoints.resolve(None).target == WORK
    profiles.use(path, "")
    assert endpoints.resolve(None) == Endpoint()
    assert endpoints.resolve(None, None, "home").target == HOME
    assert "extra: kept" in path.read_text()
    with pytest.raises(errors.InvalidRequest, match="no profile"):
        profiles.use(path, "nobody")


# What is shown, and whom we trust.


@pytest.fixture
def files(home: Path) -> Path:
    folder = home / "files"
    folder.mkdir()
    for name in ("ca.crt", "client.crt", "client.key", "cert", "key", "ca"):
        (folder / name).write_text(name)
    return folder


@pytest.mark.parametrize(
    ("environ", "cert_dir", "api_key", "expected"),
    [
        ({}, False, "", (None, None, None)),
        ({"CERT": "cert"}, False, "", ("cert", None, None)),
        ({"CERT": "cert", "KEY": "key"}, False, "", (None, "cert", "key")),
        ({"CERT": "cert", "KEY": "key", "CA": "ca"}, False, "k", ("ca", "cert", "key")),
        ({"CERT": "cert", "KEY": "key"}, True, "", ("ca.crt", "cert", "key")),
        ({"CA": "ca"}, True, "", ("ca", "client.crt", "client.key")),
        ({}, True, "", ("ca.crt", "client.crt", "client.key")),
        ({}, True, "k", ("ca.crt", None, None)),
        ({"CERT": "cert"}, True, "", ("cert", "client.crt", "client.key")),
        ({"KEY": "key"}, False, "", (None, None, None)),
    ],
)
def test_files_of_credentials_are_found_in_one_order(
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    cert_dir: bool,
    api_key: str,
    expected: tuple[str | None, ...],
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(f"K8E_SANDBOX_{name}", str(files / value))
    endpoint = Endpoint(
        target="gateway.example:1", api_key=api_key, cert_dir=str(files) if cert_dir else ""
    )
    found = credentials.load(endpoint)
    assert tuple(item and item.decode() for item in found) == expected


def test_a_named_file_that_is_missing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K8E_SANDBOX_CERT", "/nowhere/ca.crt")
    with pytest.raises(errors.GatewayUnreachable, match=r"/nowhere/ca\.crt cannot be read"):
        credentials.load(Endpoint(target="x:1"))


@pytest.mark.parametrize(
    ("target", "ours"),
    [("localhost:1", True), ("127.0.0.1:1", True), ("[::1]:1", True), ("192.0.2.1:1", False)],
)
def test_our_own_ca_is_for_this_machine(
    home: Path, monkeypatch: pytest.MonkeyPatch, target: str, ours: bool
) -> None:
    monkeypatch.setenv("K8E_DATA_DIR", str(home))
    for places in ("FILES", "KUBECONFIGS"):  # this machine may have a cluster
        monkeypatch.setattr(credentials, places, ())
    (home / "tls").mkdir()
    (home / "tls/ca.crt").write_text("own")
    assert credentials.load(Endpoint(target=target)).ca == (b"own" if ours else None)


def test_without_a_profiles_file_nothing_is_imported_for_one(home: Path) -> None:
    code = (
        "import sys; from k8e import SandboxClient; SandboxClient().close()\n"
        "bad = {'yaml', 'grpc', 'k8e.client.profiles', 'k8e.client.credentials', 'ssl'}\n"
        "assert not bad & set(sys.modules), bad & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_the_quick_path_of_a_host_without_sandboxes_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(local, "_CAN_SERVE", False)
    with pytest.raises(errors.GatewayUnreachable, match="cannot run sandboxes") as caught:
        local.dial(b"/nowhere")
    assert "K8E_SANDBOX_ENDPOINT" in caught.value.hint
