"""Writes ``reference/cli.md``, ``conformance.md`` and ``kubernetes-tests.md``.

The first two come from the code itself, the last from the newest result of ``make test-long``.

    python docs/generate.py           write them
    python docs/generate.py --check   fail if they are not current

Not argparse's own help text: that is laid out differently by each version of Python.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from k8e.cli import parser
from k8e.conformance import report

# argparse has no public way to ask a parser for its commands and arguments.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

_OPTIONAL = {"?": "[{}]", "*": "[{} ...]"}
REFERENCE = Path(__file__).parent / "reference"
KUBERNETES_TESTS = Path(__file__).parents[1] / "tests/cluster/kubernetes_tests.json"
HEAD = """\
<!-- Written by docs/generate.py. Change the command in src/k8e/cli, then run it again. -->

# Command line

Every command prints one line of JSON with its keys in alphabetical order, unless its help says
otherwise. An error is `{"detail":…,"error":…}`: what happened, and what to do next. See
[Errors](errors.md).

Exit codes of `k8e sandbox run`:

| code | meaning |
|---|---|
| the program's own | the program ran; 128 + n if signal n ended it |
| 1 | k8e could not do it |
| 2 | no gateway could be reached or started |
| 130 | Ctrl-C; the program was killed |
| 141 | whoever read our output closed it |

A program can exit with these codes too. With JSON output, an error of k8e has the key `error` and
a result has the key `exit_code`. With `--raw`, errors of k8e go to stderr alone; else they are
told there too, in words, if it is another place than stdout.

Flags that name a variable in brackets, such as `[K8E_SANDBOX_TENANT]`, take their default from it.
"""


def main(arguments: list[str]) -> int:
    """Write the pages, or compare them; the exit code."""
    pages = {"cli.md": page(), "conformance.md": report.page()}
    if KUBERNETES_TESTS.exists():
        pages["kubernetes-tests.md"] = kubernetes_tests()
    old = [name for name, text in pages.items() if _read(REFERENCE / name) != text]
    if arguments == ["--check"]:
        for name in old:
            sys.stderr.write(f"{name} is not current; run python docs/generate.py\n")
        return 1 if old else 0
    for name in old:
        (REFERENCE / name).write_text(pages[name], "utf-8")
    return 0


def _read(path: Path) -> str:
    return path.read_text("utf-8") if path.exists() else ""


KUBERNETES_TESTS_HEAD = """\
# Kubernetes' own tests

Made by `docs/generate.py` from the newest result of `make test-long`; do not edit it.

Kubernetes comes with tests of its own. This is a sample of them, chosen from the 446 tests of the
conformance suite of {kubernetes} and from its tests of NetworkPolicy, and run unchanged by
Kubernetes' own `e2e.test`, which `k8e components install kubernetes-tests` builds. The cluster had
{nodes} nodes with `--cni={cni}`; the pods ran on runc. **{passed} of {all} passed**, in {minutes}
minutes, at a load of {load} on a machine with 2 CPUs.{again}

That is a sample: nothing is claimed of the tests that are not in it, and k8e is not certified.

- Tests of the suite that need other images than these are not in the sample, such as those that
  start nginx. Nor are those of variables with dashes in their names, which the shell of Debian's
  busybox does not pass on.
- Images that tests ask for, and what takes their place: {stand_ins}. `agnhost` is Kubernetes' own
  program, built from its source, with Debian's {programs} beside it.
"""
AGAIN = """
Of these, {tests} had failed, and ran again alone, in {minutes} minutes at a load of {load}; what
stands here of them is what became of them then."""


def kubernetes_tests() -> str:
    """What ran of Kubernetes' own tests, and what became of it."""
    result = json.loads(KUBERNETES_TESTS.read_bytes())
    tests = result["tests"]
    passed = sum(item["state"] == "passed" for item in tests)
    stand_ins = ", ".join(f"`{other}` for `{name}`" for name, other in result["stand_ins"].items())
    programs = ", ".join(f"`{name}`" for name in result["programs"])
    numbers = {"passed": passed, "all": len(tests), "minutes": round(result["seconds"] / 60)}
    numbers |= {"programs": programs, "stand_ins": stand_ins, "again": ""}
    if again := result.get("again"):
        numbers["again"] = AGAIN.format(**again, minutes=round(again["seconds"] / 60))
    lines = [KUBERNETES_TESTS_HEAD.format(**{**result, **numbers})]
    if passed < len(tests):
        lines.append("\n" + KUBERNETES_TESTS.with_suffix(".md").read_text("utf-8"))
    area = ""
    for item in tests:
        if item["area"] != area:
            area = item["area"]
            lines.append(f"\n## {area}\n\n| test | result | seconds |\n|---|---|---|\n")
        state = item["state"] if "why" not in item else f"{item['state']}: {item['why']}"
        lines.append(f"| {_cell(item['name'])} | {_cell(state)} | {item['seconds']:g} |\n")
    return "".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*") if text else ""


def page() -> str:
    """The whole page."""
    return HEAD + "".join(_command(parser.build(), []))


def _command(
    parser: argparse.ArgumentParser, path: list[str], above: frozenset[str] = frozenset()
) -> Iterator[str]:
    """One command, and then the commands below it. ``above`` are flags that it inherits."""
    actions = [item for item in parser._actions if item.help != argparse.SUPPRESS]
    groups = [item for item in actions if isinstance(item, argparse._SubParsersAction)]
    inherited = above | {"help"}
    others = [item for item in actions if item not in groups and item.dest not in inherited]
    if path:
        yield f"\n## {' '.join(['k8e', *path])}\n\n{parser.description}\n"
        usage = _usage(path, others, groups)
        yield f"\n```text\n{usage}\n```\n"
        yield from _table(others)
        if above:
            yield f"\nIt also takes the flags of [k8e {path[0]}](#k8e-{path[0]}).\n"
        yield from _examples(parser.epilog or "", usage)
    for group in groups:
        for name, child in group.choices.items():
            flags = frozenset(item.dest for item in others if path and item.option_strings)
            shared = flags & {item.dest for item in child._actions}
            yield from _command(child, [*path, name], shared)


def _usage(
    path: list[str],
    others: list[argparse.Action],
    groups: list[argparse._SubParsersAction[argparse.ArgumentParser]],
) -> str:
    words = ["k8e", *path]
    if any(item.option_strings for item in others):
        words.append("[flags]")
    places = [item for item in others if not item.option_strings]
    words += [_OPTIONAL.get(str(item.nargs), "{}").format(_value(item)) for item in places]
    for group in groups:
        words.append(group.metavar if isinstance(group.metavar, str) else "COMMAND")
        if not group.required and path != ["sandbox"]:
            words[-1] = f"[{words[-1]}]"
    return " ".join(words)


def _table(others: list[argparse.Action]) -> Iterator[str]:
    if not others:
        return
    yield "\n| argument | meaning |\n|---|---|\n"
    for item in others:
        names = ", ".join(f"`{name}`" for name in item.option_strings) or f"`{_value(item)}`"
        if item.option_strings and item.nargs != 0:
            names += f" `{_value(item)}`"
        text = (item.help or _plain(item)).replace("|", "\\|")
        yield f"| {names} | {text} |\n"


def _value(item: argparse.Action) -> str:
    if isinstance(item.metavar, str):
        return item.metavar
    if item.choices is not None:
        return "|".join(map(str, item.choices)).replace("|", " or ")
    return item.dest.upper()


def _plain(item: argparse.Action) -> str:
    """What an argument without help means, as far as its name says it."""
    return "the session's id" if item.metavar == "ID" else item.dest.replace("_", " ")


def _examples(epilog: str, usage: str) -> Iterator[str]:
    """What the help shows, unless that is no more than the usage."""
    lines = [line.strip() for line in epilog.removeprefix("example:").splitlines()]
    if lines != [usage]:
        yield "\nFor example:\n\n```text\n" + "".join(f"$ {line}\n" for line in lines) + "```\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
