"""The services ``k8e`` and ``k8e-agent``: a server or an agent that starts with the machine.

systemd runs them where it is the first process. Elsewhere the command starts them in the
background, and they keep their own components running.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from k8e import errors

ROLES = ("server", "agent")
SYSTEMD_RUNS = Path("/run/systemd/system")
UNITS = Path("/etc/systemd/system")
COMMAND = "k8e"
_KEPT = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
_NOT_KEPT = frozenset({"K8E_HOME", "K8E_BIN_DIR"})
_PRIVATE, _PUBLIC = 0o600, 0o644
_UNIT = """\
[Unit]
Description={description}
Wants=network-online.target
After=network-online.target

[Service]
Type=notify
EnvironmentFile=-{environment}
ExecStart={command}
# Pods outlive a restart of k8e, and so do the components that the next one takes over.
KillMode=process
Delegate=yes
LimitNOFILE=1048576
LimitNPROC=infinity
LimitCORE=infinity
TasksMax=infinity
TimeoutStartSec=0
TimeoutStopSec=150
Restart=always
RestartSec=5s

[Install]
WantedBy=multi-user.target
"""
_DESCRIPTIONS = {
    "server": "k8e server: Kubernetes for sandboxes",
    "agent": "k8e agent: a node of a k8e cluster",
}


@dataclass(frozen=True)
class Service:
    """A server or an agent of this machine, with the arguments that it starts with."""

    role: str
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    units: Path = UNITS

    @property
    def name(self) -> str:
        return "k8e" if self.role == "server" else "k8e-agent"

    @property
    def unit(self) -> Path:
        return self.units / f"{self.name}.service"

    @property
    def environment(self) -> Path:
        """The file with its variables, the token among them."""
        return self.units / f"{self.name}.service.env"

    def install(self, *, start: bool = True) -> str:
        """Write the unit, enable and start it; or start the command. What was done, in words."""
        program = command_path()
        if not SYSTEMD_RUNS.is_dir():
            if start:
                self._start_detached(program)
            return (
                f"{self.name} runs in the background; systemd does not run here, so start it again "
                f"after a reboot: {COMMAND} {self.role} --detach"
            )
        _replace(self.unit, self.unit_text(program), _PUBLIC)
        _replace(self.environment, self.environment_text(), _PRIVATE)
        _systemctl("daemon-reload")
        _systemctl("enable", self.name)
        if start:
            _systemctl("restart", self.name)
        return f"{self.name} starts with the machine: systemctl status {self.name}"

    def stop(self) -> bool:
        """End it where systemd runs it; False if systemd does not."""
        if not SYSTEMD_RUNS.is_dir() or not self.unit.exists():
            return False
        _systemctl("stop", self.name)
        return True

    def remove(self) -> bool:
        """End the unit and remove its files; False if there were none."""
        if not self.unit.exists() and not self.environment.exists():
            return False
        if SYSTEMD_RUNS.is_dir():
            _systemctl("disable", "--now", self.name)
        self.unit.unlink(missing_ok=True)
        self.environment.unlink(missing_ok=True)
        if SYSTEMD_RUNS.is_dir():
            _systemctl("daemon-reload")
            _systemctl("reset-failed")
        return True

    def unit_text(self, program: Path) -> str:
        """The unit, which everybody may read; so a token is not in it but among the variables."""
        words = [str(program), self.role, *_without_token(self.arguments)[0]]
        return _UNIT.format(
            description=_DESCRIPTIONS[self.role],
            environment=self.environment,
            command=" ".join(map(_quoted, words)),
        )

    def environment_text(self) -> str:
        """Variables for the service: those of k8e, and those that name a proxy."""
        kept = {
            name: text
            for name, text in self.environ.items()
            if (name.startswith("K8E_") and name not in _NOT_KEPT) or name in _KEPT
        }
        if token := _without_token(self.arguments)[1]:
            kept["K8E_TOKEN"] = token
        return "".join(f"{name}={_quoted_value(text)}\n" for name, text in sorted(kept.items()))

    def _start_detached(self, program: Path) -> None:
        arguments, token = _without_token(self.arguments)
        words = [str(program), self.role, *arguments, "--detach"]
        # Everybody may read the arguments of a process, and only root its variables.
        environ = {**os.environ, "K8E_TOKEN": token} if token else None
        done = subprocess.run(words, env=environ, stdin=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise errors.ToolFailed(
                f"k8e {self.role} did not start", hint="what it says above tells why"
            )


def _without_token(arguments: Sequence[str]) -> tuple[list[str], str]:
    """Arguments without ``--token``, and the token, if it was given so."""
    rest: list[str] = []
    token = ""
    words = iter(arguments)
    for word in words:
        flag, is_one, text = word.partition("=")
        if flag != "--token":
            rest.append(word)
        else:
            token = text if is_one else next(words, "")
    return rest, token


def command_path() -> Path:
    """The command k8e, as it was installed."""
    for folder in (os.environ.get("K8E_BIN_DIR"), "/usr/local/bin"):
        if folder and os.access(Path(folder) / COMMAND, os.X_OK):
            return Path(folder) / COMMAND
    found = shutil.which(COMMAND)
    if found is None:
        raise errors.InvalidRequest(
            "the command k8e is not on PATH, so no service can start it",
            hint="install k8e with install.sh, or set K8E_BIN_DIR to the folder of the command",
        )
    return Path(found).absolute()


def _systemctl(*arguments: str) -> None:
    done = subprocess.run(
        ["systemctl", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise errors.ToolFailed(
            f"systemctl {' '.join(arguments)} failed: {done.stderr.strip()}",
            hint=f"journalctl -u {arguments[-1]} has what the service said",
        )


def _quoted(word: str) -> str:
    """A word of ExecStart, in which systemd expands nothing."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{text}"' if not word or set(word) & set(" \t\"'\\;") else text


def _quoted_value(text: str) -> str:
    """A value in a file of variables."""
    if "\n" in text:
        raise errors.InvalidRequest("a variable of the service has a line break in it")
    escaped = "".join(f"\\{char}" if char in '"\\$`' else char for char in text)
    return f'"{escaped}"'


def _replace(path: Path, text: str, mode: int) -> None:
    scratch = path.with_name(f".{path.name}.new")
    scratch.unlink(missing_ok=True)
    with open(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(text)
    scratch.chmod(mode)
    scratch.rename(path)
