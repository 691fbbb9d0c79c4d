"""``k8e sandbox shell``: a terminal in a session."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from tests.cli.terminals import Terminal
from tests.places import NewPlace, Place, eventually

PROMPT = b"sandbox:/workspace$ "


def test_a_shell_runs_what_is_typed_and_ends_with_its_exit_code(
    place: Place, session_id: str
) -> None:
    with Terminal(place, "sandbox", "shell", session_id) as terminal:
        terminal.until(PROMPT)
        assert terminal.state() != terminal.modes, "keys are the program's now"
        terminal.type(b"echo $((40 + 2)) $TERM; tty\r")
        terminal.until(b"42 xterm\r\n/dev/pts/")
        terminal.until(PROMPT)
        terminal.type(b"exit 7\r")
        assert terminal.end() == 7
        assert terminal.state() == terminal.modes


def test_ctrl_c_interrupts_the_program_in_front_and_not_us(place: Place, session_id: str) -> None:
    with Terminal(place, "sandbox", "shell", session_id) as terminal:
        terminal.until(PROMPT)
        terminal.type(b"sh -c 'echo in-$((1))-front; exec sleep 100'\r")
        terminal.until(b"in-1-front\r\n")
        terminal.type(b"\x03")
        terminal.until(PROMPT)
        terminal.type(b"\x04")
        assert terminal.end() == 130


def test_the_size_of_the_window_is_told_at_first_and_when_it_changes(
    place: Place, session_id: str
) -> None:
    script = (
        "import os, signal\n"
        "def show(*_): os.write(1, b'size %d %d\\n' % os.get_terminal_size())\n"
        "signal.signal(signal.SIGWINCH, show); show()\n"
        "while True: signal.pause()"
    )
    command = ["sandbox", "shell", session_id, "--", "python3", "-c", script]
    with Terminal(place, *command, rows=31, columns=101) as terminal:
        terminal.until(b"size 101 31\r\n")
        terminal.resize(50, 132)
        terminal.until(b"size 132 50\r\n")


def test_a_program_of_one_s_own_gets_its_arguments_as_they_are(
    place: Place, session_id: str
) -> None:
    command = ["sandbox", "shell", session_id, "--cwd", "/tmp", "--env", "A=b c", "--"]
    with Terminal(place, *command, "sh", "-c", 'pwd; echo "$A|$1"; exit 3', "x", "--raw") as ours:
        ours.until(b"/tmp\r\nb c|--raw\r\n")
        assert ours.end() == 3
        assert ours.state() == ours.modes


def test_without_a_session_it_is_the_standing_one(place: Place, runtime: str) -> None:
    tenant = f"shell-{runtime}"
    ran = place.json("sandbox", "run", "--tenant", tenant, "--runtime", runtime, "touch here")
    with Terminal(place, "sandbox", "shell", "--tenant", tenant, "--", "ls") as terminal:
        terminal.until(b"here")
        assert terminal.end() == 0
    place.json("sandbox", "destroy", ran["session_id"])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_restores_the_terminal_and_ends_the_program(
    place: Place, session_id: str, number: signal.Signals
) -> None:
    with Terminal(place, "sandbox", "shell", session_id, "--", "sleep", "100") as terminal:
        eventually(lambda: terminal.state() != terminal.modes)
        terminal.process.send_signal(number)
        assert terminal.end() == 128 + number
        assert terminal.state() == terminal.modes

    def gone() -> bool:
        runs = place.json("sandbox", "ps", session_id)["runs"]
        return all(item["status"] != "running" for item in runs if "sleep" in item["argv"])

    eventually(gone)


def test_a_program_that_cannot_start_is_an_error_on_a_whole_terminal(
    place: Place, session_id: str
) -> None:
    with Terminal(place, "sandbox", "shell", session_id, "--", "/no/such") as terminal:
        terminal.until(b'"error":"')
        assert terminal.end() == 1
        assert terminal.state() == terminal.modes


def test_stdin_that_is_no_terminal_is_an_error(place: Place) -> None:
    assert "stdin is not a terminal" in place.error("sandbox", "shell")


def test_over_grpc_keys_sizes_and_signals_arrive_too(place: Place, session_id: str) -> None:
    place.wait_for_grpc()
    remote: dict[str, Any] = {
        "K8E_SANDBOX_ENDPOINT": place.environ["K8E_LISTEN"],
        "K8E_SANDBOX_CERT": str(place.data / "tls" / "ca.crt"),
    }
    with Terminal(place, "sandbox", "shell", session_id, **remote) as terminal:
        terminal.until(PROMPT)
        terminal.resize(44, 99)
        terminal.type(b"until stty size | grep '44 99'; do sleep 0.1; done\r")
        terminal.until(b"44 99\r\n")
        terminal.until(PROMPT)
        terminal.type(b"exit 6\r")
        assert terminal.end() == 6
        assert terminal.state() == terminal.modes
    with Terminal(place, "sandbox", "shell", session_id, **remote) as terminal:
        terminal.until(PROMPT)
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.end() == 143
        assert terminal.state() == terminal.modes


def test_a_shell_survives_the_death_of_the_gateway(new_place: NewPlace) -> None:
    place = new_place()
    made = place.json("sandbox", "create", "--runtime", "container")["session_id"]
    with Terminal(place, "sandbox", "shell", made) as terminal:
        terminal.until(PROMPT)
        terminal.type(b"x=kept\r")
        terminal.until(PROMPT)
        place.kill_gateway()
        place.json("sandbox", "get", made)  # by the next gateway
        terminal.type(b"echo still-$x\r")
        terminal.until(b"still-kept\r\n")
        terminal.type(b"exit 5\r")
        assert terminal.end() == 5
        assert terminal.state() == terminal.modes
