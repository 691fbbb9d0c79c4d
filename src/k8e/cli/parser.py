"""The parser of the command line, and the table of commands with their modules.

A command's module has the command's parser beside its handler. It is imported only when the
command, or a list of all commands, is asked for: importing all of them takes longer than most
commands take.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

from k8e import errors
from k8e.cli import fast, output

Handler = Callable[[argparse.Namespace], int]
"""Runs a command with its options; returns the exit code."""

_SANDBOX = "sandbox"
# Command → its module in this package, in the order of ``--help``. The module's function
# ``add_<command>``, with underscores for hyphens, adds the command to a :class:`Commands`.
SANDBOX_COMMANDS = {
    "run": "run",
    "shell": "shell",
    "poll": "run",
    "log": "run",
    "kill": "run",
    "ps": "run",
    "cp": "files",
    "create": "sessions",
    "status": "sessions",
    "sessions": "sessions",
    "get": "sessions",
    "extend": "sessions",
    "destroy": "sessions",
    "subagent": "subagents",
    "pause": "subagents",
    "resume": "subagents",
    "allow-hosts": "egress",
    "egress": "egress",
    "write": "files",
    "read": "files",
    "list": "files",
    "snapshot": "snapshots",
    "expose": "exposures",
    "unexpose": "exposures",
    "exposed": "exposures",
    "context": "contexts",
    "confirm": "approvals",
    "approve": "approvals",
    "approvals": "approvals",
    "api-key": "login",
    "login": "login",
    "profiles": "login",
    "events": "audit",
    "benchmark": "bench",
    "catalog": "completion",
    "doctor": "gateway",
    "install-skill": "agents",
}
COMMANDS = {
    "approver": "approvals",
    "sandbox-apikey": "login",
    "image": "images",
    "secret": "secrets",
    "sandbox-mcp": "mcp",
    "pool": "pool",
    "audit": "audit",
    "template": "templates",
    "bench": "bench",
    "a2a": "a2a",
    "sandbox-install-skill": "agents",
    "gateway": "gateway",
    "status": "gateway",
    "doctor": "gateway",
    "conformance": "conformance",
    "completion": "completion",
    "components": "components",
    "kubeconfig": "kubeconfig",
    "service": "service",
    "version": "gateway",
    "server": "server",
    "agent": "server",
    "token": "token",
    "controller": "controller",
    "router": "router",
    "router-key": "router",
    "manifests": "manifests",
}


class Mistake(errors.InvalidRequest):
    """Arguments that a command does not accept."""

    answers_ok = False
    """Whether the command is one that answers ``{"ok": true}``."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes like every other error: as JSON, with what to do next."""

    def error(self, message: str) -> NoReturn:
        mistake = Mistake(message, hint=f"{self.prog} --help explains the arguments")
        mistake.answers_ok = bool(self.get_default("answers_ok"))
        raise mistake

    def commands(self, *, required: bool = False) -> Commands:
        """The commands below this one; ``required`` if it does nothing without one of them."""
        return Commands(
            self.add_subparsers(
                title="commands", metavar="COMMAND", required=required, parser_class=Parser
            )
        )

    def _print_message(self, message: str, file: Any = None) -> None:
        fast.write(1, message.encode())  # unbuffered, so that a closed pipe is noticed here


class Commands:
    """The commands on one level, such as those below ``k8e sandbox``."""

    def __init__(self, group: Any) -> None:  # argparse's class of it is private
        self._group = group

    def add(
        self,
        name: str,
        text: str,
        example: str,
        handler: Handler | None = None,
        *,
        remote: bool = False,
        parents: Sequence[argparse.ArgumentParser] = (),
        answers_ok: bool = False,
        listed: bool = True,
    ) -> Parser:
        """Add a command.

        Args:
            name: the word on the command line.
            text: what the command does, without a capital letter and a full stop.
            example: one or more command lines, for its help.
            handler: runs it; without one the command prints its help.
            remote: whether it takes the flags that name a gateway elsewhere.
            parents: parsers whose flags it takes too.
            answers_ok: whether it answers ``{"ok": true}``, and so ``"ok": false`` when it fails,
                as K8E's commands do.
            listed: whether help and completion show it.
        """
        shown = {"help": text} if listed else {}
        parser: Parser = self._group.add_parser(
            name,
            **shown,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example: {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            parents=[*([_gateway_flags()] if remote else []), *parents],
        )
        parser.set_defaults(handler=handler or ShowHelp(parser), answers_ok=answers_ok)
        return parser

    def add_from(self, table: dict[str, str], named: frozenset[str] | None) -> None:
        """Add the commands of a table from their modules: all, or the named ones."""
        for name, module in table.items():
            if named is None or name in named:
                add = getattr(import_module(f"k8e.cli.{module}"), f"add_{name.replace('-', '_')}")
                add(self)


class ShowHelp(NamedTuple):
    """A handler that prints the help of a command."""

    parser: argparse.ArgumentParser

    def __call__(self, _: argparse.Namespace) -> int:
        fast.write(1, self.parser.format_help().encode())
        return 0


def main(arguments: list[str]) -> int:
    """Run any command; the exit code."""
    warnings.showwarning = output.show_warning
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # our errors say what gRPC would log
    options = None
    try:
        options = _parse(arguments)
        return options.handler(options)
    except fast.ClosedOutput:
        return fast.CLOSED_PIPE
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Exception as error:
        raw = "--raw" in itertools.takewhile("--".__ne__, arguments)
        answers_ok = getattr(error if options is None else options, "answers_ok", False)
        return output.failure(error, raw=raw, ok=answers_ok)


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse; arguments after ``--`` in ``sandbox shell`` are a program, not flags of ours."""
    if arguments[:2] != ["sandbox", "shell"] or "--" not in arguments:
        return _parse_flags(arguments)
    at = arguments.index("--")
    options = _parse_flags(arguments[:at])
    options.program = [*options.program, *arguments[at + 1 :]]
    return options


def _parse_flags(arguments: list[str]) -> argparse.Namespace:
    """Parse with only the named commands built; with all of them for a mistake or a list.

    What is printed then names commands that could have been meant.
    """
    if not _asks_for_help(arguments) or _begins_with_command(arguments):
        with contextlib.suppress(errors.InvalidRequest, argparse.ArgumentError):
            options = _parse_all(build(named=frozenset(arguments)), arguments)
            if not isinstance(options.handler, ShowHelp):
                return options
    return _parse_all(build(), arguments)


def _asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def _begins_with_command(arguments: list[str]) -> bool:
    """Whether the line begins with one command of the tables, so that no list is needed."""
    table, words = COMMANDS, arguments
    if words[0] == _SANDBOX:
        table, words = SANDBOX_COMMANDS, words[1:]
    return bool(words) and words[0] in table


def _parse_all(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Parse; unknown arguments are an error of the command that got them."""
    options, unknown = parser.parse_known_args(arguments)
    if getattr(options, "takes_unknown", False):
        options.unknown = unknown
    elif unknown:
        parser.set_defaults(answers_ok=options.answers_ok)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


def build(named: frozenset[str] | None = None) -> Parser:
    """The parser of all commands, or of those whose names are among some words."""
    parser = Parser(
        prog="k8e",
        description="Runs untrusted code in isolated sandboxes.",
        epilog="example: k8e sandbox run --lang python \"print('hello')\"",
        allow_abbrev=False,
    )
    parser.set_defaults(handler=ShowHelp(parser), answers_ok=False)
    commands = parser.commands()
    if named is None or _SANDBOX in named:
        sandbox = commands.add(
            _SANDBOX,
            "run code in sandboxes, and manage them",
            'k8e sandbox run "echo hello"',
            remote=True,
        )
        sandbox.commands().add_from(SANDBOX_COMMANDS, named)
    commands.add_from(COMMANDS, named)
    return parser


@functools.cache
def _gateway_flags() -> Parser:
    """The flags that name a remote gateway."""
    flags = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    flags.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="a remote gateway [K8E_SANDBOX_ENDPOINT]; by default this host's own",
    )
    flags.add_argument(
        "--apikey",
        metavar="KEY",
        help="key for it [K8E_SANDBOX_APIKEY]; every user of this machine can see it here",
    )
    flags.add_argument("--apikey-file", metavar="PATH", help="a file with the key; - is stdin")
    flags.add_argument(
        "--profile", metavar="NAME", help="a gateway of the profiles file [K8E_SANDBOX_PROFILE]"
    )
    return flags


# Flags that several commands have, and what they mean.


def add_allowed_hosts(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help=f"{meaning}: names, *.wildcards and CIDRs, with or without :PORT, and the words "
        "default, open, none and strict; a comma list, repeatable (by default what the "
        "gateway's K8E_ALLOWED_HOSTS says)",
    )


def hosts(items: list[str] | None) -> list[str] | None:
    """The words of ``--allowed-hosts``; None if the flag was not given."""
    return None if items is None else fast.split_hosts(items)


def pairs(items: list[str] | None, flag: str) -> dict[str, str]:
    """The values of a repeatable ``K=V`` flag."""
    found: dict[str, str] = {}
    for item in items or []:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise errors.InvalidRequest(f"{flag} {item!r} is not of the form K=V")
        found[key] = value
    return found


def tenant(options: argparse.Namespace) -> str:
    """The tenant of ``--tenant`` or the environment."""
    return options.tenant or os.environ.get("K8E_SANDBOX_TENANT") or ""
