"""``k8e completion`` and ``k8e sandbox catalog``, both made from the parser itself.

Commands and flags are tables in the script, so a TAB costs nothing; only ids are asked for, of a
gateway that runs already, for a moment, and in silence.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from k8e.cli import output
from k8e.cli import parser as cli_parser
from k8e.cli.parser import Commands

# argparse has no public way to ask a parser for its commands and arguments.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false


SHELLS = ("bash", "zsh", "fish")
IDS = ("sessions", "approvals", "templates")
ID_SECONDS = 2.0  # how long a TAB may wait for a gateway
_ID_CHARS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-")
_WORDS = {
    "agents": "all claude codex cursor gemini kiro vscode",
    "lang": "bash python node ts",
    "runtime": "gvisor container",
}
_LOCAL_FILES = ("file", "secret_file", "apikey_file", "data_dir", "tls_cert", "tls_key")
MANY = 6  # how many places are completed of an argument that can be repeated
_NEW_ID = "k8e sandbox create"  # where an id is chosen, not searched for
_BY_DEST = {"session_id": "sessions", "approval_id": "approvals", "template": "templates"}


class CommandSyntax(NamedTuple):
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


def add_completion(commands: Commands) -> None:
    parser = commands.add(
        "completion",
        "print a script that completes commands, flags and ids in your shell",
        "source <(k8e completion bash)\n         k8e completion fish | source",
        completion,
    )
    parser.add_argument("shell", nargs="?", choices=SHELLS, help="bash, zsh or fish")
    parser.add_argument("--ids", choices=IDS, help=argparse.SUPPRESS)  # for the scripts


def completion(options: argparse.Namespace) -> int:
    from k8e import errors
    from k8e.cli import fast

    if options.ids:
        fast.write(1, "".join(f"{item}\n" for item in ids(options.ids)).encode())
        return 0
    if not options.shell:
        raise errors.InvalidRequest("no shell is named", hint=f"one of {', '.join(SHELLS)}")
    write = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}[options.shell]
    fast.write(1, write(list(walk_parser(cli_parser.build(), "k8e"))).encode())
    return 0


def walk_parser(parser: argparse.ArgumentParser, path: str) -> Iterator[CommandSyntax]:
    """A command and all commands below it."""
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
    yield CommandSyntax(path, below, flags, values, places)
    for group in groups:
        for name, child in group.choices.items():
            if name in below:  # unlisted commands are not completed
                yield from walk_parser(child, f"{path} {name}")


def _kind(item: argparse.Action, path: str) -> str:
    """How a value is completed: a kind of :data:`IDS`, ``file``, ``words …``, or ``value``."""
    if item.dest in _BY_DEST and (path != _NEW_ID or item.dest != "session_id"):
        return _BY_DEST[item.dest]
    if item.choices is not None:
        return " ".join(["words", *map(str, item.choices)])
    if item.dest in _WORDS:
        return f"words {_WORDS[item.dest]}"
    return "file" if item.dest in _LOCAL_FILES else "value"


def ids(what: str) -> list[str]:
    """Ids from a running gateway; nothing if there is none, or it does not answer at once."""
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
    from k8e.client import driver, endpoints, local, operations

    endpoint = endpoints.resolve(None, None)
    if endpoint.target:
        return []  # another machine may take its time
    path = endpoint.socket or str(settings.load().socket)
    with contextlib.closing(local.Connection(local.dial(path))) as connection:
        running = driver.SyncOperation(connection, operations.call({"op": f"list_{what}"}), None)
        running.next_event()
    key = {"sessions": "session_id", "approvals": "approval_id", "templates": "name"}[what]
    return [str(item[key]) for item in running.result[what]]


# K8E's long names, offered only after their first letters: they would stand between `k8e sand` TAB
# and `k8e sandbox`, which nearly everyone means.
_LONG = "sandbox-"
# Names that no shell uses for itself: zsh has $path, $words and $commands of its own.
_WALK = """\
    local k8e_where=k8e k8e_at=0 k8e_kind='' k8e_word='' k8e_below='' k8e_short='' k8e_flags=''
    for k8e_word in "${k8e_line[@]}"; do
        if [[ -n $k8e_kind ]]; then k8e_kind=''; continue; fi
        case $k8e_word in
            -*) _k8e_value "$k8e_where $k8e_word" ;;
            '') k8e_at=$((k8e_at + 1)) ;;
            *)
                _k8e_command "$k8e_where"
                case " $k8e_below " in
                    *" $k8e_word "*) k8e_where="$k8e_where $k8e_word"; k8e_at=0 ;;
                    *) k8e_at=$((k8e_at + 1)) ;;
                esac
                ;;
        esac
    done
    _k8e_command "$k8e_where"
    if [[ -z $k8e_kind && $k8e_now == -* ]]; then
        k8e_kind="words $k8e_flags"
    elif [[ -z $k8e_kind && -n $k8e_below ]]; then
        k8e_kind="words $k8e_short"
        if [[ $k8e_now == sandbox-* ]]; then k8e_kind="words $k8e_below"; fi
    elif [[ -z $k8e_kind ]]; then
        _k8e_place "$k8e_where $k8e_at"
    fi
"""
_BASH = """\
_k8e() {
    local k8e_now=${COMP_WORDS[COMP_CWORD]} k8e_line=("${COMP_WORDS[@]:1:COMP_CWORD-1}")
    COMPREPLY=()
%(walk)s\
    case $k8e_kind in
        sessions|approvals|templates) k8e_kind=$("$1" completion --ids "$k8e_kind" 2> /dev/null) ;;
        file) compopt -o default; return ;;
        words*) k8e_kind=${k8e_kind#words} ;;
        *) return ;;
    esac
    while IFS= read -r k8e_word; do
        COMPREPLY+=("$k8e_word")
    done < <(compgen -W "$k8e_kind" -- "$k8e_now")
}
complete -F _k8e k8e
"""
_ZSH = """\
_k8e() {
    local k8e_now=${words[CURRENT]}
    local -a k8e_line=(${words[2,CURRENT-1]})
%(walk)s\
    case $k8e_kind in
        sessions|approvals|templates)
            k8e_kind=$("${words[1]}" completion --ids "$k8e_kind" 2> /dev/null) ;;
        file) _files; return ;;
        words*) k8e_kind=${k8e_kind#words} ;;
        *) return 1 ;;
    esac
    compadd -- ${=k8e_kind}
}
if [[ ${funcstack[1]} == _k8e ]]; then
    _k8e "$@"
else
    compdef _k8e k8e
fi
"""
_FISH = """\
function __k8e_complete
    set -l where k8e
    set -l at 0
    set -l kind
    set -l line (commandline -opc)
    set -l now (commandline -ct)
    set -e line[1]
    for word in $line
        if test -n "$kind"
            set kind
            continue
        end
        if string match -q -- '-*' $word
            set kind (__k8e_value "$where $word")
        else if contains -- $word (__k8e_command "$where" | string replace -r '\\t.*' '')
            set where "$where $word"
            set at 0
        else
            set at (math $at + 1)
        end
    end
    if test -z "$kind"
        if string match -q -- '-*' "$now"
            __k8e_flags "$where"
            return
        end
        if test (count (__k8e_command "$where")) -gt 0
            if string match -q -- 'sandbox-*' "$now"
                __k8e_command "$where"
            else
                __k8e_command "$where" | string match -rv '^sandbox-'
            end
            return
        end
        set kind (__k8e_place "$where $at")
    end
    switch "$kind"
        case sessions approvals templates
            command k8e completion --ids $kind 2> /dev/null
        case file
            __fish_complete_path "$now"
        case 'words*'
            string split -n ' ' -- (string replace -r '^words' '' -- "$kind")
    end
end
complete -c k8e -f -a '(__k8e_complete)'
"""


def bash_script(commands: list[CommandSyntax]) -> str:
    head = "# Completion of k8e for bash: source <(k8e completion bash)\n"
    return head + _tables(commands) + _BASH % {"walk": _WALK}


def zsh_script(commands: list[CommandSyntax]) -> str:
    head = "#compdef k8e\n# Completion of k8e for zsh: source <(k8e completion zsh)\n"
    return head + _tables(commands) + _ZSH % {"walk": _WALK}


def fish_script(commands: list[CommandSyntax]) -> str:
    head = "# Completion of k8e for fish: k8e completion fish | source\n"
    return head + _fish_tables(commands) + _FISH


Rows = Iterator[tuple[str, list[str]]]


def _tables(commands: list[CommandSyntax]) -> str:
    """The lookup tables of bash and zsh, as functions that set variables."""

    def command_rows() -> Rows:
        for item in commands:
            below, flags = " ".join(item.below), " ".join(item.flags)
            short = " ".join(name for name in item.below if not name.startswith(_LONG))
            names = {"k8e_below": below, "k8e_short": short, "k8e_flags": flags}
            yield item.path, [f"{name}={_quoted(words)}" for name, words in names.items()]

    return (
        _case("_k8e_command", command_rows())
        + _case("_k8e_value", ((key, [f"k8e_kind={_quoted(v)}"]) for key, v in _values(commands)))
        + _case("_k8e_place", ((key, [f"k8e_kind={_quoted(v)}"]) for key, v in _places(commands)))
    )


def _case(name: str, rows: Rows) -> str:
    lines = [f"        {_quoted(key)}) {'; '.join(work)} ;;\n" for key, work in rows]
    return f"{name}() {{\n    case $1 in\n{''.join(lines)}    esac\n}}\n"


def _fish_tables(commands: list[CommandSyntax]) -> str:
    """The same for fish, as functions that print; with descriptions, which fish shows."""

    def described(pick: Callable[[CommandSyntax], dict[str, str]]) -> Rows:
        for item in commands:
            rows = pick(item).items()
            yield item.path, [rf"printf '%s\t%s\n' {name} {_fished(text)}" for name, text in rows]

    return (
        _switch("__k8e_command", described(lambda item: item.below))
        + _switch("__k8e_flags", described(lambda item: item.flags))
        + _switch("__k8e_value", ((key, [f"echo {_fished(v)}"]) for key, v in _values(commands)))
        + _switch("__k8e_place", ((key, [f"echo {_fished(v)}"]) for key, v in _places(commands)))
    )


def _switch(name: str, rows: Rows) -> str:
    lines: list[str] = []
    for key, work in rows:
        if work:
            lines.append(f"        case {_fished(key)}\n")
            lines += [f"            {line}\n" for line in work]
    return f"function {name}\n    switch $argv[1]\n{''.join(lines)}    end\nend\n"


def _values(commands: list[CommandSyntax]) -> Iterator[tuple[str, str]]:
    for item in commands:
        for flag, kind in item.values.items():
            yield f"{item.path} {flag}", kind


def _places(commands: list[CommandSyntax]) -> Iterator[tuple[str, str]]:
    for item in commands:
        for at, kind in enumerate(item.places):
            yield f"{item.path} {at}", kind


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fished(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


VERSION = 1
_ROOT = "k8e sandbox "


def add_catalog(commands: Commands) -> None:
    commands.add(
        "catalog",
        "print every command of k8e sandbox and its flags as JSON",
        "k8e sandbox catalog",
        show,
        remote=True,
    )


def show(_: argparse.Namespace) -> int:
    output.answer(build())
    return 0


def build() -> dict[str, Any]:
    """Every command below ``k8e sandbox`` in K8E's form, with its flags without hyphens."""
    known = list(walk_parser(cli_parser.build(), "k8e"))
    texts = {f"{item.path} {name}": text for item in known for name, text in item.below.items()}
    commands = [
        {
            "flags": [
                {"name": flag.removeprefix("--"), "usage": text}
                for flag, text in item.flags.items()
                if flag.startswith("--") and flag != "--help"
            ],
            "name": item.path.removeprefix(_ROOT),
            "usage": texts[item.path],
        }
        for item in known
        if item.path.startswith(_ROOT) and not item.below
    ]
    return {"catalog_version": VERSION, "commands": commands}
