"""The full command line: every command and flag, with help and an example for each."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import warnings
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

from k8e import errors
from k8e.cli import (
    completing,
    fast,
    parsing_a2a,
    parsing_agents,
    parsing_approvals,
    parsing_audit,
    parsing_conformance,
    parsing_contexts,
    parsing_exposing,
    parsing_files,
    parsing_images,
    parsing_login,
    parsing_mcp,
    parsing_more,
    parsing_pool,
    parsing_runs,
    parsing_secrets,
    parsing_snapshots,
    parsing_steering,
    parsing_templates,
    printing,
)

_named: ContextVar[frozenset[str] | None] = ContextVar("named", default=None)
"""The words of a command line: commands that are none of them are not built. None: all are."""


_ANSWERS_OK = frozenset(
    "sandbox.write sandbox.destroy approvals.approve steering.pause steering.resume runs.kill "
    "snapshots.save snapshots.delete exposing.unexpose contexts.delete templates.apply "
    "templates.delete images.remove images.prune login.use_profile login.delete_key gateway.stop "
    "gateway.repair".split()
)
"""Commands that answer ``{"ok": true}``; when they fail, they say ``"ok": false``, as K8E's do."""


class Mistake(errors.InvalidRequest):
    """Arguments that a command does not take."""

    handler = ""
    """The command's."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes like every other error: as JSON, with what to do next."""

    def error(self, message: str) -> NoReturn:
        mistake = Mistake(message, hint=f"{self.prog} --help explains the arguments")
        mistake.handler = _name(self.get_default("handler"))
        raise mistake

    def _print_message(self, message: str, file: Any = None) -> None:
        fast.write(1, message.encode())  # by no buffer that would find out later who reads


def main(arguments: list[str]) -> int:
    """Run any command; the exit code."""
    if arguments[:1] in (["server"], ["agent"]) and not {"-h", "--help"}.intersection(arguments):
        arguments = arguments[:1]  # their own flags come with them, in a later release
    warnings.showwarning = printing.show_warning
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what went wrong is in our own words
    options = None
    try:
        options = _parse(arguments)
        return options.handler(options)
    except fast.ClosedOutput:
        return fast.CLOSED_PIPE
    except SystemExit as end:  # --help
        return int(end.code or 0)
    except Exception as error:
        handler = _name(options.handler) if options is not None else getattr(error, "handler", "")
        raw = "--raw" in itertools.takewhile("--".__ne__, arguments)
        return printing.failure(error, raw=raw, ok=handler in _ANSWERS_OK)


def _name(handler: Any) -> str:
    """Which command it is that a parser would run; empty where it would show help."""
    return handler.args[0] if handler is not None and handler.func is _handle else ""


def _parse(arguments: list[str]) -> argparse.Namespace:
    """Parse; what stands behind ``--`` in ``sandbox shell`` is a program and none of our flags."""
    if arguments[:2] != ["sandbox", "shell"] or "--" not in arguments:
        return _parse_flags(arguments)
    at = arguments.index("--")
    options = _parse_flags(arguments[:at])
    options.program = [*options.program, *arguments[at + 1 :]]
    return options


def _parse_flags(arguments: list[str]) -> argparse.Namespace:
    """Parse with the commands that are named alone: to build all takes longer than most of them.

    Where that is not enough, for a mistake or for help, all are needed for what is printed.
    """
    if not {"-h", "--help"}.intersection(arguments):
        with contextlib.suppress(errors.InvalidRequest, argparse.ArgumentError):
            options = _parse_all(build(named=frozenset(arguments)), arguments)
            if options.handler.func is _handle:
                return options
    return _parse_all(build(), arguments)


def _parse_all(parser: Parser, arguments: list[str]) -> argparse.Namespace:
    """Parse; of arguments that nobody knows, too, it is told whose they would be."""
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.set_defaults(handler=options.handler)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return options


class _Unbuilt:
    """Stands for a command that nobody has named, and takes all that is added to it."""

    def __getattr__(self, _: str) -> Any:
        return self

    def __call__(self, *_arguments: object, **_options: object) -> _Unbuilt:
        return self


def build(named: frozenset[str] | None = None) -> Parser:
    """The parser of all commands, or of those that have one of these names."""
    _named.set(named)
    parser = Parser(
        prog="k8e",
        description="Runs untrusted code in isolated sandboxes.",
        epilog="example: k8e sandbox run --lang python \"print('hello')\"",
        allow_abbrev=False,
    )
    parser.set_defaults(handler=partial(_help, parser))
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    _add_sandbox(commands)
    _add_gateway(commands)
    _add_host(commands)
    return parser


def _help(parser: argparse.ArgumentParser, _: argparse.Namespace) -> int:
    fast.write(1, parser.format_help().encode())
    return 0


def _command(
    group: Any, name: str, text: str, example: str, handler: str, *parents: Parser
) -> Parser:
    """Add a command; its handler, ``module.function``, is imported when it runs."""
    named = _named.get()
    if isinstance(group, _Unbuilt) or (named is not None and name not in named):
        unbuilt: Any = _Unbuilt()
        return unbuilt
    parser: Parser = group.add_parser(
        name,
        help=text,
        description=text[0].upper() + text[1:] + ".",
        epilog=f"example: {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        parents=parents,
    )
    parser.set_defaults(handler=partial(_handle, handler))
    return parser


def _handle(handler: str, options: argparse.Namespace) -> int:
    from importlib import import_module

    module, _, function = handler.partition(".")
    return getattr(import_module(f"k8e.cli.{module}"), function)(options)


# Sandboxes.


def _add_sandbox(commands: Any) -> None:
    common = Parser(add_help=False, argument_default=argparse.SUPPRESS)
    common.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="a gateway elsewhere [K8E_SANDBOX_ENDPOINT]; by default this host's own",
    )
    common.add_argument(
        "--apikey",
        metavar="KEY",
        help="key for it [K8E_SANDBOX_APIKEY]; every user of this machine can see it here",
    )
    common.add_argument(
        "--apikey-file", metavar="PATH", help="a file that has the key in it; - is stdin"
    )
    common.add_argument(
        "--profile", metavar="NAME", help="a gateway of the profiles file [K8E_SANDBOX_PROFILE]"
    )
    sandbox = _command(
        commands,
        "sandbox",
        "run code in sandboxes, and manage them",
        'k8e sandbox run "echo hello"',
        "sandbox.usage",
        common,
    )
    sandbox.set_defaults(handler=partial(_help, sandbox))
    group = sandbox.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    _add_run(group, common)
    parsing_runs.add(group, common, _command)
    _add_create(group, common)
    _add_sessions(group, common)
    parsing_steering.add(group, common, _command)
    parsing_files.add(group, common, _command)
    parsing_snapshots.add(group, common, _command, _add_session_flags)
    parsing_exposing.add(group, common, _command)
    parsing_contexts.add(group, common, _command)
    parsing_approvals.add_to_sandbox(_command, group, common)
    parsing_approvals.add_approver(_command, commands, common)
    parsing_login.add_to_sandbox(_command, group, common)
    parsing_login.add_apikey(_command, commands, common)
    parsing_images.add(commands, common, _command)
    parsing_secrets.add(commands, common, _command)
    parsing_mcp.add(_command, commands, common)
    parsing_more.add(_command, group, common)
    parsing_pool.add(_command, commands, common, Parser)
    parsing_audit.add(_command, commands, common, Parser)
    parsing_more.add_doctor(_command, group)
    parsing_templates.add(_command, commands, common)
    parsing_more.add_bench(_command, commands, common)
    parsing_a2a.add(_command, commands, common, Parser)
    parsing_agents.add(_command, group, "sandbox install-skill")
    parsing_agents.add(_command, commands, "sandbox-install-skill")


def _add_run(group: Any, common: Parser) -> None:
    run = _command(
        group,
        "run",
        "run code and print its output, exit code and session as JSON",
        "k8e sandbox run --lang python \"print('hello')\"\n"
        "         echo 'echo hello' | k8e sandbox run --raw -",
        "sandbox.run",
        common,
    )
    run.add_argument("code", nargs="?", help="the code; '-' or nothing: read it from stdin")
    run.add_argument("--file", metavar="PATH", help="read the code from a file")
    run.add_argument("--lang", help="bash (default), python, node or ts")
    parsing_contexts.add_flag(run)
    run.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help="kill it after this long (default 30, with --background none; 0: never)",
    )
    run.add_argument("--session-id", metavar="ID", help="where to run [K8E_SANDBOX_SESSION_ID]")
    run.add_argument(
        "--tenant", metavar="NAME", help="whose standing session to use [K8E_SANDBOX_TENANT]"
    )
    run.add_argument("--runtime", default="", help="runtime of a session that is made for this")
    run.add_argument(
        "--template", default="", metavar="NAME", help="what a session is made from for this"
    )
    run.add_argument("--cwd", default="", metavar="PATH", help="start in this folder (/workspace)")
    run.add_argument("--env", action="append", metavar="K=V", help="set a variable; repeatable")
    run.add_argument(
        "--raw",
        action="store_true",
        help="pass output on as it is, when it comes; our errors to stderr",
    )
    run.add_argument("-i", "--stdin", action="store_true", help="pass our stdin on to the code")
    _add_allowed_hosts(run, "what a session that is made for this may reach")
    parsing_snapshots.add_content(run, stdin=False)
    run.add_argument(
        "--background",
        action="store_true",
        help="start it and leave: prints the run's id for poll, log and kill",
    )


def _add_allowed_hosts(parser: argparse.ArgumentParser, meaning: str) -> None:
    parser.add_argument(
        "--allowed-hosts",
        action="append",
        metavar="HOSTS",
        help=f"{meaning}: names, *.wildcards and CIDRs, with or without :PORT, and the words "
        "default, open, none and strict; a comma list, repeatable (by default what the "
        "gateway's K8E_ALLOWED_HOSTS says)",
    )


def _add_create(group: Any, common: Parser) -> None:
    create = _command(
        group,
        "create",
        "make a session and print its id",
        "k8e sandbox create --runtime gvisor --memory 512M --lifetime 3600\n"
        "         k8e sandbox create --allowed-hosts default,api.example.org:443\n"
        "         k8e sandbox create --manifest project.yaml\n"
        "         k8e sandbox create --template data --memory 2G",
        "sandbox.create",
        common,
    )
    _add_session_flags(create)
    parsing_snapshots.add_content(create, stdin=True)
    create.add_argument(
        "--secret",
        action="append",
        metavar="ENV=NAME[:KEY]",
        help="a variable whose value is a secret, see k8e secret set; repeatable",
    )


def _add_session_flags(create: argparse.ArgumentParser) -> None:
    """What every new session can be given."""
    create.add_argument("--runtime", default="", help="gvisor or container; by default the best")
    create.add_argument(
        "--template",
        default="",
        metavar="NAME",
        help="what it is made from; other flags win over what the template says",
    )
    create.add_argument("--tenant", metavar="NAME", help="who it belongs to [K8E_SANDBOX_TENANT]")
    create.add_argument("--session-id", default="", metavar="ID", help="choose its id")
    create.add_argument("--memory", metavar="SIZE", help="bytes of memory, like 512M")
    create.add_argument("--cpus", metavar="N", help="CPUs, like 0.5")
    create.add_argument("--pids", metavar="N", help="processes and threads")
    create.add_argument("--inodes", metavar="N", help="files and folders in /workspace")
    create.add_argument("--open-files", metavar="N", help="open files of one process")
    create.add_argument(
        "--max-output", dest="output", metavar="SIZE", help="bytes that one run may print, like 1G"
    )
    create.add_argument("--disk", metavar="SIZE", help="bytes in /workspace, like 1G")
    create.add_argument(
        "--lifetime", type=float, default=0, metavar="SECONDS", help="destroy it after this long"
    )
    create.add_argument(
        "--idle-timeout",
        type=float,
        default=0,
        metavar="SECONDS",
        help="destroy it after this long without activity",
    )
    create.add_argument("--env", action="append", metavar="K=V", help="a variable; repeatable")
    create.add_argument("--label", action="append", metavar="K=V", help="a label; repeatable")
    _add_allowed_hosts(create, "what it may reach")


def _add_sessions(group: Any, common: Parser) -> None:
    status = _command(
        group,
        "status",
        "tell whether sandboxes are available, and the standing session",
        "k8e sandbox status",
        "sandbox.status",
        common,
    )
    status.add_argument("--tenant", metavar="NAME", help="whose session [K8E_SANDBOX_TENANT]")
    sessions = _command(
        group, "sessions", "list sessions", "k8e sandbox sessions", "sandbox.sessions", common
    )
    sessions.add_argument("--all", action="store_true", help="also those that have ended")
    sessions.add_argument(
        "--phase",
        metavar="PHASE",
        help="only those that are active, paused, creating, ended; or all",
    )
    sessions.add_argument("--tenant", default="", metavar="NAME", help="only this tenant's")
    get = _command(group, "get", "show a session", "k8e sandbox get ID", "sandbox.get", common)
    extend = _command(
        group,
        "extend",
        "let a session live longer",
        "k8e sandbox extend ID --lifetime 3600",
        "sandbox.extend",
        common,
    )
    destroy = _command(
        group,
        "destroy",
        "destroy a session and everything in it",
        "k8e sandbox destroy ID",
        "sandbox.destroy",
        common,
    )
    for parser in (get, extend, destroy):
        parser.add_argument("session_id", metavar="ID")
    extend.add_argument(
        "--lifetime", type=float, required=True, metavar="SECONDS", help="counted from now"
    )


# The gateway and the host.


def _add_gateway(commands: Any) -> None:
    gateway = _command(
        commands,
        "gateway",
        "serve sandboxes to local and remote clients",
        "k8e gateway\n         k8e gateway stop",
        "gateway.serve",
    )
    gateway.add_argument(
        "--background", action="store_true", help="start it, wait until it is ready, and leave"
    )
    gateway.add_argument("--listen", metavar="HOST:PORT", help="gRPC address, or none [K8E_LISTEN]")
    gateway.add_argument(
        "--http", metavar="HOST:PORT", help="address of /mcp and /metrics, or none [K8E_HTTP]"
    )
    gateway.add_argument("--data-dir", metavar="PATH", help="state and logs [K8E_DATA_DIR]")
    # For whoever starts a gateway: the descriptor on which it says that it is ready.
    gateway.add_argument("--ready-fd", type=int, default=-1, help=argparse.SUPPRESS)
    group = gateway.add_subparsers(title="commands", metavar="COMMAND", parser_class=Parser)
    stop = _command(
        group,
        "stop",
        "stop the gateway; sessions live on and are taken over by the next one",
        "k8e gateway stop --destroy",
        "gateway.stop",
    )
    stop.add_argument("--destroy", action="store_true", help="destroy all sessions first")
    _command(
        group,
        "metrics",
        "print the gateway's counters as text for Prometheus",
        "k8e gateway metrics | grep egress",
        "gateway.metrics",
    )
    _command(
        group,
        "repair",
        "make usable databases of damaged ones; the gateway must not be running",
        "k8e gateway repair",
        "gateway.repair",
    )
    parsing_login.add_fingerprint(_command, group)


def _add_host(commands: Any) -> None:
    _command(commands, "status", "show how the gateway is", "k8e status", "gateway.status")
    parsing_more.add_doctor(_command, commands)
    parsing_conformance.add(_command, commands, Parser)
    completing.add(_command, commands)
    _command(commands, "version", "print the version", "k8e version", "gateway.version")
    for name in ("server", "agent"):
        parser = _command(
            commands, name, "part of the Kubernetes distribution", f"k8e {name}", "gateway.later"
        )
        parser.set_defaults(name=name)


def pairs(items: list[str] | None, flag: str) -> dict[str, str]:
    """The values of a repeatable ``K=V`` flag."""
    found: dict[str, str] = {}
    for item in items or []:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise errors.InvalidRequest(f"{flag} {item!r} is not of the form K=V")
        found[key] = value
    return found


def hosts(items: list[str] | None) -> list[str] | None:
    """The words in a repeatable comma list; None if the flag was not given."""
    return None if items is None else fast.split_hosts(items)


def tenant(options: argparse.Namespace) -> str:
    """The tenant of a command."""
    return options.tenant or os.environ.get("K8E_SANDBOX_TENANT") or ""
