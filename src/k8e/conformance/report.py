"""The reference page of the suite: every promise, and every line of the checklist."""

from __future__ import annotations

from k8e.conformance import ALL
from k8e.conformance.checklist import lines
from k8e.runtimes.registry import names

HEAD = """\
<!-- Written by docs/generate.py from src/k8e/conformance. Run it again after a change there. -->

# Conformance

`k8e conformance run` checks every promise below on the machine on which it runs, in folders and
on an internet of its own; see [Check a machine](../howto/conformance.md). The same functions run
in k8e's own tests. An id never changes its meaning.
"""
CHECKLIST = """
## The attack checklist

What attackers of sandboxes try, and which promises answer it.

| line | what is tried | promises | not here |
|---|---|---|---|
"""
PROMISES = """
## Promises

Where a runtime is left out, the table below tells why.

| id | promise | runtimes | checklist |
|---|---|---|---|
"""
GAPS = """
## Known gaps

| id | runtime | why it does not hold |
|---|---|---|
"""


def page() -> str:
    """The whole page."""
    runtimes = sorted(names())
    found = lines(ALL)
    text = HEAD + CHECKLIST
    for line in found:
        ids = ", ".join(f"`{name}`" for name in line.checks)
        text += f"| {line.key} | {line.text} | {ids} | {line.elsewhere} |\n"
    text += PROMISES
    for item in ALL.values():
        kept = ", ".join(name for name in runtimes if name not in item.gaps)
        keys = ", ".join(line.key for line in found if item.id in line.checks)
        text += f"| `{item.id}` | {item.promise} | {kept} | {keys} |\n"
    text += GAPS
    for item in ALL.values():
        text += "".join(f"| `{item.id}` | {name} | {why} |\n" for name, why in item.gaps.items())
    return text
