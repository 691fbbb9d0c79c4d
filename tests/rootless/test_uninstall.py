"""install.sh --uninstall by a user who is not root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.places import COMMAND, eventually
from tests.rootless.users import UID, UserPlace

REPO = Path(__file__).resolve().parents[2]


def test_uninstalling_ends_a_user_s_sandboxes_and_what_keeps_their_namespaces(
    user_place: UserPlace,
) -> None:
    machine = Path(user_place.environ["K8E_HOME"])
    home = user_place.home / "installed"
    (home / "bin").mkdir(parents=True)
    for name in ("runsc", "runc"):
        (home / "bin" / name).symlink_to(machine / "bin" / name)
    (home / "venv").symlink_to(sys.prefix)
    for path in (home, home / "bin"):
        os.chown(path, UID, UID)
    user_place.environ["K8E_HOME"] = str(home)
    as_user = user_place.command[: -len(COMMAND)]
    user_place.command = [*as_user, str(home / "venv/bin/python"), *COMMAND[1:]]
    made = user_place.cli("sandbox", "create", "--runtime", "container")
    assert made.returncode == 0, made.stdout
    assert user_place.holder() is not None

    done = subprocess.run(
        [*as_user, "sh", str(REPO / "install.sh"), "--uninstall"],
        env={**user_place.environ, "K8E_BIN_DIR": str(home / "command")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ended 1 sandbox\n" in done.stdout
    assert eventually(lambda: user_place.holder() is None)
    assert not home.exists()
    user_place.command = [*as_user, *COMMAND]
