"""Approvals on the command line: who asks, who decides, and what is printed where."""

from __future__ import annotations

import json
import os
import pty
import select
import subprocess

import pytest

from k8e.client import approvals
from k8e.client.endpoints import Endpoint
from tests.places import COMMAND, NewPlace, Place, wait_readable

ACTION = "delete \x1b[1A<everything>"
SHOWN = "delete \\x1b[1A<everything>"
SECRET = "a secret of the approver"


def ask(place: Place, session_id: str, action: str = ACTION) -> str:
    done = place.cli("sandbox", "confirm", "--no-wait", session_id, action)
    assert done.returncode == 0, done
    lines = done.stderr.decode().splitlines()
    assert len(lines) in (4, 5)
    assert all(line.startswith("[k8e-sandbox] ") for line in lines)
    told = json.loads(done.stdout)
    assert (told["approved"], told["status"]) == (False, "pending")
    assert told["approval_id"] in lines[0]
    return told["approval_id"]


def approve(place: Place, *arguments: str, secret: str = "") -> dict[str, object]:
    done = place.cli("sandbox", "approve", *arguments, K8E_APPROVER_SECRET=secret)
    assert done.returncode == 0, done
    assert SHOWN in done.stderr.decode(), "the approver sees what is decided on"
    return json.loads(done.stdout)


def test_a_blocking_confirm_prompts_on_stderr_and_prints_the_decision(
    place: Place, session_id: str
) -> None:
    asking = place.start("sandbox", "confirm", "--timeout", "40", session_id, ACTION)
    assert asking.stderr is not None
    lines = [asking.stderr.readline().decode() for _ in range(4)]
    assert SHOWN in lines[1]
    (found,) = place.json("sandbox", "approvals", "--session-id", session_id)["approvals"]
    assert (found["action"], found["session_id"]) == (SHOWN, session_id)
    assert found["approval_id"] in lines[0]
    assert approve(place, found["approval_id"]) == {"advisory": True, "ok": True}
    printed, rest = asking.communicate(timeout=20)
    assert asking.returncode == 0
    assert rest == b""
    assert json.loads(printed) == {
        "advisory": True,
        "approval_id": found["approval_id"],
        "approved": True,
        "status": "approved",
    }


def prompt(place: Place, *arguments: str) -> dict[str, str]:
    """What a prompt tells, by what its lines begin with."""
    done = place.cli("sandbox", "confirm", "--no-wait", *arguments)
    lines = [line.removeprefix("[k8e-sandbox] ") for line in done.stderr.decode().splitlines()]
    return {key: rest.strip() for key, _, rest in (line.partition(":") for line in lines)}


def paste(place: Place, line: str, **environ: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line in a shell of somebody who has set nothing."""
    tools = place.folder / "bin"
    tools.mkdir(exist_ok=True)
    script = tools / "k8e"
    script.write_text(f'#!/bin/sh\nexec {" ".join(COMMAND)} "$@"\n')
    script.chmod(0o755)
    theirs = {"PATH": f"{tools}:/usr/bin:/bin", "HOME": str(place.home), **environ}
    return subprocess.run(
        ["sh", "-c", line], env=theirs, cwd="/", capture_output=True, timeout=50, check=False
    )


def test_a_prompt_has_commands_that_can_be_pasted(place: Place, session_id: str) -> None:
    told = prompt(place, session_id, "delete 'it'; $(all)")
    approval_id = next(key for key in told if key.startswith("approval ")).split()[1]
    for key, status in (("to approve", "approved"), ("to reject", "rejected")):
        line = told[key]
        assert line.startswith(f"k8e sandbox approve {approval_id}")
        done = paste(place, line)
        assert json.loads(done.stdout)["ok"] is True, done
        confirm = ["sandbox", "confirm", "--approval-id", approval_id, session_id]
        found = json.loads(place.cli(*confirm, "delete 'it'; $(all)").stdout)
        assert found["status"] == status
        told = prompt(place, session_id, "delete 'it'; $(all)")
        approval_id = next(key for key in told if key.startswith("approval ")).split()[1]
    assert json.loads(paste(place, told["to reject"]).stdout)["ok"] is True


def test_a_prompt_says_where_the_secret_goes(new_place: NewPlace) -> None:
    place = new_place()
    session_id = place.json("sandbox", "create")["session_id"]
    secret = place.folder / "a secret"
    place.json("approver", "init", "--file", str(secret))
    told = prompt(place, session_id, "pay")
    (hint,) = [key for key in told if "approver's secret" in key]
    assert "--secret-file PATH" in hint
    done = paste(place, f"{told['to approve']} --secret-file '{secret}'")
    assert json.loads(done.stdout) == {"advisory": False, "ok": True}


@pytest.mark.parametrize(
    ("endpoint", "flags"),
    [
        (Endpoint(), ""),
        (Endpoint(profile="my team", target="host:1"), " --profile 'my team'"),
        (
            Endpoint(target="gateway.example:50051", api_key="k"),
            " --endpoint gateway.example:50051",
        ),
        (Endpoint(socket="/tmp/a b.sock"), " --endpoint 'unix:/tmp/a b.sock'"),
    ],
    ids=str,
)
def test_the_command_names_the_gateway_that_was_asked_and_no_credential(
    monkeypatch: pytest.MonkeyPatch, endpoint: Endpoint, flags: str
) -> None:
    for name in ("K8E_RUN_DIR", "K8E_DATA_DIR", "K8E_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    assert approvals.command("approval-1", endpoint) == f"k8e sandbox approve approval-1{flags}"
    assert "'; rm x'" in approvals.command("; rm x", endpoint, reject=True)


def test_a_rejected_confirm_exits_with_1_and_tells_why(place: Place, session_id: str) -> None:
    approval_id = ask(place, session_id)
    approve(place, approval_id, "--reject", "--reason", "not today")
    done = place.cli("sandbox", "confirm", "--approval-id", approval_id, session_id, ACTION)
    assert (done.returncode, done.stderr) == (1, b"")
    told = json.loads(done.stdout)
    assert (told["approved"], told["reason"]) == (False, "not today")


def test_confirm_without_a_decision_times_out(place: Place, session_id: str) -> None:
    done = place.cli("sandbox", "confirm", "--timeout", "0.05", session_id, ACTION)
    assert done.returncode == 1
    assert "nobody decided" in json.loads(done.stdout)["error"]
    (found,) = place.json("sandbox", "approvals", "--session-id", session_id)["approvals"]
    approve(place, found["approval_id"], "--reject")
    assert "not found" in place.error("sandbox", "approve", "approval-of-nobody")


def test_with_an_approver_the_agent_cannot_approve_itself(new_place: NewPlace) -> None:
    place = new_place()
    session_id = place.json("sandbox", "create")["session_id"]
    assert place.json("approver", "status") == {"configured": False}
    secret = place.json("approver", "init")["secret"]
    assert place.json("approver", "status") == {"configured": True}
    assert "already" in place.error("approver", "init")

    approval_id = ask(place, session_id)
    for guess in ("", "guessing " * 3):
        done = place.cli("sandbox", "approve", approval_id, K8E_APPROVER_SECRET=guess)
        assert done.returncode == 1
        assert "secret" in json.loads(done.stdout)["error"]
    told = approve(place, approval_id, secret=secret)
    assert told == {"advisory": False, "ok": True}
    done = place.cli("sandbox", "confirm", "--approval-id", approval_id, session_id, ACTION)
    assert json.loads(done.stdout)["advisory"] is False

    # A file for the next one, and the secret of before to replace it.
    path = place.folder / "secret"
    init = ["approver", "init", "--replace", "--file", str(path)]
    assert "secret" in place.error(*init)
    assert not path.exists()
    assert place.json(*init, K8E_APPROVER_SECRET=secret) == {"file": str(path)}
    assert path.stat().st_mode & 0o777 == 0o600
    assert "cannot be made" in place.error(*init, K8E_APPROVER_SECRET=secret)
    approve(place, ask(place, session_id), "--secret-file", str(path))
    missing = ["--secret-file", str(place.folder / "missing")]
    done = place.cli("sandbox", "approve", ask(place, session_id), *missing)
    assert "cannot be read" in json.loads(done.stdout)["error"]


def test_a_passphrase_is_asked_for_on_the_terminal(new_place: NewPlace) -> None:
    place = new_place()
    session_id = place.json("sandbox", "create")["session_id"]
    assert "12 to" in place.error("approver", "init", "--passphrase", stdin=b"short\n")
    line = f"{SECRET}\n".encode()
    assert place.json("approver", "init", "--passphrase", stdin=line) == {"ok": True}
    told = on_terminal(place, ["sandbox", "approve", ask(place, session_id)], SECRET)
    assert json.loads(told) == {"advisory": False, "ok": True}


def on_terminal(place: Place, arguments: list[str], answer: str) -> bytes:
    """What a command prints that asks for a secret on its terminal, which does not show it."""
    ours, theirs = pty.openpty()
    with subprocess.Popen(
        [*COMMAND, *arguments],
        env=place.environ,
        stdin=theirs,
        stderr=theirs,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        seen = b""
        while b"secret: " not in seen:
            assert wait_readable(ours), seen
            seen += os.read(ours, 4096)
        os.write(ours, f"{answer}\n".encode())
        printed, _ = process.communicate(timeout=20)
        while select.select([ours], [], [], 0)[0]:
            seen += os.read(ours, 4096)
    os.close(theirs)
    os.close(ours)
    assert SHOWN.encode() in seen
    assert answer.encode() not in seen
    return printed


def test_too_long_a_reason_is_refused(place: Place, session_id: str) -> None:
    approval_id = ask(place, session_id)
    done = place.cli("sandbox", "approve", approval_id, "--reason", "x" * 5000)
    assert done.returncode == 1
    assert "more than" in json.loads(done.stdout)["error"]
    approve(place, approval_id, "--reject")
