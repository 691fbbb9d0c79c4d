"""``k8e completion``: scripts for bash, zsh and fish, made from the parser itself.

Commands and flags are tables in the script, so a TAB costs nothing; only ids are asked for, of a
gateway that runs already, for a moment, and in silence.
"""

# argparse has no public way to ask a parser for its commands and arguments.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

SHELLS = ("bash", "zsh", "fish")
IDS = ("sessions", "approvals", "templates")
ID_SECONDS = 2.0  # how long a TAB may wait for a gateway
_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_WORDS = {
    "agents": "all claude codex cursor gemini kiro vscode",
    "lang": "bash python node ts",
    "runtime": "gvisor container",
}
_LOCAL_FILES = ("file", "secret_file", "apikey_file", "data_dir", "tokens", "tls_cert", "tls_key")
MANY = 6  # how many places are completed of an argument that can be repeated
_NEW_ID = "k8e sandbox create"  # where an id is chosen, not found
_BY_DEST = {"session_id": "sessions", "approval_id": "approvals", "template": "templates"}


class Command(NamedTuple):
    """One command as a shell sees it. A kind says how a value is completed."""

    path: str
    below: dict[str, str]
    """Commands below it, and what they do."""
    flags: dict[str, str]
    """Flags, and what they mean."""
    values: dict[str, str]
    """The kind of each flag that takes a value."""
    places: list[str]
    """The kind of each argument."""


def add(command: Callable[..., argparse.ArgumentParser], commands: Any) -> None:
    completion = command(
        commands,
        "completion",
        "print a script that completes commands, flags and ids in your shell",
        "source <(k8e completion bash)\n         k8e completion fish | source",
        "completing.completion",
    )
    completion.add_argument("shell", nargs="?", choices=SHELLS, help="bash, zsh or fish")
    completion.add_argument("--ids", choices=IDS, help=argparse.SUPPRESS)  # for the scripts


def completion(options: argparse.Namespace) -> int:
    from k8e import errors
    from k8e.cli import fast, parsing, shells

    if options.ids:
        fast.write(1, "".join(f"{item}\n" for item in ids(options.ids)).encode())
        return 0
    if not options.shell:
        raise errors.InvalidRequest("no shell is named", hint=f"one of {', '.join(SHELLS)}")
    write = {"bash": shells.bash, "zsh": shells.zsh, "fish": shells.fish}[options.shell]
    fast.write(1, write(list(walk(parsing.build(), "k8e"))).encode())
    return 0


def walk(parser: argparse.ArgumentParser, path: str) -> Iterator[Command]:
    """A command and all below it."""
    shown = [item for item in parser._actions if item.help != argparse.SUPPRESS]
    groups = [item for item in shown if isinstance(item, argparse._SubParsersAction)]
    flags: dict[str, str] = {}
    values: dict[str, str] = {}
    for item in shown:
        for name in item.option_strings:
            flags[name] = item.help or ""
            if item.nargs != 0:
                values[name] = _kind(item, path)
    below = {
        choice.dest: choice.help or "" for group in groups for choice in group._choices_actions
    }
    places: list[str] = []
    for item in shown:
        if not item.option_strings and item not in groups:
            kind = _kind(item, path)
            places += [kind] * (MANY if item.nargs == "*" and kind.startswith("words") else 1)
    yield Command(path, below, flags, values, places)
    for group in groups:
        for name, child in group.choices.items():
            if name in below:  # others are told nobody
                yield from walk(child, f"{path} {name}")


def _kind(item: argparse.Action, path: str) -> str:
    """What is in :data:`IDS`, ``file``, ``words …``, or ``value`` for anything else."""
    if item.dest in _BY_DEST and (path != _NEW_ID or item.dest != "session_id"):
        return _BY_DEST[item.dest]
    if item.choices is not None:
        return " ".join(["words", *map(str, item.choices)])
    if item.dest in _WORDS:
        return f"words {_WORDS[item.dest]}"
    return "file" if item.dest in _LOCAL_FILES else "value"


def ids(what: str) -> list[str]:
    """Ids of a gateway that runs; nothing if there is none, or it does not answer at once."""
    import signal

    def give_up(*_: object) -> None:
        raise TimeoutError

    if not hasattr(signal, "SIGALRM"):
        return []  # nothing could end a wait for a gateway that does not answer
    before = signal.signal(signal.SIGALRM, give_up)
    signal.setitimer(signal.ITIMER_REAL, ID_SECONDS)
    try:
        found = _ask(what)
    except Exception:  # a half-typed line is no place for an error
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    # A shell may expand what it is given.
    return [item for item in found if item and set(item) <= _ID_CHARS]


def _ask(what: str) -> list[str]:
    import contextlib

    from k8e import settings
    from k8e.client import driving, endpoints, local, operations

    endpoint = endpoints.resolve(None, None)
    if endpoint.target:
        return []  # another machine may take its time
    path = endpoint.socket or str(settings.load().socket)
    with contextlib.closing(local.Connection(local.dial(path))) as connection:
        running = driving.Running(connection, operations.call({"op": f"list_{what}"}), None)
        running.next_event()
    key = {"sessions": "session_id", "approvals": "approval_id", "templates": "name"}[what]
    return [str(item[key]) for item in running.result[what]]
