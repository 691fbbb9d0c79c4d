"""The embedded default: a gateway that is started when it is needed, once, and leaves by itself."""

from __future__ import annotations

import json
import os
import pty
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from k8e.conformance.lab.ports import free_port
from tests.places import COMMAND, NewPlace, Place, eventually, wait_readable


def gateways(place: Place) -> list[int]:
    """The gateways of a place that run."""
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().split(b"\0")
            environ = (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"gateway" in command and f"K8E_RUN_DIR={place.run_dir}\0".encode() in environ:
            found.append(int(folder.name))
    return found


def test_ten_commands_at_once_start_one_gateway_and_share_one_session(
    new_place: NewPlace,
) -> None:
    place = new_place(K8E_RUNTIME="container")
    running = [place.start("sandbox", "run", f"echo {number}") for number in range(10)]
    sessions: set[str] = set()
    for number, process in enumerate(running):
        stdout, stderr = process.communicate(timeout=50)
        assert stderr == b""
        found = json.loads(stdout)
        assert found["stdout"] == f"{number}\n"
        sessions.add(found["session_id"])
    assert len(sessions) == 1
    assert len(gateways(place)) == 1
    starts = (place.data / "gateway.log").read_text().count("ready on")
    assert starts == 1


def test_ten_threads_of_one_sdk_start_one_gateway(new_place: NewPlace) -> None:
    place = new_place(K8E_RUNTIME="container")
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from k8e import SandboxClient\n"
        "with SandboxClient() as client, ThreadPoolExecutor(10) as pool:\n"
        "    found = list(pool.map(lambda n: client.run(f'echo {n}'), range(10)))\n"
        "print([r.stdout.strip() for r in found], len({r.session_id for r in found}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=place.environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout == f"{[str(n) for n in range(10)]} 1\n", done.stderr
    assert place.json("sandbox", "sessions") == {"sessions": []}, "the client's own session is gone"
    assert len(gateways(place)) == 1


def test_a_stale_socket_and_pid_file_are_no_obstacle(new_place: NewPlace) -> None:
    place = new_place()
    place.json("gateway", "--background")
    place.kill_gateway()
    assert place.socket.exists(), "a killed gateway leaves its socket"
    assert (place.run_dir / "gateway.pid").read_text()
    assert place.json("sandbox", "sessions") == {"sessions": []}


def test_a_socket_that_nobody_ever_served_is_no_obstacle(new_place: NewPlace) -> None:
    place = new_place()
    place.run_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place.socket))
    assert place.json("sandbox", "status")["available"] is True


def test_the_gateway_leaves_when_it_has_nothing_to_do(new_place: NewPlace) -> None:
    place = new_place(K8E_IDLE_EXIT="0.4")
    pid = place.json("gateway", "--background")["pid"]
    process = os.pidfd_open(pid)
    assert wait_readable(process)
    os.close(process)
    done = place.cli("status")
    assert done.returncode == 2
    assert json.loads(done.stdout)["running"] is False
    assert not place.socket.exists()


def test_the_gateway_stays_while_it_has_a_session(new_place: NewPlace) -> None:
    place = new_place(K8E_IDLE_EXIT="0.4", K8E_RUNTIME="container")
    first = place.json("sandbox", "run", "sleep 1; echo done")
    pid = place.pid()
    second = place.json("sandbox", "run", "sleep 1; echo done")
    assert first["session_id"] == second["session_id"]
    assert place.pid() == pid


def test_stop_leaves_sessions_to_the_next_gateway_and_destroy_does_not(
    new_place: NewPlace,
) -> None:
    place = new_place(K8E_RUNTIME="container")
    before = place.json("sandbox", "run", "echo kept > note")["session_id"]
    assert place.json("gateway", "stop") == {"ok": True, "running": False, "sessions": 1}
    assert gateways(place) == []
    after = place.json("sandbox", "run", "cat note")
    assert (after["session_id"], after["stdout"]) == (before, "kept\n")
    assert place.json("gateway", "stop", "--destroy")["sessions"] == 0
    assert place.json("sandbox", "sessions") == {"sessions": []}
    assert place.json("gateway", "stop")["ok"] is True
    assert place.json("gateway", "stop")["ok"] is True, "stopping what does not run is no error"


def test_status_does_not_start_a_gateway(new_place: NewPlace) -> None:
    place = new_place()
    assert place.cli("status").returncode == 2
    assert gateways(place) == []


def test_a_second_gateway_in_the_foreground_is_refused(new_place: NewPlace) -> None:
    place = new_place()
    pid = place.json("gateway", "--background")["pid"]
    done = place.cli("gateway")
    assert done.returncode == 1
    assert f"pid {pid}".encode() in done.stderr


def test_a_port_that_is_taken_stops_the_foreground_and_not_the_background(
    new_place: NewPlace,
) -> None:
    port = free_port()
    place = new_place(K8E_LISTEN=f"127.0.0.1:{port}")
    with socket.create_server(("127.0.0.1", port)):
        done = place.cli("gateway")
        assert done.returncode == 1
        assert str(port).encode() in done.stderr
        place.json("gateway", "--background")
        assert "none: " in place.wait_for_grpc()


def test_a_data_folder_that_cannot_be_written_is_named(new_place: NewPlace) -> None:
    place = new_place()
    told = place.error("sandbox", "run", "true", code=2, K8E_DATA_DIR="/proc/nowhere")
    assert "/proc/nowhere" in told
    assert "K8E_DATA_DIR" in told


def test_a_run_folder_that_cannot_be_made_is_named(new_place: NewPlace) -> None:
    place = new_place()
    told = place.error("sandbox", "run", "true", code=2, K8E_RUN_DIR="/proc/nowhere")
    assert "/proc/nowhere" in told
    assert "K8E_RUN_DIR" in told


def test_a_setting_that_makes_no_sense_is_named(new_place: NewPlace) -> None:
    place = new_place()
    told = place.error("sandbox", "run", "true", K8E_MAX_SESSIONS="many")
    assert "K8E_MAX_SESSIONS" in told


def test_a_gateway_that_cannot_start_says_why_and_where_its_log_is(new_place: NewPlace) -> None:
    place = new_place()
    place.data.mkdir(exist_ok=True)
    place.data.chmod(0o700)
    os.chown(place.data, 65534, 65534)
    told = place.error("sandbox", "run", "true", code=2)
    assert "did not start: " in told
    assert "belongs to uid 65534" in told
    assert str(place.data / "gateway.log") in told


def test_a_gateway_that_crashes_at_its_start_is_reported(new_place: NewPlace) -> None:
    place = new_place()
    place.data.mkdir(exist_ok=True)
    (place.data / "sessions.db").mkdir()  # not something that a gateway expects
    told = place.error("sandbox", "run", "true", code=2)
    assert "did not start" in told
    assert str(place.data / "gateway.log") in told
    (place.data / "sessions.db").rmdir()


def test_someone_at_a_terminal_is_told_that_the_start_takes_a_while(
    new_place: NewPlace, tmp_path: Path
) -> None:
    # A gateway that is slow to start: its interpreter waits before it begins.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif '--ready-fd' in sys.orig_argv: time.sleep(1.3)\n"
    )
    place = new_place(PYTHONPATH=str(tmp_path))
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [*COMMAND, "sandbox", "sessions"],
        env=place.environ,
        stdout=subprocess.PIPE,
        stderr=theirs,
        timeout=50,
        check=False,
    )
    os.close(theirs)
    assert json.loads(done.stdout) == {"sessions": []}
    assert b"starting the gateway" in os.read(ours, 1000)
    os.close(ours)


@pytest.mark.parametrize("flag", ["-I", "-P"])
def test_modules_in_the_current_folder_are_never_taken_for_ours(
    new_place: NewPlace, tmp_path: Path, flag: str
) -> None:
    place = new_place()
    for name in ("k8e", "asyncio", "json", "logging"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('hostile')")
    done = subprocess.run(
        [sys.executable, flag, "-m", "k8e", "sandbox", "sessions"],
        env=place.environ,
        cwd=tmp_path,
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert json.loads(done.stdout) == {"sessions": []}, done.stderr
    (pid,) = gateways(place)
    assert Path(f"/proc/{pid}/cwd").readlink() == Path("/"), "it holds no folder of its user"


def test_the_background_gateway_leaves_no_zombie(new_place: NewPlace) -> None:
    place = new_place()
    script = (
        "import os, sys\n"
        "from k8e import SandboxClient\n"
        "with SandboxClient() as client: client.status()\n"
        "sys.exit(os.path.exists(f'/proc/self/task/{os.getpid()}/children') and "
        "bool(open(f'/proc/self/task/{os.getpid()}/children').read()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], env=place.environ, timeout=50, check=False
    )
    assert done.returncode == 0
    (pid,) = gateways(place)
    eventually(lambda: Path(f"/proc/{pid}/status").read_text().count("PPid:\t1\n"))
