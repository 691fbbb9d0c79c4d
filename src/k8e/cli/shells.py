"""The three scripts of ``k8e completion``. Each walks the line with the same tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from k8e.cli.completing import Command

# K8E's long names, offered only to who has begun one: they would stand between `k8e sand` TAB and
# `k8e sandbox`, which is what everybody means.
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


def bash(commands: list[Command]) -> str:
    head = "# Completion of k8e for bash: source <(k8e completion bash)\n"
    return head + _tables(commands) + _BASH % {"walk": _WALK}


def zsh(commands: list[Command]) -> str:
    head = "#compdef k8e\n# Completion of k8e for zsh: source <(k8e completion zsh)\n"
    return head + _tables(commands) + _ZSH % {"walk": _WALK}


def fish(commands: list[Command]) -> str:
    head = "# Completion of k8e for fish: k8e completion fish | source\n"
    return head + _fish_tables(commands) + _FISH


Rows = Iterator[tuple[str, list[str]]]


def _tables(commands: list[Command]) -> str:
    """What bash and zsh look up, as functions that set variables."""

    def about() -> Rows:
        for item in commands:
            below, flags = " ".join(item.below), " ".join(item.flags)
            short = " ".join(name for name in item.below if not name.startswith(_LONG))
            names = {"k8e_below": below, "k8e_short": short, "k8e_flags": flags}
            yield item.path, [f"{name}={_quoted(words)}" for name, words in names.items()]

    return (
        _case("_k8e_command", about())
        + _case("_k8e_value", ((key, [f"k8e_kind={_quoted(v)}"]) for key, v in _values(commands)))
        + _case("_k8e_place", ((key, [f"k8e_kind={_quoted(v)}"]) for key, v in _places(commands)))
    )


def _case(name: str, rows: Rows) -> str:
    lines = [f"        {_quoted(key)}) {'; '.join(work)} ;;\n" for key, work in rows]
    return f"{name}() {{\n    case $1 in\n{''.join(lines)}    esac\n}}\n"


def _fish_tables(commands: list[Command]) -> str:
    """The same for fish, as functions that print; with descriptions, which fish shows."""

    def described(pick: Callable[[Command], dict[str, str]]) -> Rows:
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


def _values(commands: list[Command]) -> Iterator[tuple[str, str]]:
    for item in commands:
        for flag, kind in item.values.items():
            yield f"{item.path} {flag}", kind


def _places(commands: list[Command]) -> Iterator[tuple[str, str]]:
    for item in commands:
        for at, kind in enumerate(item.places):
            yield f"{item.path} {at}", kind


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _fished(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
