"""Gateways of users who are not root: they start, keep limits, survive, and leave nothing."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from k8e import errors
from k8e.rootless import holder
from tests.places import eventually
from tests.rootless.conftest import NewUserPlace
from tests.rootless.users import FIRST, UID, UserPlace

FILL = """
import errno, os
os.unlink(__file__)
def fill(folder):
    try:
        with open(folder + '/filler', 'wb') as file:
            for _ in range(4096): file.write(bytes(1 << 20))
    except OSError as error: return errno.errorcode[error.errno]
    finally:
        size = os.stat(folder + '/filler').st_size if os.path.exists(folder + '/filler') else 0
        print(folder, size >> 20)
print(fill('/workspace'), fill('/tmp'), fill('/usr'), fill('/etc'), fill(''))
"""


def run(place: UserPlace, *arguments: str, code: int = 0) -> dict[str, object]:
    """What a run says; warnings are on stderr."""
    done = place.cli("sandbox", "run", *arguments)
    assert done.returncode == code, (done.stdout, done.stderr)
    return json.loads(done.stdout)


def create(place: UserPlace, *arguments: str) -> str:
    done = place.cli("sandbox", "create", *arguments)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return str(json.loads(done.stdout)["session_id"])


def test_code_of_a_user_runs_without_root_and_the_user_is_told_what_is_weaker(
    user_place: UserPlace, runtime: str
) -> None:
    done = user_place.cli("sandbox", "run", "--runtime", runtime, "--raw", "id -u; exit 7")
    assert (done.returncode, done.stdout) == (7, b"1000\n"), done.stderr
    status = user_place.json("status")
    assert "does not run as root" in status["runtime_warning"]
    assert Path(f"/proc/{status['pid']}").stat().st_uid == UID, "nothing of it is root's"


def test_disk_limits_hold_without_root_in_the_workspace_and_everywhere_else(
    user_place: UserPlace, runtime: str
) -> None:
    limits = ("--disk", "32MiB", "--memory", "64MiB")
    session = create(user_place, "--runtime", runtime, *limits)
    result = run(user_place, "--session-id", session, "--lang", "python", FILL)
    lines = str(result["stdout"]).splitlines()
    assert lines == [
        "/workspace 32",
        "/tmp 16",
        "/usr 0",
        "/etc 0",
        " 0",
        lines[5],
    ]
    # Which of the two refusals comes first is the kernel's choice, and gVisor's is another.
    assert lines[5].replace("EROFS", "EACCES") == "ENOSPC ENOSPC EACCES EACCES EACCES"


def test_files_of_a_container_belong_to_nobody_but_the_users_subordinate_ids(
    user_place: UserPlace,
) -> None:
    session = create(user_place, "--runtime", "container")
    place = ("--session-id", session)
    mark = user_place.folder.name
    user_place.json("sandbox", "run", *place, "--background", f"exec -a {mark} sleep 300")
    found = eventually(lambda: _uids_of(mark.encode()))
    assert all(FIRST <= uid < FIRST + 65536 for uid in found)


def _uids_of(name: bytes) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "uid=,args="], capture_output=True, check=True).stdout
    return [int(line.split()[0]) for line in listed.splitlines() if line.split()[1] == name]


def test_sandboxes_of_a_user_outlive_a_killed_gateway(user_place: UserPlace, runtime: str) -> None:
    session = create(user_place, "--runtime", runtime)
    place = ("--session-id", session)
    run(user_place, *place, "echo kept > /workspace/file")
    started = run(user_place, *place, "--background", "sleep 2; echo late")
    before = user_place.holder()
    user_place.kill_gateway()
    assert run(user_place, *place, "cat /workspace/file")["stdout"] == "kept\n"
    assert user_place.holder() == before
    log = user_place.cli("sandbox", "log", "--follow", str(started["run_id"]))
    assert log.stdout == b"late\n", log


def test_all_sandboxes_end_with_the_process_that_holds_them_and_new_ones_can_be_made(
    user_place: UserPlace, runtime: str
) -> None:
    session = create(user_place, "--runtime", runtime)
    found = user_place.holder()
    assert found is not None
    gateway = os.pidfd_open(user_place.pid())
    os.kill(found.pid, signal.SIGKILL)
    eventually(lambda: user_place.holder() is None)
    eventually(lambda: _gone(gateway))
    os.close(gateway)
    told = user_place.json("sandbox", "get", session)
    assert (told["phase"], "gone" in told["ended_reason"]) == ("ended", True)
    assert run(user_place, "--runtime", runtime, "echo again")["stdout"] == "again\n"


def _gone(process: int) -> bool:
    try:
        signal.pidfd_send_signal(process, 0)
    except ProcessLookupError:
        return True
    return False


def test_many_commands_at_once_make_one_gateway_and_one_holder(user_place: UserPlace) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(user_place.json, "doctor", "--json") for _ in range(4)]
    assert all(answer.result()["runtimes"] for answer in answers)
    assert len(_holders(user_place)) == 1


def _holders(place: UserPlace) -> list[int]:
    """The processes that have the pipe open by which this place's holder is told to end."""
    fifo = str(place.run_dir / "holder.fifo")
    found: list[int] = []
    for link in Path("/proc").glob("[0-9]*/fd/0"):
        with contextlib.suppress(OSError):
            if str(link.readlink()) == fifo:
                found.append(int(link.parts[2]))
    return found


def test_a_gateway_in_the_foreground_ends_with_its_signal_and_leaves_nothing(
    user_place: UserPlace,
) -> None:
    gateway = user_place.start("gateway")
    eventually(user_place.socket.exists, 50)
    gateway.send_signal(signal.SIGTERM)
    _, said = gateway.communicate(timeout=30)
    assert gateway.returncode == 0, said
    assert user_place.holder() is None


def test_who_has_no_subordinate_ids_is_told_how_to_get_them(new_user_place: NewUserPlace) -> None:
    code = errors.GatewayUnreachable.exit_code
    told = new_user_place(ids=False).error("sandbox", "run", "true", code=code)
    assert "/etc/subuid sets aside no ids for the user k8e-test-user" in told
    assert "usermod --add-subuids" in told


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "areas", [["limits", "bounds"], ["life"], ["pause.stands-still", "pause.destroy"]]
)
def test_promises_hold_without_root(user_place: UserPlace, runtime: str, areas: list[str]) -> None:
    chosen = [word for area in areas for word in ("--only", area)]
    done = subprocess.run(
        [*user_place.command, "conformance", "run", "--json", "--runtime", runtime, *chosen],
        env=user_place.environ,
        capture_output=True,
        timeout=300,
        check=False,
    )
    told = json.loads(done.stdout)
    broken = [row for row in told["results"] if row["verdict"] == "fail"]
    assert not broken, broken
    # Of a container's pauses nothing is left to check without a control group.
    assert told["passed"] >= told["not_applicable"] or (runtime, areas[0][:5]) == (
        "container",
        "pause",
    )


def test_a_second_gateway_says_that_one_runs_and_the_first_goes_on(user_place: UserPlace) -> None:
    user_place.cli("doctor", "--json")  # after which no sandbox is there
    gateway, before = user_place.pid(), user_place.holder()
    second = user_place.cli("gateway")
    assert second.returncode == errors.Conflict.exit_code
    assert b"a gateway is running already" in second.stderr
    assert before is not None
    assert (user_place.pid(), user_place.holder()) == (gateway, before)


def test_a_gateway_that_comes_while_one_leaves_is_not_ended_with_it(user_place: UserPlace) -> None:
    user_place.json("gateway", "--background")
    for _ in range(3):
        stopping = user_place.start("gateway", "stop")
        coming = user_place.start("gateway", "--background")
        # Who comes too early meets the one that leaves, as with root.
        codes = {stopping: (0,), coming: (0, errors.GatewayUnreachable.exit_code)}
        for process, allowed in codes.items():
            told, said = process.communicate(timeout=60)
            assert process.returncode in allowed, (told, said)
        assert user_place.json("gateway", "--background")["pid"]


def test_what_a_gateway_that_was_killed_left_behind_ends_with_the_next_stop(
    user_place: UserPlace,
) -> None:
    user_place.cli("doctor", "--json")  # after which no sandbox is there
    user_place.kill_gateway()
    assert user_place.holder() is not None, "it outlives the gateway"
    user_place.json("gateway", "stop")
    eventually(lambda: not _holders(user_place))


def test_nothing_is_used_that_another_user_put_where_the_run_folder_goes(
    user_place: UserPlace,
) -> None:
    precious = user_place.home / "precious"
    precious.write_text("kept")
    os.chown(precious, UID, UID)
    trap = user_place.folder / "trap"
    (trap / "k8e").mkdir(parents=True)
    for path in (trap, trap / "k8e"):
        os.chown(path, UID + 1, UID + 1)
        path.chmod(0o777)
    for name in ("holder.lock", "holder.use", "holder.tmp", "start.lock"):
        (trap / "k8e" / name).symlink_to(precious)
    for command in (["gateway"], ["sandbox", "run", "true"], ["gateway", "stop"]):
        done = user_place.cli(*command, K8E_RUN_DIR=str(trap / "k8e"))
        assert precious.read_text() == "kept"
        if command[-1] != "stop":  # nothing is what there is to stop
            assert done.returncode
            assert f"belongs to uid {UID + 1}".encode() in done.stdout + done.stderr


def test_a_folder_of_the_user_by_a_way_that_another_user_made_is_not_used(
    user_place: UserPlace,
) -> None:
    kept = user_place.home / "container" / "file"
    kept.parent.mkdir()
    kept.touch()
    for path in (kept.parent, kept):
        os.chown(path, UID, UID)
    trap = user_place.folder / "trap"
    trap.mkdir()
    (trap / "k8e").symlink_to(user_place.home)
    for path in (trap, trap / "k8e"):
        os.chown(path, UID + 1, UID + 1, follow_symlinks=False)
    done = user_place.cli("gateway", K8E_RUN_DIR=str(trap / "k8e"))
    assert done.returncode == errors.InvalidRequest.exit_code
    assert f"belongs to uid {UID + 1}".encode() in done.stderr
    assert kept.exists()


def test_who_has_no_home_is_told_so(user_place: UserPlace) -> None:
    done = user_place.cli("gateway", HOME="/proc/nowhere")
    assert done.returncode == errors.InvalidRequest.exit_code
    assert b"k8e gateway: the folder /proc/nowhere/.local/share/k8e cannot be made" in done.stderr
    assert b"set HOME" in done.stderr


def test_sandboxes_use_the_data_folder_of_the_gateway_that_runs(user_place: UserPlace) -> None:
    user_place.cli("doctor", "--json")  # after which no sandbox is there
    user_place.kill_gateway()
    assert user_place.holder() is not None
    other = user_place.folder / "other"
    user_place.environ["K8E_DATA_DIR"] = str(other)
    assert run(user_place, "--runtime", "container", "echo ok")["stdout"] == "ok\n"
    assert (other / "rootfs").is_dir()


def test_checks_that_run_already_are_not_disturbed_by_others(user_place: UserPlace) -> None:
    first = user_place.start("conformance", "run", "--runtime", "container", "--only", "life")
    checks = user_place.run_dir / "checks"
    eventually(lambda: holder.find(checks))
    eventually(lambda: len(_folders()) > 1)
    second = user_place.cli("conformance", "run", "--runtime", "container", "--only", "life")
    assert second.returncode == errors.Conflict.exit_code, second
    assert holder.find(checks) is not None
    first.terminate()
    first.communicate(timeout=60)
    eventually(lambda: holder.find(checks) is None)
    assert _folders() == [user_place.folder.name], "of the checks"


def _folders() -> list[str]:
    """The user's folders among those of everybody, which come and go meanwhile."""
    found: list[str] = []
    for path in Path("/tmp").glob("k8e-*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_uid == UID:
                found.append(path.name)
    return found
