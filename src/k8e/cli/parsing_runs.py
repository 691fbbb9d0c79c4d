"""The commands for terminals, background runs and copying, as the parser knows them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any


def add(group: Any, common: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    """Add them to ``k8e sandbox``; ``command`` adds one."""
    _add_shell(group, common, command)
    _add_runs(group, common, command)
    _add_copy(group, common, command)


def _add_copy(group: Any, common: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    copy = command(
        group,
        "cp",
        "copy a file or a folder into a session or out of it; links and permissions are kept, and "
        "the host follows no link that the sandbox made",
        "k8e sandbox cp project ID:/workspace\n"
        "         k8e sandbox cp ID:results/. results\n"
        "         k8e sandbox cp notes.txt :",
        "copying.copy",
        common,
    )
    copy.add_argument("source", metavar="SRC", help="a local path, or SESSION:PATH")
    copy.add_argument("target", metavar="DST", help="the same; one of the two is a session's")
    copy.add_argument(
        "--tenant", metavar="NAME", help="whose standing session :PATH means [K8E_SANDBOX_TENANT]"
    )


def _add_shell(group: Any, common: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    shell = command(
        group,
        "shell",
        "use a program in a session on this terminal, bash unless another is named; ends with "
        "the program's exit code",
        "k8e sandbox shell\n"
        "         k8e sandbox shell ID -- python3 -q\n"
        "         k8e sandbox shell -- top",
        "shell.shell",
        common,
    )
    shell.add_argument(
        "session",
        nargs="?",
        default="",
        metavar="ID",
        help="the session [K8E_SANDBOX_SESSION_ID]; by default the tenant's standing one",
    )
    shell.add_argument(
        "program", nargs="*", metavar="-- PROGRAM", help="what to run, and its arguments"
    )
    shell.add_argument(
        "--tenant", metavar="NAME", help="whose standing session to use [K8E_SANDBOX_TENANT]"
    )
    shell.add_argument("--cwd", default="", metavar="PATH", help="start in this folder")
    shell.add_argument("--env", action="append", metavar="K=V", help="set a variable; repeatable")


def _add_runs(group: Any, common: Any, command: Callable[..., argparse.ArgumentParser]) -> None:
    poll = command(
        group,
        "poll",
        "tell how a background run is, and print its output so far as JSON",
        "k8e sandbox poll RUN",
        "runs.poll",
        common,
    )
    log = command(
        group,
        "log",
        "print the output of a background run as it is, both streams to where they belong",
        "k8e sandbox log RUN\n         k8e sandbox log --follow ID",
        "runs.log",
        common,
    )
    kill = command(
        group,
        "kill",
        "end a background run and everything that it started",
        "k8e sandbox kill RUN\n         k8e sandbox kill --signal 2 RUN",
        "runs.kill",
        common,
    )
    for parser in (poll, kill):
        parser.add_argument("run", metavar="RUN", help="the run's id, as run --background told it")
    log.add_argument(
        "run", metavar="RUN", help="a run's id, or a session's: its newest background run"
    )
    log.add_argument(
        "-f", "--follow", action="store_true", help="go on until it ends, with its exit code"
    )
    log.add_argument(
        "--offset", type=int, default=0, metavar="N", help="begin at this byte of its output"
    )
    kill.add_argument(
        "--signal", type=int, default=0, metavar="N", help="send this signal to it instead"
    )
    ps = command(
        group,
        "ps",
        "list the processes of a session, and its runs",
        "k8e sandbox ps ID",
        "runs.ps",
        common,
    )
    ps.add_argument("session_id", metavar="ID")
