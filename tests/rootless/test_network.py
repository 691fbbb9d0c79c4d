"""Egress without root: by the same rules, through a program that makes the user's own calls."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import shutil
import signal
import socket
import stat
from collections.abc import Generator
from pathlib import Path

import pytest

from k8e.conformance.lab.internet import HOST, RESOLVER, Internet
from k8e.egress import namespaces
from k8e.egress.netlink import Netlink
from tests.places import eventually
from tests.rootless.conftest import NewUserPlace
from tests.rootless.users import UserPlace, missing

ALLOWED, OTHER = "93.184.216.34", "93.184.216.35"
LATER = "93.184.216.99"
ASK = """
import socket, sys
for name in sys.argv[1:] or {names!r}:
    try:
        with socket.create_connection((name, 80), 5) as connection:
            connection.sendall(b'x' * 100)
            print(name, connection.makefile().readline().strip())
    except OSError as error: print(name, type(error).__name__)
"""


@pytest.fixture
def internet(tmp_path: Path) -> Generator[Internet]:
    if reason := missing():
        pytest.skip(reason)
    found = Internet(tmp_path)
    found.names |= {"allowed.example": [ALLOWED], "other.example": [OTHER]}
    found.host(ALLOWED, OTHER)
    yield found
    found.close()


def ask(place: UserPlace, runtime: str, *names: str) -> dict[str, str]:
    """What each name answers to a program in a sandbox, which may reach one of them."""
    words = ("--runtime", runtime, "--allowed-hosts", "allowed.example")
    code = ASK.format(names=list(names))
    done = place.cli("sandbox", "run", *words, "--lang", "python", code)
    assert done.returncode == 0, (done.stdout, done.stderr)
    lines = str(json.loads(done.stdout)["stdout"]).splitlines()
    return dict(line.split(" ", 1) for line in lines)


def test_a_users_sandbox_reaches_the_names_of_its_list_and_nothing_else(
    internet: Internet, new_user_place: NewUserPlace, runtime: str
) -> None:
    if shutil.which("pasta") is None:
        pytest.skip("the program pasta is not installed (Debian's package passt)")
    place = new_user_place(network=internet.world, K8E_RESOLVERS=RESOLVER)
    host = HOST.partition("/")[0]
    found = ask(place, runtime, "allowed.example", "other.example", OTHER, host)
    refused = found.pop(host)
    assert found == {
        "allowed.example": ALLOWED,
        "other.example": "gaierror",
        OTHER: "ConnectionRefusedError",
    }
    assert refused == "ConnectionRefusedError", "the machine itself is out of reach"
    assert set(internet.asked) == {"allowed.example"}
    pasta = _children_named(place, b"pasta")
    assert pasta
    assert [Path(f"/proc/{pid}/environ").read_bytes() for pid in pasta] == [b""] * len(pasta)


def test_a_program_that_carries_packets_and_ends_is_started_again(
    internet: Internet, new_user_place: NewUserPlace
) -> None:
    if shutil.which("pasta") is None:
        pytest.skip("the program pasta is not installed (Debian's package passt)")
    place = new_user_place(network=internet.world, K8E_RESOLVERS=RESOLVER)
    words = ("--runtime", "container", "--allowed-hosts", "allowed.example")
    session = json.loads(place.cli("sandbox", "create", *words).stdout)["session_id"]
    here = ("--session-id", str(session), "--raw", "--lang", "python")

    def asked() -> bytes:
        code = ASK.format(names=["allowed.example"])
        return place.cli("sandbox", "run", *here, code).stdout

    for _ in range(2):
        assert asked() == f"allowed.example {ALLOWED}\n".encode()
        before = _children_named(place, b"pasta")
        for pid in before:
            os.kill(int(pid), signal.SIGKILL)
        eventually(lambda old=before: set(_children_named(place, b"pasta")) - set(old), 30)
        eventually(lambda: asked() == f"allowed.example {ALLOWED}\n".encode(), 30)


def _children_named(place: UserPlace, name: bytes) -> list[str]:
    """The processes of a program that was told about a place."""
    found: list[str] = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            program, _, words = file.read_bytes().partition(b"\0")
            if program.endswith(b"/" + name) and bytes(place.run_dir) in words:
                found.append(file.parts[2])
    return found


def test_the_machine_stays_out_of_reach_by_addresses_that_it_gets_later(
    internet: Internet, new_user_place: NewUserPlace
) -> None:
    if shutil.which("pasta") is None:
        pytest.skip("the program pasta is not installed (Debian's package passt)")
    place = new_user_place(network=internet.world, K8E_RESOLVERS=RESOLVER)
    words = ("--runtime", "container", "--allowed-hosts", "open")
    session = json.loads(place.cli("sandbox", "create", *words).stdout)["session_id"]
    here = ("--session-id", str(session))
    server = namespaces.run_in(internet.world, lambda: socket.create_server(("", 80)))
    with server:
        namespaces.run_in(internet.world, _get_address)

        def asked() -> bytes:
            return place.cli(
                "sandbox", "run", *here, "--raw", "--lang", "python", ASK.format(names=[LATER])
            ).stdout

        # The kernel tells of it a moment later.
        eventually(lambda: asked() == f"{LATER} ConnectionRefusedError\n".encode())


def _get_address() -> None:
    with contextlib.closing(Netlink()) as netlink:
        netlink.configure(socket.if_nametoindex("lo"), [ipaddress.ip_interface(LATER)])


def test_without_the_program_that_carries_packets_sandboxes_run_and_reach_nothing(
    internet: Internet, new_user_place: NewUserPlace
) -> None:
    place = new_user_place(network=internet.world, K8E_RESOLVERS=RESOLVER, K8E_ALLOWED_HOSTS="open")
    hidden = place.folder / "etc" / "tun"
    hidden.touch(mode=0o600)  # in the place of the device by which it would do so
    doctor = place.cli("doctor", "--json")
    egress = json.loads(doctor.stdout)["egress"]
    assert egress["usable"] is False
    assert "/dev/net/tun is missing, or closed to this user" in egress["detail"]
    done = place.cli("sandbox", "run", "--runtime", "container", "--raw", "cat /proc/net/dev")
    assert done.returncode == 0
    assert b"eth0" not in done.stdout


def test_a_session_without_a_network_says_so_and_a_later_one_has_it(
    internet: Internet, new_user_place: NewUserPlace
) -> None:
    if shutil.which("pasta") is None:
        pytest.skip("the program pasta is not installed (Debian's package passt)")
    allowed = {"K8E_ALLOWED_HOSTS": "allowed.example", "K8E_RESOLVERS": RESOLVER}
    place = new_user_place(network=internet.world, **allowed)
    tun = place.folder / "etc" / "tun"
    os.mknod(tun, 0o600 | stat.S_IFCHR, Path("/dev/net/tun").stat().st_rdev)
    tun.chmod(0o600)
    why = "this s{} has no network: /dev/net/tun is missing, or closed to this user"
    made = place.cli("sandbox", "create", "--runtime", "container")
    assert why.format("ession").encode() in made.stderr
    before = json.loads(made.stdout)["session_id"]
    here = ("--session-id", before)
    done = json.loads(place.cli("sandbox", "run", *here, "exit 3").stdout)
    assert [item["name"] for item in done["denials"]] == ["*"]
    assert why.format("andbox") in done["denials"][0]["rule"]
    raw = place.cli("sandbox", "run", *here, "--raw", "exit 3").stderr.decode()
    assert f"k8e: egress to * was refused: {why.format('andbox')}" in raw
    assert "allow-hosts" not in raw
    assert json.loads(place.cli("sandbox", "run", *here, "true").stdout)["denials"] == []
    # Who wants no network misses none.
    none = place.cli("sandbox", "create", "--runtime", "container", "--allowed-hosts", "none")
    assert b"no network" not in none.stderr
    pid = place.pid()

    tun.chmod(0o666)
    words = ("--runtime", "container", "--lang", "python", ASK.format(names=["allowed.example"]))
    found = place.cli("sandbox", "run", *words)
    assert json.loads(found.stdout)["stdout"] == f"allowed.example {ALLOWED}\n", found
    assert b"no network" not in found.stderr
    assert place.pid() == pid
    told = json.loads(place.cli("sandbox", "egress", before).stdout)
    assert "a new session has one" in told["reason"]
